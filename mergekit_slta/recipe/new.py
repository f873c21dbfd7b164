"""A commented recipe to start from, with what only the user can know left to fill in; its text is ``new.yml.jinja``.

It is only text: no module of mergekit, torch or transformers is imported, which would take seconds.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2
import yaml

from mergekit_slta import files
from mergekit_slta.data.prompts import TOPICS
from mergekit_slta.errors import SltaError

WITH_DATA, OF_MERGEKIT = ("featcal", "slta"), ("task_arithmetic", "ties")
WITHOUT_DATA = ("actmat", "sftm", *OF_MERGEKIT)
METHODS = (*WITH_DATA, *WITHOUT_DATA)  # which the template knows

# The base model's answers: it should not forget these topics, and longer answers take long on a CPU.
_OF_BASE = "--topic instructions --topic chat --topic explaining --max-new-tokens 128"
ADAPTER_OPTION = " --lora-merge-cache ./adapters"  # which every command needs that opens an adapter
ADAPTERS = 1.2  # the sum of weights that served adapters in task_arithmetic


def new_recipe(
    base: str,
    experts: Sequence[str],
    method: str = "featcal",
    calibration: Sequence[str] = (),
    weight: float | None = None,
    report: str | None = None,
) -> str:
    """Write a recipe with comments that say what there is to fill in and to choose.

    The merge keeps the base model's abilities, unless only several experts have a calibration source.

    A folder that is there is written with a leading ``./``, which mergekit does not look up on the Hub. Calibration
    sources are the experts' in their order, then the base model's, if any; without some, the recipe names files of the
    models' answers. Above it are the commands that write these, and those of its files that are not there: a file of
    answers that is there may hold another model's. ``report`` is a folder for the merge's page.
    """
    base, *experts = map(files.local_name, (base, *experts))
    if len({base, *experts}) < 1 + len(experts):
        raise SltaError(f"A model is named twice ({', '.join((base, *experts))}): name each model once.")
    with_data, models = method in WITH_DATA, [*experts, base]
    require_sources(method, len(experts), len(calibration))
    if weight is not None and with_data:
        raise SltaError(f"'{method}' does not weigh the experts: leave --weight out, or choose another method.")
    answers = answer_files(models)
    if len(experts) == 1 or not calibration:  # otherwise, only who names the base model's prompts wants them
        calibration = [*calibration, *answers[len(calibration) :]]
    sources = dict(zip(models, calibration, strict=False)) if with_data else {}
    jsonl = (file for file in sources.values() if file.endswith(".jsonl") and not file.startswith("hf:"))
    unwritten = {file for file in jsonl if not Path(file).expanduser().exists()}
    commands = [_ask(model, file, model == base) for model, file in sources.items() if file in {*answers, *unwritten}]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mergekit_slta.recipe", "."),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    environment.filters.update(scalar=_scalar, quoted=lambda text: json.dumps(text, ensure_ascii=False))
    return environment.get_template("new.yml.jinja").render(
        {"base": base, "experts": experts, "sources": sources, "method": method, "topics": TOPICS},
        with_data=with_data,
        of_mergekit=method in OF_MERGEKIT,
        weight=None if weight is None else f"{weight:g}",
        commands=commands,
        base_file=answers[-1],
        of_base=_ask(base, answers[-1], True),
        report=report,
        cache=ADAPTER_OPTION if any("+" in model for model in models) else "",
        of_adapters=f"{ADAPTERS / len(experts):.2g}",
    )


def answer_files(models: Sequence[str]) -> list[str]:
    """A name for the file of each model's answers."""
    names = list[str]()
    for model in models:
        stem = os.path.basename(os.path.normpath(model.rpartition("+")[2])).partition("@")[0]
        numbered = (f"{stem}{number}-answers.jsonl" for number in ("", *range(2, 1 + len(models))))
        names.append(next(name for name in numbered if name not in names))
    return names


def ask_arguments(model: str, file: str, is_base: bool) -> list[str]:
    """The words after ``mergekit-slta`` with which a model writes the file of its answers."""
    return ["ask", model, "-o", file, *(_OF_BASE.split() if is_base else [])]


def _ask(model: str, file: str, is_base: bool) -> str:
    return shlex.join(["mergekit-slta", *ask_arguments(model, file, is_base)]) + ADAPTER_OPTION * ("+" in model)


def require_sources(method: str, experts: int, sources: int) -> None:
    """Refuse a method without data with calibration sources or for one expert, and a wrong number of sources."""
    with_data = " or ".join(WITH_DATA)
    if method not in WITH_DATA and sources:
        raise SltaError(f"'{method}' uses no prompts: leave --calibration out, or choose {with_data}.")
    if experts == 1 and not (method in WITH_DATA or method in OF_MERGEKIT):
        raise SltaError(
            f"'{method}' merges several experts: name another one, or choose {with_data}, which merge one expert and "
            "keep the base model's abilities."
        )
    if sources and sources not in (experts, experts + 1):
        times = "once" if sources == 1 else f"{sources} times"
        raise SltaError(
            f"--calibration is given {times} for {f'{experts} experts' if experts > 1 else 'one expert'}: give it once "
            "for each expert, in their order, and once more for the base model, all its prompts in one file, if the "
            "merge is to keep its abilities."
        )


def _scalar(name: str) -> str:
    """A name as YAML, quoted where that is needed."""
    return yaml.safe_dump(name, width=10**6, allow_unicode=True).removesuffix("\n").removesuffix("\n...")
