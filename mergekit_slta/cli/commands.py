"""The command line. Everything heavy is imported inside the commands, so that ``--help`` is quick."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from mergekit_slta import __version__, files
from mergekit_slta.cli import options as shared
from mergekit_slta.cli.options import COUNT, FILE, FOLDER, LEVELS_HELP, ModelCommand, Result, ResultCommand, applied
from mergekit_slta.data.prompts import TOPICS, general_prompts
from mergekit_slta.errors import SltaError, as_note, files_named, interruptible, printable
from mergekit_slta.recipe.new import ADAPTER_OPTION, METHODS, new_recipe
from mergekit_slta.tables import known_names
from mergekit_slta.words import enumerated

INTERRUPTED = 130  # what shells report of a program that Ctrl-C has ended


class _Commands(click.Group):
    """The commands; errors of files, the Hub and the network end a command with a sentence, not a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with files_named():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mergekit-slta")
def main() -> None:
    """Merge fine-tuned language models, from a few prompts per model or from their parameters alone.

    A recipe is a mergekit YAML file. Its merge_method is featcal or slta, which compute the merge from a few prompts
    per model, or actmat or sftm, which need no prompts. `auto` runs all steps from names to a scored merge. By hand,
    `new` prints a recipe to start from, and `ask` has the models answer prompts. `check` the recipe, then `merge` it
    (mergekit-yaml does the same). `verify` re-reads a finished merge, `evaluate` measures how well merged models do
    each task, and `publish` uploads a merged model.

    Four commands serve slta alone. `calibrate` measures the models and writes a small statistics file. From this file
    `solve` computes merging weights and plain mergekit recipes in a second, and `report` shows what the merge retains
    of each expert. `linearity` measures how far an expert's effect is from being proportional to its weight.

    The exit code is 0 for a result without problems; 1 if a recipe, a model, data or a merge is wrong or missing, or
    options do not fit these or each other; 2 for a command line that cannot be read, such as one with an unknown
    option; 3 if only the machine or the network fails (disk, memory, device, the Hub), so that the same command may
    succeed later or elsewhere; and 130 after Ctrl-C.

    With --json, a command writes a JSON object, even if it fails: its name (`command`), its `exit_code`, the `problems`
    in a sentence each, and its result. For `check`, `verify`, `evaluate` and `publish`, this is what the Python
    function returns; for `merge`, the folder `out` and its `manifest`; for `auto`, the verdict's `lines` and the
    `best` merge, or with --dry-run the plan's `lines`. `solve` writes nothing but its result.
    """


@main.command(short_help="Print a commented recipe to start from.")
@click.argument("base")
@click.argument("experts", metavar="EXPERT...", nargs=-1, required=True)
@click.option("--method", type=click.Choice(METHODS), default="featcal", show_default=True, help="The merge method.")
@shared.calibration_files
@click.option("--weight", type=float, help="The experts' weight, for methods that do not solve it.")
@click.option("--report", metavar="DIR", help="The folder for the merge's report, with featcal and slta.")
def new(base: str, experts: tuple[str, ...], method: str, **options: Any) -> None:
    """Print a commented recipe for merging each EXPERT, which was fine-tuned from the model BASE.

    Models are folders or Hub ids; write an adapter after its base model, BASE+ADAPTER. Save the recipe with
    '> recipe.yml', then `check` it. --calibration gives a model a file or dataset of prompts: write it once for each
    EXPERT, in their order, and once more for the base model, to keep its abilities. For the models' answers, and for
    files that do not exist yet, the recipe lists the `ask` commands that write them. The methods actmat and sftm need
    no prompts; task_arithmetic and ties are mergekit's own methods, for comparison.
    """
    click.echo(new_recipe(base, experts, method, **options), nl=False)


