"""The arguments and options that several commands share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import click

from mergekit_slta import files
from mergekit_slta.errors import SltaError, files_named, printable
from mergekit_slta.levels import LEVELS
from mergekit_slta.tables import as_json

LEVELS_HELP = f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}"
COUNT = click.IntRange(min=1)
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


def _switch(name: str, help: str) -> click.Option:
    return click.Option([f"--{name}/--no-{name}"], default=False, show_default=True, help=help)


# mergekit's options that say where to compute and how to get models, copied because to import mergekit takes seconds.
MODEL_OPTIONS = [
    click.Option(["--transformers-cache"], show_default=True, help="Override storage path for downloaded models"),
    click.Option(["--lora-merge-cache"], show_default=True, help="Path to store merged LORA models"),
    _switch("cuda", "Perform matrix arithmetic on GPU"),
    click.Option(["--device"], show_default=True, help="Perform matrix arithmetic on specified device"),
    _switch("trust-remote-code", "Trust remote code from huggingface repos (danger)"),
    click.Option(["-v", "verbosity"], type=int, count=True, help="Verbose logging (repeat for more verbosity)"),
    _switch("quiet", "Suppress progress bars and other non-essential output"),
]


class _OneLine(logging.Formatter):
    """Log messages in a line each, without the names of modules."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class Result(NamedTuple):
    """What a command with ``--json`` has found."""

    content: Mapping[str, Any]  # its own entries of the JSON
    shown: object = None  # for standard output, unless the JSON goes there
    warning: str = ""  # for standard error
    exit_code: int = 0


class ResultCommand(click.Command):
    """A command that shows the ``Result`` of its function, or writes it as JSON; errors are written, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with self._errors_written(ctx.params):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        chosen = {"json_file": ctx.params.pop("json_file", None)}
        with self._errors_written(chosen), files_named():
            result = super().invoke(ctx)
        if result is not None:
            if result.shown is not None and chosen["json_file"] != "-":
                click.echo(result.shown)
            self._write(result, chosen["json_file"])
            if result.warning:
                click.echo(result.warning, err=True)
            raise click.exceptions.Exit(result.exit_code)

    @contextmanager
    def _errors_written(self, chosen: Mapping[str, Any]) -> Iterator[None]:
        try:
            yield
        except click.ClickException as error:
            problems = error.sentences if isinstance(error, SltaError) else [error.format_message()]
            self._write(Result({"problems": problems}, exit_code=error.exit_code), chosen.get("json_file"))
            raise

    def _write(self, result: Result, json_file: str | None) -> None:
        content = {"command": self.name, "exit_code": result.exit_code, "problems": [], **result.content}
        write_json(as_json(content), json_file)


def write_json(json: str, json_file: str | None) -> None:
    """Write JSON to a file, if there is one, '-' for standard output."""
    if json_file == "-":
        click.echo(json, nl=False)
    elif json_file:
        files.write(Path(json_file), json.encode())


class ModelCommand(ResultCommand):
    """A command with mergekit's options for models; ``merge`` has all of mergekit's, which it imports."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *(mergekit_options() if self.name == "merge" else MODEL_OPTIONS)]


def mergekit_options() -> list[click.Option]:
    from mergekit.scripts.run_yaml import main

    return [parameter for parameter in main.params if isinstance(parameter, click.Option)]


def applied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Set up logging and threads by mergekit's options, and return the others, as our functions take them."""
    import torch
    import transformers
    from mergekit.options import MergeOptions

    import mergekit_slta.host.patches  # noqa: F401 - mergekit must be as it is for mergekit-yaml, also without start-up files

    merge_options = MergeOptions(**options)
    merge_options.apply_global_options()
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_OneLine("%(levelname)s: %(message)s"))
    if merge_options.quiet or not sys.stderr.isatty():  # its bars would fill a log
        transformers.utils.logging.disable_progress_bar()
    others = merge_options.model_dump(include=options.keys() - {"cuda", "num_threads", "verbosity"})
    if merge_options.device == "cuda" and "LOCAL_RANK" in os.environ:
        others["device"] = f"cuda:{int(os.environ['LOCAL_RANK']) % max(1, torch.cuda.device_count())}"
    return others


class _Existing(click.Path):
    """A file to read; a missing one is no usage error, and is reported before any heavy import."""

    def fail(self, message: str, param: click.Parameter | None = None, ctx: click.Context | None = None) -> NoReturn:
        raise SltaError(message)


recipe_path = click.argument("recipe", type=_Existing(exists=True, dir_okay=False, path_type=Path))
calibration_files = click.option(
    "--calibration",
    multiple=True,
    metavar="FILE",
    help="Prompts for each expert in order, then for the base model; repeatable.  [default: the models' answers]",
)
merged_folder = click.argument("out", type=FOLDER)
output_folder = click.option(
    "-o", "--output", "folder", required=True, metavar="DIR", type=FOLDER, help="The folder to write."
)
trusted_code = click.option(
    "--trust-remote-code/--no-trust-remote-code",
    default=False,
    help="Run the Python code that comes with the model (dangerous).",
)
download_folder = click.option("--transformers-cache", help="The folder for downloaded files.")
quiet = click.option("--quiet/--no-quiet", default=False, help="Print no progress bars.")


def _json_file(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    if name not in (None, "-") and Path(name).suffix != ".json":
        raise SltaError(f"{name} does not end in .json: name another file.")  # a recipe, say, would be lost
    return name


json_option = click.option(
    *("--json", "json_file"),
    metavar="FILE",
    callback=_json_file,
    is_eager=True,  # so that it is known when another argument is wrong
    help="Write the result as JSON to a .json file; '-' for standard output.",
)


def measured_levels(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option for the levels to measure, which come in the order from the whole model to its maps."""
    return click.option(
        *("--level", "levels"),
        multiple=True,
        metavar="LEVEL",
        type=click.Choice(LEVELS),
        callback=lambda context, option, levels: [level for level in LEVELS if level in levels],
        help=f"The level to measure: {LEVELS_HELP}; repeatable.  [default: {default}]",
    )
