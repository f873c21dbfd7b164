"""The command line. Everything heavy is imported inside the commands, so that ``--help`` is quick."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mergekit_slta import __version__, files
from mergekit_slta.errors import SltaError, one_line

if TYPE_CHECKING:
    from mergekit.config import MergeConfiguration
    from mergekit.options import MergeOptions

    from mergekit_slta.checks.examine import Findings
    from mergekit_slta.engine.ranks import Ranks
    from mergekit_slta.recipe.experiment import Experiment
    from mergekit_slta.slta.statistics import Statistics

LEVELS_HELP = "model, layer, attn_mlp, head_mlp or linear"
INTERRUPTED = 130


class _Commands(click.Group):
    """The commands; what files, the Hub and the network refuse ends one of them in a sentence, not in a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe has gone, which click handles
                raise
            raise SltaError(str(error)) from error
        except UnicodeEncodeError as error:  # an escape such as \\ud800 gives half a character
            spoilt = error.object[max(0, error.start - 20) : error.end + 20]
            raise SltaError(f"{spoilt!r} holds a character that is none: write it anew where it comes from.") from error


class _MergeCommand(click.Command):
    """A command with all of mergekit-yaml's options, read from there only when it is used."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from mergekit.scripts.run_yaml import main as mergekit_yaml

        return [*super().get_params(ctx), *(p for p in mergekit_yaml.params if isinstance(p, click.Option))]


def _model_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say how models are had, with mergekit's names."""
    options = [
        click.option("--device", help="Where to compute: cpu, cuda, cuda:1 ... or auto.  [default: cpu]"),
        click.option("--cuda/--no-cuda", default=False, help="Compute on the GPU."),
        click.option(
            "--trust-remote-code/--no-trust-remote-code",
            default=False,
            help="Run the Python code that comes with a model (dangerous).",
        ),
        click.option("--lora-merge-cache", help="Folder for models with their LoRA adapter merged in."),
        click.option("--transformers-cache", help="Folder for downloaded models."),
        click.option("--quiet/--no-quiet", default=False, help="No progress bars, nothing that is not needed."),
        click.option("-v", "verbosity", count=True, help="More log messages; -vv for still more."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _existing_file(argument: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.argument(argument, type=click.Path(exists=True, dir_okay=False, path_type=Path))


def _output_folder(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "-o",
        "--output",
        "folder",
        required=True,
        metavar="DIR",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder to write to.",
    )(command)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mergekit-slta")
def main() -> None:
    """Merge fine-tuned models with weights that are solved for, not searched for.

    A recipe is a mergekit YAML file with 'merge_method: slta' or 'featcal', or with 'actmat' or 'sftm', which need no
    data. `check` it, then `merge` it (or run mergekit-yaml, which does the same). To look at the weights of slta
    first, or to solve several merges from one measurement: `calibrate` writes a small statistics file, and `solve`
    gets merging weights and plain mergekit recipes from it in a second, without models and without data; `report`
    shows what the merge keeps of each expert. `evaluate` tells how well the merged model does, and `linearity`
    whether the experts are of a kind that can be merged.
    """


@main.command(short_help="Say everything that is wrong with a recipe.")
@_existing_file("recipe")
@_model_options
def check(recipe: Path, **options: Any) -> None:
    """Say everything that is wrong with RECIPE, before anything is computed.

    Reads configurations, file headers and calibration data, no weights. Exit code 1 if something is wrong.
    """
    merge_options = _merge_options(options)
    found = _examine(_read_recipe(recipe), merge_options, running=False)
    _say(found.notes, merge_options.quiet)
    if not found.problems:
        click.echo(f"{recipe}: no problem found.")
        return
    count = len(found.problems)
    click.echo("\n- ".join([f"{recipe}: {count} problem{'s' * (count > 1)} found.", *found.problems]), err=True)
    raise click.exceptions.Exit(1)


@main.command(short_help="Measure a recipe's models, write a statistics file.")
@_existing_file("recipe")
@click.option("-o", "--output", "stats", required=True, metavar="STATS", help="The statistics file to write.")
@click.option(
    "--level",
    "levels",
    multiple=True,
    metavar="LEVEL",
    help=f"What gets a merging weight of its own: {LEVELS_HELP}. May be given several times.  [default: the recipe's]",
)
@_model_options
def calibrate(recipe: Path, stats: str, levels: Sequence[str], **options: Any) -> None:
    """Measure RECIPE's models on its calibration data, and write the statistics file STATS.

    The file is small, holds neither weights nor data, and is all that `solve` needs. After a crash or an interruption
    the same command goes on where it was; a finished file that fits is left as it is, and one that lacks a level gets
    it. On several GPUs: torchrun --nproc-per-node N -m mergekit_slta calibrate RECIPE -o STATS
    """
    from mergekit_slta.recipe.recipe import SltaSettings, shared_settings
    from mergekit_slta.slta.measure import measured_statistics

    merge_options = _merge_options(options)
    path = Path(stats)
    try:
        with _joined_ranks() as ranks:
            levels = ranks.together(lambda: _known_levels(levels))
            ranks.together(lambda: _refuse_output(stats))
            experiment, source = _examined_experiment(recipe, merge_options, ranks)
            before = _identity(path)
            wanted = levels or [shared_settings(source.config, SltaSettings).level]
            statistics = measured_statistics(experiment, wanted, path)
    except KeyboardInterrupt:
        click.echo(f"\nInterrupted. To go on where it was, run the same command again ({path}.partial).", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if ranks.first:
        found = "fits already and was not touched" if before and before == _identity(path) else "written"
        click.echo(f"{path} {found}: {_describe(statistics, path)}")


@main.command(short_help="Get merging weights and recipes from a statistics file.")
@click.argument("stats")
@click.option("--level", metavar="LEVEL", help=f"{LEVELS_HELP}.  [default: attn_mlp if STATS has it]")
@click.option("--models", metavar="A,B", help="Merge only these experts, named as in STATS.  [default: all]")
@click.option(
    "--task-weight",
    "task_weights",
    multiple=True,
    metavar="A=2.0",
    help="How much an expert's task counts against the others', 1.0 by default. May be given several times.",
)
@click.option(
    "--ridge", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Draws the weights towards zero."
)
@click.option("--balance/--no-balance", default=True, show_default=True, help="Give every sample the same influence.")
@click.option("--samples", type=click.IntRange(min=1), metavar="K", help="Use the first K samples of each task only.")
@click.option(
    "--bootstrap",
    type=click.IntRange(min=2),
    metavar="R",
    help="Also the weights' standard errors, from R draws of the samples.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write the solution as JSON; '-' for standard output.")
@click.option("--recipe", "recipe_file", metavar="FILE", help="Write a mergekit recipe that runs without this package.")
@click.option(
    "--model",
    "paths",
    multiple=True,
    metavar="NAME=PATH",
    help="Path or Hub id to write in the recipe for a model, the base model included, that STATS calls NAME. "
    "May be given several times.",
)
@click.option(
    "--edges",
    type=click.Choice(["base", "mean"]),
    default="base",
    show_default=True,
    help="In the recipe, embeddings, final norm and output head: the base model's, or merged with the mean weights.",
)
@click.option("--tokenizer-source", metavar="X", help="mergekit's tokenizer_source, for the recipe.")
@click.option(
    "--trust-remote-code/--no-trust-remote-code",
    default=False,
    help="For --recipe: run the Python code that comes with the base model (dangerous).",
)
@click.option("--transformers-cache", help="Folder for downloaded files.")
@click.option("--quiet/--no-quiet", default=False, help="No table.")
def solve(
    stats: str,
    level: str | None,
    models: str | None,
    task_weights: tuple[str, ...],
    ridge: float,
    balance: bool,
    samples: int | None,
    bootstrap: int | None,
    json_file: str | None,
    recipe_file: str | None,
    paths: tuple[str, ...],
    edges: str,
    tokenizer_source: str | None,
    trust_remote_code: bool,
    transformers_cache: str | None,
    quiet: bool,
) -> None:
    """Solve for the merging weights from the statistics file STATS.

    STATS is a file that `calibrate` wrote, or hf:ORG/REPO/FILE[@REVISION] on the Hugging Face Hub. Takes a second and
    needs neither models nor data. Prints, for each submodule, the merging weight of each expert and the share of its
    feature change that the merge keeps.
    """
    from mergekit_slta.slta.statistics import Statistics

    with _one_thread():
        measured = Statistics.load(stats, transformers_cache)
        chosen = measured if models is None else measured.select(*map(str.strip, models.split(",")))
        solution = chosen.solve(
            level,
            balance=balance,
            ridge=ridge,
            task_weights=_task_weights(task_weights, chosen.info.models),
            samples=samples,
        )
        errors = solution.bootstrap(bootstrap) if bootstrap else None
    if json_file == "-":
        click.echo(solution.to_json(errors), nl=False)
    elif not quiet:
        click.echo(solution.text(errors))
    if json_file and json_file != "-":
        files.write(Path(json_file), solution.to_json(errors).encode())
    if recipe_file:
        known = (measured.info.base_model, *measured.info.models)
        renamed = dict(_assignment(entry, known, "--model") for entry in paths)
        solution.save_recipe(
            recipe_file,
            models={name: path for name, path in renamed.items() if name in (known[0], *solution.models)},
            edges=edges,
            tokenizer_source=tokenizer_source or "",
            trust_remote_code=trust_remote_code,
        )


@main.command(short_help="Measure how well a merged model does each task.")
@_existing_file("recipe")
@click.argument("out", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--samples", type=click.IntRange(min=1), default=100, show_default=True, help="Held-out records of each task."
)
@click.option("--json", "json_file", metavar="FILE", help="Write the numbers as JSON; '-' for standard output.")
@_model_options
def evaluate(recipe: Path, out: Path, samples: int, json_file: str | None, **options: Any) -> None:
    """Measure how well the merged model in OUT does the tasks of RECIPE's experts.

    For each task: the negative log-likelihood per token (lower is better) of the base model, of the task's expert and
    of the merged model, on records that calibration did not use, and the share of the expert's gain over the base
    model that the merge keeps. One model is in memory at a time, in float32.
    """
    import transformers

    from mergekit_slta.evaluate import evaluate as evaluate_merge

    merge_options = _merge_options(options)
    experiment, _ = _examined_experiment(recipe, merge_options)
    transformers.utils.logging.disable_progress_bar()  # a bar of its own for every model
    evaluation = evaluate_merge(experiment, out, samples)
    if json_file == "-":
        click.echo(evaluation.to_json(), nl=False)
        return
    click.echo(evaluation)
    if json_file:
        files.write(Path(json_file), evaluation.to_json().encode())


@main.command(short_help="Measure how linear a recipe's models are in their weights.")
@_existing_file("recipe")
@_output_folder
@click.option(
    "--level",
    "levels",
    multiple=True,
    metavar="LEVEL",
    help=f"{LEVELS_HELP}. May be given several times.  [default: model, layer, attn_mlp]",
)
@click.option("--samples", type=click.IntRange(min=1), default=5, show_default=True, help="Samples of each task.")
@click.option("--pairs/--no-pairs", default=True, show_default=True, help="25 merges of every two experts.")
@click.option("--triples", is_flag=True, help="27 merges of every three experts.")
@_model_options
def linearity(
    recipe: Path, folder: Path, levels: Sequence[str], samples: int, pairs: bool, triples: bool, **options: Any
) -> None:
    """Measure how linear RECIPE's models are in their weights, as the paper does, before merging them.

    The non-linearity score of every expert, and how far merges of them are from adding up: linearity.json, and a page
    with figures (linearity.html) in DIR. Takes as long as tens of calibrations; how many forward passes is said first.
    """
    from mergekit_slta.linearity.scores import DEFAULT_LEVELS, plan_linearity
    from mergekit_slta.reports.linearity import score_table, write_linearity

    merge_options = _merge_options(options)
    chosen = _known_levels(levels) or DEFAULT_LEVELS
    experiment, _ = _examined_experiment(recipe, merge_options)
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_linearity(experiment, chosen, samples=samples, pairs=pairs, triples=triples)
    click.echo(f"{plan}.")
    result = plan.measure_visibly(merge_options.quiet)
    path = write_linearity(result, folder)
    click.echo(f"{score_table(result)}\n\n{path} written")


@main.command(short_help="Show what a merge keeps and how sure its weights are.")
@click.argument("stats")
@_output_folder
@click.option("--transformers-cache", help="Folder for downloaded files.")
def report(stats: str, folder: Path, transformers_cache: str | None) -> None:
    """Write a page with figures (report.html) on the merge that the statistics file STATS gives.

    What it keeps of each expert, layer by layer, the merging weights with their intervals, where they are unreliable,
    how the experts interfere, and whether fewer samples would have been enough; at every level that STATS holds.
    STATS is a file that `calibrate` wrote, or hf:ORG/REPO/FILE[@REVISION] on the Hugging Face Hub.
    """
    from mergekit_slta.reports.merge import report_page
    from mergekit_slta.slta.statistics import Statistics

    with _one_thread():
        page = report_page(Statistics.load(stats, transformers_cache))
        path = page.write(folder, "report.html")
    click.echo(f"{page.verdict[0]}\n\n{path} written")


@main.command(cls=_MergeCommand, short_help="Merge, as mergekit-yaml does.")
@_existing_file("recipe")
@click.argument("out")
def merge(recipe: Path, out: str, **options: Any) -> None:
    """Merge RECIPE's models into the folder OUT, as mergekit-yaml does, with a check first.

    For places where Python's start-up files are off and mergekit-yaml does not know our methods; takes all of
    mergekit-yaml's options. Under torchrun all processes calibrate, and the first one merges.
    """
    from mergekit.merge import run_merge

    from mergekit_slta.checks.examine import Findings, examined
    from mergekit_slta.methods import registry

    registry.register()
    registry.watch_planner()
    merge_options = _merge_options(options)
    found = Findings([], [])
    with _joined_ranks() as ranks:
        source = ranks.together(lambda: _read_recipe(recipe))
        if source.config.merge_method in [method.spec.name for method in registry.METHODS]:
            found = ranks.together(lambda: _refuse(_examine(source, merge_options, out_path=out)))
            _say(found.notes, merge_options.quiet or not ranks.first)
        if ranks.count > 1:
            _share_work(source, found, merge_options, ranks)
    if ranks.first:
        with _full_disk_said(source, merge_options, Path(out)), examined(source.config, found):
            _open_models(source, merge_options)
            run_merge(source.config, out, options=merge_options, config_source=source.text)


# From the command line to what the package takes


def _merge_options(options: Mapping[str, Any]) -> MergeOptions:
    """mergekit's options, its logging set up; under torchrun the processes are spread over the GPUs."""
    import torch
    from mergekit.options import MergeOptions

    merge_options = MergeOptions(**options)
    if merge_options.device == "cuda" and "LOCAL_RANK" in os.environ:
        index = int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count())
        merge_options = merge_options.model_copy(update={"device": f"cuda:{index}"})
    merge_options.apply_global_options()
    return merge_options


@dataclass(frozen=True)
class _Source:
    """A recipe: its text, what YAML makes of it, and what mergekit does."""

    text: str
    content: Any
    config: MergeConfiguration


def _read_recipe(path: Path) -> _Source:
    import yaml
    from mergekit.config import MergeConfiguration
    from pydantic import ValidationError

    content = path.read_bytes()
    kind = "UTF-8 text"
    try:
        text = content.decode()
        kind = "YAML"
        source = yaml.safe_load(text)
        kind = "mergekit recipe"
        return _Source(text, source, MergeConfiguration.model_validate(source))
    except ValidationError as error:
        said = "; ".join(f"'{'.'.join(map(str, entry['loc']))}': {entry['msg']}" for entry in error.errors())
    except RuntimeError as error:  # what mergekit's own checks raise
        said = str(error)
    except Exception as error:  # what parses the values of YAML's tags raises errors of any kind
        said = one_line(error)
    raise SltaError(f"{path} is no {kind}: {said}.")


def _examine(source: _Source, options: MergeOptions, **purpose: Any) -> Findings:
    """What there is to say about a recipe of ours; one for a measurement alone must have something to measure."""
    from mergekit_slta.checks.examine import examine
    from mergekit_slta.methods.registry import METHODS
    from mergekit_slta.recipe.recipe import calibrates

    merging = purpose.get("merging", True)
    known = {method.spec.name: method.spec for method in METHODS if merging or calibrates(method.spec)}
    name = source.config.merge_method
    if name not in known:
        raise SltaError(f"The recipe's merge_method is '{name}': this command knows {', '.join(known)}.")
    return examine(source.config, options, known[name], source=source.content, **purpose)


def _refuse(found: Findings) -> Findings:
    """End with the problems, if there are any."""
    if found.problems:
        raise SltaError("\n".join(found.problems))
    return found


def _examined_experiment(recipe: Path, options: MergeOptions, ranks: Ranks | None = None) -> tuple[Experiment, _Source]:
    """A sound recipe with its models and data; no process goes on before all have found it sound."""
    from mergekit_slta.engine.ranks import Ranks

    ranks = ranks or Ranks()
    source = ranks.together(lambda: _read_recipe(recipe))
    found = ranks.together(lambda: _refuse(_examine(source, options, merging=False)))
    return _experiment(source, found, options, ranks), source


def _say(notes: Sequence[str], quiet: bool) -> None:
    for note in notes if not quiet else ():
        click.echo(f"Note: {note}", err=True)


def _experiment(source: _Source, found: Findings, options: MergeOptions, ranks: Ranks) -> Experiment:
    """A recipe's models and data; what only a download shows of the models is examined now."""
    import transformers
    from mergekit.io.tasks import LoaderCache

    from mergekit_slta.recipe.experiment import Experiment
    from mergekit_slta.recipe.recipe import from_config

    if options.quiet or not ranks.first:
        transformers.utils.logging.disable_progress_bar()
    LoaderCache().setup(options)
    experiment = Experiment(
        from_config(source.config),
        device=str(options.device),
        trust_remote_code=options.trust_remote_code,
        cache_dir=options.transformers_cache,
        quiet=options.quiet,
        ranks=ranks,
    )
    if not found.seen:
        ranks.together(experiment.open)
        ranks.together(lambda: _refuse(_examine(source, options, merging=False)))
    return experiment


def _open_models(source: _Source, options: MergeOptions) -> None:
    """Download the models and merge the adapters as mergekit would do, and name what cannot be opened."""
    from mergekit.io.tasks import LoaderCache

    from mergekit_slta.models.checkpoint import Checkpoint

    LoaderCache().setup(options)
    for reference in source.config.referenced_models():
        Checkpoint(reference, options.trust_remote_code).open()


@contextlib.contextmanager
def _full_disk_said(source: _Source, options: MergeOptions, out: Path) -> Iterator[None]:
    """Say which disk has filled up and what it lacks, whichever library has met its end."""
    from mergekit_slta.checks.space import full_disk_problem, is_disk_full

    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise SltaError(full_disk_problem(source.config, options, out)) from error


def _share_work(source: _Source, found: Findings, options: MergeOptions, ranks: Ranks) -> None:
    """Compute with all processes what the merge would compute with one before its first tensor."""
    from mergekit_slta.featcal.scratch import solve_model
    from mergekit_slta.recipe.recipe import FeatcalSettings, SltaSettings, shared_settings
    from mergekit_slta.slta.measure import measured_statistics
    from mergekit_slta.slta.statistics import PUBLISHED_PREFIX, resolve_statistics

    method = source.config.merge_method
    if method == "featcal":
        experiment = _experiment(source, found, options, ranks)
        solve_model(experiment, shared_settings(source.config, FeatcalSettings)).release()
    elif method == "slta":
        settings = shared_settings(source.config, SltaSettings)
        if not settings.statistics.startswith(PUBLISHED_PREFIX):
            path = resolve_statistics(settings.statistics) if settings.statistics else None
            measured_statistics(_experiment(source, found, options, ranks), [settings.level], path)


@contextlib.contextmanager
def _joined_ranks() -> Iterator[Ranks]:
    """The processes that torchrun started; only the first one talks."""
    from mergekit_slta.engine.ranks import join, leave

    ranks = join()
    if not ranks.first:
        logging.disable(logging.WARNING)
    try:
        yield ranks
    finally:
        leave()


def _known_levels(levels: Sequence[str]) -> list[str]:
    from mergekit_slta.levels import LEVELS

    for level in levels:
        if level not in LEVELS:
            raise click.BadParameter(f"'{level}' is none of {', '.join(LEVELS)}.", param_hint="--level")
    return [level for level in LEVELS if level in levels]


def _refuse_output(stats: str) -> None:
    """Refuse what is no local file's name."""
    if stats.startswith("hf:"):
        raise SltaError(f"-o {stats} is on the Hub: write a local file, then publish it with 'hf upload'.")
    if Path(stats).is_dir():
        raise SltaError(f"-o {stats} is a folder: name a file in it, such as {Path(stats) / 'stats.safetensors'}.")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For many tiny matrices, on which threads cost more than they give."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _assignment(entry: str, names: Sequence[str], option: str) -> tuple[str, str]:
    """The two sides of NAME=VALUE, where a name may hold an equals sign itself."""
    for name in sorted(names, key=len, reverse=True):
        if entry.startswith(f"{name}=") and entry != f"{name}=":
            return name, entry.removeprefix(f"{name}=")
    raise SltaError(f"{option} {entry}: write NAME=VALUE, with a name that the statistics hold ({', '.join(names)}).")


def _task_weights(entries: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    weights = {}
    for entry in entries:
        name, value = _assignment(entry, names, "--task-weight")
        try:
            weights[name] = float(value)
        except ValueError:
            raise SltaError(f"--task-weight {entry}: '{value}' is no number.") from None
    return weights


# What is printed and written


def _identity(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written anew."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None


def _describe(statistics: Statistics, path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.2f} MB, {statistics}"