@main.command(cls=ModelCommand, short_help="Merge, compare and judge, from the names of models.")
@click.argument("base")
@click.argument("experts", metavar="EXPERT...", nargs=-1, required=True)
@click.option("-o", "--output", "folder", required=True, metavar="FOLDER", type=FOLDER, help="The folder to write.")
@shared.calibration_files
@click.option(
    "--keep-base/--no-keep-base",
    default=True,
    show_default=True,
    help="Keep the base model's abilities; one expert needs that.",
)
@click.option("--keep", is_flag=True, help="Delete no merged model; by default, featcal's and the best remain.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@shared.json_option
def auto(base: str, experts: tuple[str, ...], folder: Path, keep: bool, dry_run: bool, **options: Any) -> Result:
    """Merge each EXPERT, a fine-tune of the model BASE, with featcal, compare the merge, and say what it is worth.

    The command first writes recipes, which you may edit, says what it is going to do, and refuses what `check` refuses.
    Models without --calibration answer prompts of the package. The merge is compared with simple merges that need no
    prompts. Every step is printed as the command that does the same, and FOLDER holds what it writes: recipes, answers,
    merged models, scores.json, log.txt, and report.html on the merge. The same command goes on after an interruption,
    and after a change runs the steps that the change concerns.
    """
    from mergekit_slta.cli import auto as automatic

    folder = folder.expanduser()  # as a shell does, but not behind '='
    if any("+" in expert for expert in experts) and not options["lora_merge_cache"]:
        options["lora_merge_cache"] = str(folder / "adapters")

    def typed(words: Sequence[str]) -> None:
        command = main.commands[words[0]]
        with command.make_context(words[0], [*words[1:]]) as context, suppress(click.exceptions.Exit):
            command.invoke(context)  # commands with a result end so

    of_plan = {name: options.pop(name) for name in ("calibration", "keep_base")}
    planned = automatic.Plan(base, experts, folder, **of_plan)
    run = automatic.Run(planned, typed, options["quiet"])
    for step in planned.recipes.values() if not dry_run else ():
        if not step.output.exists():  # before the check, which may ask for an edit
            run.take(step)
    written = run.is_done(planned.recipes[automatic.MERGE])
    experiment = planned.checked(applied(options), written, dry_run)
    planned.options = [*experiment.same_options(), *["--quiet"] * options["quiet"]]
    lines = "\n".join(planned.described(experiment)).splitlines()
    if outdated := run.outdated():
        lines.append(f"Made again, because a version, the command or an input differs: {enumerated(outdated)}.")
    for line in lines:
        click.echo(line, err=True)
    if dry_run:
        return Result({"lines": lines})
    with interruptible("goes on after the steps that are finished", "the same auto command"):
        judged = run.make(experiment, keep)
    return Result(judged._asdict(), "\n".join(judged.lines))


@main.command(cls=ModelCommand, short_help="Write a model's answers to prompts as calibration data.")
@click.argument("model", required=False)
@click.argument("prompts", required=False, default="")
@click.option(
    *("-o", "--output", "out"),
    required=True,
    type=FILE,
    help="The .jsonl file to write; with --prompts-only, the .txt file.",
)
@click.option(
    "--topic", "topics", multiple=True, type=click.Choice(TOPICS), help="Topic of the package's prompts; repeatable."
)
@click.option("--samples", type=COUNT, default=100, show_default=True, help="The most prompts to answer.")
@click.option("--max-new-tokens", type=COUNT, default=512, show_default=True, help="The most tokens of each answer.")
@click.option("--prompts-only", is_flag=True, help="Write the package's prompts to a .txt file, without answers.")
def ask(model: str | None, out: Path, topics: tuple[str, ...], prompts_only: bool, **options: Any) -> None:
    """Have MODEL answer prompts, and write prompts and answers to FILE, which a recipe names as `calibration`.

    PROMPTS is a file or dataset in one of the forms that `calibration` takes; answers in it are ignored, but a row with
    `text` alone is asked whole. By default, MODEL answers general prompts that come with the package. Write an adapter
    after its base model, BASE+ADAPTER. The whole model is loaded into memory. After an interruption, the same command
    resumes. --prompts-only needs no MODEL: it writes the prompts for another program to answer.
    """
    if prompts_only and model:
        raise SltaError("--prompts-only writes the package's prompts without a model: leave MODEL out.")
    if prompts_only:
        chosen = general_prompts(topics)[: options["samples"]]
        files.write(files.new_file(out, ".txt"), "".join(f"{prompt}\n" for prompt in chosen).encode())
    elif model:
        from mergekit_slta.asking.ask import ask as answered

        settings = {name: options.pop(name) for name in ("prompts", "samples", "max_new_tokens")}
        with interruptible("resumes after the finished answers"):
            answered(model, out, topics=topics, **settings, **applied(options))
    else:
        raise click.UsageError("Missing argument 'MODEL'.")
    click.echo(f"{out} written.")


@main.command(cls=ModelCommand, short_help="Find everything that is wrong with a recipe.")
@shared.recipe_path
@shared.json_option
def check(recipe: Path, **options: Any) -> Result:
    """Find everything that is wrong with RECIPE, before anything large is downloaded or computed.

    The command checks the recipe, then models, data and the disk for downloads. It reads configurations, the headers of
    the model files (from the Hub, for models there) and calibration data in local files. It prints the download, the
    disk space and the memory that the merge needs; `merge` also checks that the output's disk has the space.
    """
    from mergekit_slta.checks import examine

    findings = examine.check(recipe, **applied(options))
    if findings.problems:
        return Result(vars(findings), warning=f"{recipe}: {findings}", exit_code=findings.exit_code)
    for note in findings.notes if not options["quiet"] else ():
        click.echo(as_note(note), err=True)
    return Result(vars(findings), f"{recipe}: no problem found. {findings.verdict}\n{findings.needs}")


@main.command(cls=ModelCommand, short_help="Measure a recipe's models and write a statistics file.")
@shared.recipe_path
@click.option("-o", "--output", "stats", required=True, metavar="STATS", type=FILE, help="The file to write.")
@shared.measured_levels("the recipe's")
def calibrate(recipe: Path, stats: Path, levels: list[str], **options: Any) -> None:
    """Measure RECIPE's models on its prompts, and write the statistics file STATS.

    The file is small and contains neither tensors of the models nor prompts; `solve` needs only this file. After an
    interruption, the same command resumes the measurement. A finished file is never changed: if STATS belongs to
    another recipe or lacks a level, the command ends with an error. On several GPUs:
    torchrun --nproc-per-node N -m mergekit_slta calibrate RECIPE -o STATS
    """
    from mergekit_slta.checks.examine import sound_experiment
    from mergekit_slta.engine.ranks import joined
    from mergekit_slta.recipe.recipe import Recipe
    from mergekit_slta.slta.measure import statistics_of
    from mergekit_slta.tables import as_size

    path = stats.expanduser()
    merge_options = applied(options)
    with joined(merge_options["device"]) as ranks, interruptible("resumes after the finished layers"):
        with ranks.one_refusal():
            loaded = Recipe.load(recipe).with_statistics(str(path), *levels[:1])
        experiment = sound_experiment(loaded, ranks, **merge_options)
        if (method := loaded.config.merge_method) != "slta" and ranks.first and not experiment.quiet:
            click.echo(f"Note: this measures slta's merging weights; the recipe's method is {method}.", err=True)
        finished = path.is_file()
        statistics = statistics_of(experiment, levels, path)
    if ranks.first:
        state = "" if finished and not experiment.quiet else " already fits" if finished else " written"
        click.echo(f"{path}{state}: {as_size(path.stat().st_size)}, {statistics.summary}")


@main.command(short_help="Get merging weights and recipes from a statistics file.")
@click.argument("stats")
@click.option("--level", metavar="LEVEL", help=f"The level: {LEVELS_HELP}.  [default: attn_mlp if measured]")
@click.option("--models", metavar="A,B", help="The experts to merge, by their names in the table.  [default: all]")
@click.option(
    "--task-weight", "task_weights", multiple=True, metavar="A=2.0", help="How much A's task counts; 1.0 by default."
)
@click.option(
    "--keep-weight", type=click.FloatRange(min=0), metavar="κ", help="How much the base model's prompts count."
)
@click.option("--ridge", type=click.FloatRange(min=0), metavar="λ", help="The pull towards zero.  [default: 0.0]")
@click.option("--balance/--no-balance", default=None, help="Give every prompt the same influence.  [default: balance]")
@click.option("--samples", type=COUNT, metavar="K", help="Use only the first K prompts of each task.")
@click.option(
    "--bootstrap", type=click.IntRange(min=2), metavar="R", help="Print standard errors, from R draws of the prompts."
)
@shared.json_option
@click.option("--recipe", "recipe_file", metavar="FILE", help="Write a mergekit recipe that runs without this plugin.")
@click.option(
    "--model", "paths", multiple=True, metavar="NAME=PATH", help="The path or Hub id of model NAME, for --recipe."
)
@click.option("--tokenizer-source", metavar="X", default="", help="mergekit's tokenizer_source, for --recipe.")
@shared.trusted_code
@shared.download_folder
@shared.quiet
def solve(
    stats: str,
    models: str | None,
    task_weights: tuple[str, ...],
    bootstrap: int | None,
    json_file: str | None,
    recipe_file: str | None,
    transformers_cache: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Solve for the merging weights from the statistics file STATS.

    STATS is a file that `calibrate` wrote, the folder of a merge with slta, or hf:ORG/REPO/FILE[@REVISION] on the Hub.
    Solving takes a second and needs neither models nor prompts. The command prints the merging weight of each expert
    in each submodule, and how close the merged submodule comes to the expert's ("retained": 1 does what the expert's
    submodule does, 0 what the base model's does). Write models' names in the options as in the printed table or in
    STATS. --task-weight and --model may be repeated. If the base model's prompts were measured, --keep-weight is 1.0 by
    default; 0 leaves them out. For the folder of a merge, the defaults of --level, --ridge, --balance and --keep-weight
    are the settings of its recipe.
    """
    import torch
    from huggingface_hub.utils import disable_progress_bars

    from mergekit_slta.slta.statistics import Statistics

    torch.set_num_threads(1)  # fastest for many tiny matrices
    if recipe_file and Path(recipe_file).exists() and not Path(recipe_file).read_bytes().startswith(b"# Written by"):
        raise SltaError(f"{recipe_file} is a file that this command has not written: name another one.")
    if quiet:
        disable_progress_bars()
    measured = Statistics.load(stats, transformers_cache)
    all_models = measured.info.models
    chosen, of_merge = _of_merge(stats, measured)
    if models is not None:
        chosen = measured.select(*map(str.strip, models.split(",")))
    names = known_names(chosen.info.models, all_models)
    weights: dict[str, Any] = dict(_assignment(entry, names, "--task-weight") for entry in task_weights)
    arguments = ("level", "balance", "ridge", "samples", "keep_weight")
    chosen_arguments = {name: value for name in arguments if (value := options.pop(name)) is not None}
    solution = chosen.solve(task_weights=weights, **(of_merge | chosen_arguments))
    solution = solution.bootstrap(bootstrap) if bootstrap else solution
    if json_file != "-":
        click.echo(solution)
    shared.write_json(solution.to_json(), json_file)
    if json_file and json_file != "-":
        click.echo(f"{json_file} written.")
    if recipe_file:
        base = measured.info.base_model
        names = {base: base} | known_names(solution.models, all_models)
        renamed = dict(_assignment(entry, names, "--model") for entry in options.pop("paths"))
        options["tokenizer_source"] = names.get(source := options.pop("tokenizer_source"), source)
        stored = {name: path for name, path in renamed.items() if name in (base, *solution.models)}
        solution.save_recipe(recipe_file, models=stored, **options)
        adapted = any("+" in renamed.get(name, name) for name in (base, *solution.models))
        option = f"{ADAPTER_OPTION} --lora-merge-dtype float32" * adapted  # which mergekit alone has to be told
        done = f"{recipe_file} written; next: mergekit-yaml {shlex.quote(str(recipe_file))} OUT{option}"
        click.echo(done, err=json_file == "-")


@main.command(cls=ModelCommand, short_help="Measure how well merged models do each task.")
@shared.recipe_path
@click.argument("out", nargs=-1, required=True, type=FOLDER)
@click.option("--samples", type=COUNT, default=100, show_default=True, help="The most held-out prompts of each task.")
@shared.json_option
def evaluate(recipe: Path, out: tuple[Path, ...], samples: int, **options: Any) -> Result:
    """Score the merged models in the folders OUT, the base model and the experts on the experts' tasks, best first.

    Each model is scored on the prompts of `evaluation`, or else on the rows of the `calibration` files that no merge
    used. The first table ranks the models by accuracy, by task and on average. Accuracy is the share of prompts that a
    model answers exactly, with greedy decoding, whatever it writes after that (see "ended"); prompts whose answer has
    more than 32 tokens do not count, and where fewer than 20 count, accuracy ranks no model. "lost" counts the right
    answers that the task's expert gives and the model does not, "gained" the reverse. On the base model's prompts, the
    base model takes the place of the expert, and only the answers that it gives count for the accuracy.

    The other tables cover answers of any length: the share of their tokens that a model finds the likeliest (token
    accuracy), the share of them after which it stops (ended), their likelihood on a scale from the base model (0) to
    the task's expert (1) (gain kept), and the negative log-likelihood per token (loss; lower is better). On the base
    model's prompts, the gain is 1 for the base model and 0 for the experts' mean. Where no answer is known, all tokens
    count.

    The exit code is 1 if a task has no prompt to score.

    RECIPE is one for slta or featcal. To score a merge by another method, mergekit's own included, name a recipe for
    featcal with the same experts. Each model runs once, in float32, with one layer in memory at a time.
    """
    from mergekit_slta.checks.examine import sound_experiment
    from mergekit_slta.evaluation.evaluate import evaluate as ranked

    with interruptible("starts over"):
        comparison = ranked(sound_experiment(recipe, **applied(options)), out, samples)
    problems = comparison.lacking
    return Result(comparison.content() | {"problems": problems}, comparison, exit_code=int(bool(problems)))


@main.command(
    cls=ModelCommand, short_help="Measure how far an expert's effect is from being proportional to its weight."
)
@shared.recipe_path
@shared.output_folder
@shared.measured_levels("model, layer, attn_mlp")
@click.option("--samples", type=COUNT, default=5, show_default=True, help="The number of prompts of each task.")
@click.option("--pairs/--no-pairs", default=True, show_default=True, help="Measure 25 merges of every two experts.")
@click.option("--triples", is_flag=True, help="Measure 27 merges of every three experts.")
def linearity(
    recipe: Path, folder: Path, levels: list[str], samples: int, pairs: bool, triples: bool, **options: Any
) -> None:
    """Before a merge, measure how far the experts' effects are from being proportional to their weights.

    The command writes linearity.json and a page with figures (linearity.html) into DIR. They show, for each expert, how
    far its effect on the model's submodules is from being proportional to its weight (the non-linearity score of arXiv
    2504.10902), and how far the effect of a merge is from the sum of the experts' effects. The command first prints the
    number of forward passes. It takes dozens of times as long as `calibrate`. On several GPUs:
    torchrun --nproc-per-node N -m mergekit_slta linearity RECIPE -o DIR
    """
    from mergekit_slta.checks.examine import sound_experiment
    from mergekit_slta.engine.ranks import joined
    from mergekit_slta.nonlinearity.studies import linearity as measured
    from mergekit_slta.reports.linearity import write_linearity

    merge_options = applied(options)
    with joined(merge_options["device"]) as ranks, interruptible("starts over"):
        experiment = sound_experiment(recipe, ranks, **merge_options)
        if ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
        result = measured(experiment, levels, samples, pairs, triples)
    if ranks.first:
        path = write_linearity(result, folder)
        click.echo(f"{result}\n\n{path} written")


@main.command(short_help="Write a page on what a merge with slta retains of each expert.")
@click.argument("stats")
@shared.output_folder
@shared.download_folder
def report(stats: str, folder: Path, transformers_cache: str | None) -> None:
    """Write a page with figures (report.html) on the merge that the statistics file STATS gives.

    The page shows what the merge retains of each expert, layer by layer, and the merging weights with 90 % intervals.
    STATS is the folder of a merge with slta, a file that `calibrate` wrote, or hf:ORG/REPO/FILE[@REVISION] on the Hub.
    A folder is solved as its recipe says, a file as `solve` does by default. For featcal, set `report: FOLDER` in the
    recipe.
    """
    import torch

    from mergekit_slta.reports.merge import report_page
    from mergekit_slta.slta.statistics import Statistics

    torch.set_num_threads(1)  # fastest for many tiny matrices
    merged, arguments = _of_merge(stats, Statistics.load(stats, transformers_cache))
    page = report_page(merged.solve(**arguments))
    path = page.write(folder, "report.html")
    click.echo(f"{printable(page.verdict[0])}\n\n{path} written")


@main.command(cls=ModelCommand, short_help="Merge, as mergekit-yaml does.")
@shared.recipe_path
@click.argument("out")
@shared.json_option
def merge(recipe: Path, out: str, **options: Any) -> Result | None:
    """Check RECIPE, then merge its models into the folder OUT, as mergekit-yaml does.

    Use this command where Python's start-up files are disabled: mergekit-yaml does not know this plugin's methods
    there. It takes all options of mergekit-yaml. Under torchrun, the processes share the calibration, and the first
    one merges. --json gives the folder, and OUT/mergekit-slta/merge.json, which says what was merged and how.
    """
    from mergekit_slta.engine.ranks import joined
    from mergekit_slta.host.merge import merge as merge_models
    from mergekit_slta.output import manifest
    from mergekit_slta.recipe.experiment import device_of
    from mergekit_slta.recipe.recipe import Recipe
    from mergekit_slta.recipe.settings import SETTINGS

    merge_options = applied(options)
    with joined(device_of(merge_options["device"], merge_options["multi_gpu"])) as ranks:
        with ranks.one_refusal():
            loaded = Recipe.load(recipe)
        if not ranks.first and loaded.config.merge_method not in SETTINGS:
            return None  # a method of mergekit's shares no work
        folder = merge_models(loaded, out, **merge_options)
    return Result({"out": str(folder), "manifest": manifest.read(folder)}) if ranks.first else None


@main.command(cls=ModelCommand, short_help="Check that programs can use a finished merge.")
@shared.recipe_path
@shared.merged_folder
@shared.json_option
def verify(recipe: Path, out: Path, **options: Any) -> Result:
    """Re-read the merged model in OUT tensor by tensor, and check that programs can use it.

    The tensors must have the names, shapes, types and values that the merge's manifest records; an edit of a few values
    may go unnoticed. The values must be finite, and transformers must load all tensors. The command lists the base
    model's files that OUT lacks. It opens the experts only if RECIPE names them differently than the merged recipe did.
    """
    from mergekit_slta.output.verify import verify as verify_merge

    verification = verify_merge(recipe, out, **applied(options))
    said = f"{out}: {verification}"
    if verification.problems:
        return Result(vars(verification), warning=said, exit_code=1)
    return Result(vars(verification), said)


@main.command(cls=ResultCommand, short_help="Check a merged model and upload it to the Hub.")
@shared.merged_folder
@click.argument("repository", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Make a new repository private.  [default: the organization's setting]")
@click.option("--dry-run", is_flag=True, help="Only check, and list the files to upload.")
@shared.trusted_code
@shared.quiet
@shared.json_option
def publish(out: Path, repository: str, **options: bool) -> Result:
    """Check the merged model in OUT, bring its model card up to date, and upload it to ORG/NAME on the Hub.

    The command uploads the model, its configuration, tokenizer, card, recipe, manifest and statistics, and lists these
    files. It leaves out calibration data, caches and unfinished files. Log in with `hf auth login` first.
    """
    import transformers

    import mergekit_slta.host.patches  # noqa: F401 - mergekit must know the methods where start-up files are off
    from mergekit_slta.output.publish import publish as publish_merge

    if options["quiet"] or not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    publication = publish_merge(out, repository, **options)
    return Result(vars(publication), publication)


# From the command line to what the package takes


def _of_merge(stats: str, measured: Any) -> tuple[Any, dict[str, Any]]:
    """The statistics of the experts of a merge in a folder, and the arguments of ``solve``; of a file all, and none."""
    file = Path(stats).expanduser() / files.RECIPE_OF_MERGE
    if not file.is_file():
        return measured, {}
    from mergekit_slta.recipe.recipe import Recipe  # which imports transformers
    from mergekit_slta.slta.grams import solve_arguments

    recipe = Recipe.load(file)
    _, *names = recipe.names.values()
    merged = measured.select(*names) if {*names} < {*measured.info.models} else measured
    return merged, solve_arguments(recipe)


def _assignment(entry: str, names: Mapping[str, str], option: str) -> tuple[str, str]:
    name, _, value = entry.partition("=")
    if name not in names or not value:
        known = ", ".join(dict.fromkeys(names.values()))
        raise SltaError(f"{option} {entry}: write NAME=VALUE, with a name that the statistics hold ({known}).")
    return names[name], value
