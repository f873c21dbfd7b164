"""A commented recipe to start from, with what only the user can know left to fill in.

It is only text: no module of mergekit, torch or transformers is imported, which would take seconds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import yaml

from mergekit_slta import files
from mergekit_slta.data.prompts import TOPICS
from mergekit_slta.errors import SltaError, suggestion


class _Form(NamedTuple):
    """What a recipe says of its method."""

    does: str
    shared: str = ""  # the lines of the parameters of the whole merge
    expert: str = ""  # the lines of an expert's parameters; none of a method that merges by samples
    of_mergekit: bool = False  # the method is mergekit's own, which ``check`` does not know


_SAMPLES = """\
  samples: 30           # prompts of each task
  max_tokens: 512       # tokens of each prompt; the rest is cut
"""
_LEVEL = "  level: attn_mlp       # one weight per expert for each: model, layer, attn_mlp, head_mlp or linear\n"
_STATISTICS = (
    "  # statistics: merge.slta.safetensors   # write the measurement to this file, to merge again without prompts\n"
)
_REPORT = """\
  # report: report/                      # write a page with figures on what the merge keeps of each expert
"""
_COUNTS = "      weight: 1.0         # how much the expert counts, compared with the others\n"
_FORMS = {
    "featcal": _Form(
        "solves every linear map, so that it does what each model does on that model's prompts", _SAMPLES + _REPORT
    ),
    "slta": _Form(
        "solves merging weights from prompts (featcal is more accurate)",
        _LEVEL + _SAMPLES + _STATISTICS + _REPORT,
    ),
    "actmat": _Form(
        "solves every linear map, without prompts",
        """\
  ridge: auto           # pulls every matrix towards the experts' mean; a number, or auto
  lambda: 1.0           # multiplies the merged change
""",
        _COUNTS,
    ),
    "sftm": _Form(
        "merges the singular features of every matrix, without prompts",
        """\
  density: 0.2          # the share of each change's entries that remain, the largest ones
  lambda: 0.6           # multiplies the merged change
""",
        "      weight: 1.0         # multiplies the expert's change\n",
    ),
    "task_arithmetic": _Form(
        "mergekit's sum of the experts' changes, for comparison",
        expert="      weight: 0.5         # multiplies the expert's change\n",
        of_mergekit=True,
    ),
    "ties": _Form(
        "mergekit's mean of the changes that agree in sign, for comparison",
        expert=f"{_COUNTS}      density: 0.5        # the share of the change's entries that remain, the largest\n",
        of_mergekit=True,
    ),
}
METHODS = tuple(_FORMS)
WITH_DATA = tuple(method for method, form in _FORMS.items() if not form.expert)

# The base model's answers, as measured: it should not forget these topics, and longer answers take long on a CPU.
_OF_BASE = "--topic instructions --topic chat --topic explaining --max-new-tokens 128"
_CACHE = " --lora-merge-cache ./adapters"  # which every command needs that opens an adapter
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[^/]+)?")

_RECIPE = """\
{% set learners = experts|length ~ ' experts' if experts|length > 1 else 'one expert' %}
{% if base in sources %}
# Merge {{ learners }} and the base model {{ base }}, which has prompts of its own.
{% else %}
# Merge {{ learners }}, fine-tuned from the base model {{ base }}.
{% endif %}
{% if commands %}
# With these commands, the models answer prompts of the package, and so write files that do not exist yet. Prompts of
# an expert's own task are better: mergekit-slta ask MODEL PROMPTS -o FILE
{% for command in commands %}
#   {{ command }}
{% endfor %}
# Prompts of some topics: --topic with {{ topics|join(", ") }}.
# Then:
{% endif %}
{% if not form.of_mergekit %}
#   mergekit-slta check RECIPE{{ cache }}      finds what is missing or wrong, before the merge
{% endif %}
#   mergekit-yaml RECIPE ./merged{{ cache }}   merges (or: mergekit-slta merge RECIPE ./merged)
{% if with_data %}
#   mergekit-slta evaluate RECIPE ./merged ./other{{ cache }}   compares this merge with another, such as one by ties
{% else %}
#   mergekit-slta evaluate OTHER ./merged{{ cache }}   scores the merge on the prompts of another recipe, for featcal
{% endif %}
{% if form.of_mergekit %}
# (mergekit-slta check is not for this method, which is mergekit's own.)
{% endif %}
merge_method: {{ "%-8s"|format(method) }}  # {{ form.does }}
base_model: {{ base|scalar }}
models:
{% for expert in experts %}
  - model: {{ expert|scalar }}
    parameters:
{% if with_data %}
{% if loop.first %}
      # 60 or more prompts of this expert's task, with answers: 30 for the merge, the others for `evaluate`. Name a file
      # (.jsonl, .json, .csv, .parquet, or .txt with a prompt on each line) or a dataset on the Hub,
      # "hf:ORG/NAME?config=main&split=train". Each expert needs prompts of its own.
      # template: "{question} {answer}"   # how a row becomes text, if its fields have unusual names
      # evaluation: test.jsonl            # prompts for `evaluate`; by default those that the merge did not use
{% endif %}
      calibration: {{ sources[expert]|quoted }}
{% else %}
{{ form.expert }}{% endif %}
{% endfor %}
{% if base in sources %}
  - model: {{ base|scalar }}
    parameters:
      # 60 or more prompts, with the base model's answers, on which the merge should do what the base model does.
      calibration: {{ sources[base]|quoted }}
      weight: 1.0         # κ: higher favors the base model, lower the experts; 0 leaves these prompts out
      # samples: 120      # with several experts, take this and weight 1.5, and mix texts, instructions and chats
{% elif with_data %}
  # To keep the base model's abilities, give it prompts of its own:
  # {{ of_base }}
  # - model: {{ base|scalar }}
  #   parameters: {calibration: {{ base_file|quoted }}, weight: 1.0}
{% endif %}
{% if form.shared %}
parameters:
{{ form.shared }}{% endif %}
dtype: float32          # merge in this type ...
out_dtype: bfloat16     # ... and round once, to this one
"""


def new_recipe(
    base: str,
    experts: Sequence[str],
    method: str = "featcal",
    calibration: Sequence[str] = (),
    weight: float | None = None,
) -> str:
    """Write a recipe with comments that say what there is to fill in and to choose.

    The merge keeps the base model's abilities, unless only several experts have a calibration source.

    Args:
        base: the base model, a folder or a Hub id.
        experts: the experts, folders or Hub ids; an adapter after its base model, ``BASE+ADAPTER``. A folder that is
            there is written with a leading ``./``, which mergekit does not look up on the Hub.
        method: one of ``METHODS``.
        calibration: the experts' calibration sources in their order, and after them that of the base model, if any.
        weight: the experts' weight, for a method that does not solve it; the method's own by default.

    Returns:
        The recipe as YAML. Without calibration sources it names files of the models' answers. Above it are the commands
        that write those of its files that are not there.

    Raises:
        SltaError: a folder is missing, a model is named twice, or the calibration sources are not as many as the models
            that need one.
    """
    base, *experts = map(_model_name, (base, *experts))
    if len({base, *experts}) < 1 + len(experts):
        raise SltaError(f"A model is named twice ({', '.join((base, *experts))}): name each model once.")
    form, with_data, models = _FORMS[method], method in WITH_DATA, [*experts, base]
    _require_sources(method, len(experts), len(calibration))
    if weight is not None:
        if with_data:
            raise SltaError(f"'{method}' does not weigh the experts: leave --weight out, or choose another method.")
        form = form._replace(expert=re.sub(r"weight: \S+", f"weight: {weight:g}", form.expert))
    answers = answer_files(models)
    if len(experts) == 1 or not calibration:  # otherwise, only who names the base model's prompts wants them
        calibration = [*calibration, *answers[len(calibration) :]]
    sources = dict(zip(models, calibration, strict=False)) if with_data else {}
    commands = [_ask(model, file, model == base) for model, file in sources.items() if _is_missing(file)]
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters.update(scalar=_scalar, quoted=lambda text: json.dumps(text, ensure_ascii=False))
    return environment.from_string(_RECIPE).render(
        {"base": base, "experts": experts, "sources": sources, "method": method, "form": form, "topics": TOPICS},
        with_data=with_data,
        commands=commands,
        base_file=answers[-1],
        of_base=_ask(base, answers[-1], True),
        cache=_CACHE if any("+" in model for model in models) else "",
    )


def _model_name(name: str) -> str:
    """A model's name as a recipe has it; refuse one that can only be a folder, or nearly is one, and is not there."""
    for part in name.split("+"):
        folder, last = os.path.split(os.path.expanduser(part))
        near = suggestion(last, os.listdir(folder)) if os.path.isdir(folder) else ""
        is_on_hub = _HUB_NAME.fullmatch(part) and part[0] != "." and not near
        if not (is_on_hub or os.path.isdir(os.path.join(folder, last))):
            raise SltaError(f"There is no folder {part} in {os.getcwd()}" + (near or ": name a model that is there."))
    return files.local_name(name)


def answer_files(models: Sequence[str]) -> list[str]:
    """A name for the file of each model's answers."""
    names = list[str]()
    for model in models:
        stem = os.path.basename(os.path.normpath(model.rpartition("+")[2])).partition("@")[0]
        numbered = (f"{stem}{number}-answers.jsonl" for number in ("", *range(2, 1 + len(models))))
        names.append(next(name for name in numbered if name not in names))
    return names


def _is_missing(source: str) -> bool:
    """Whether a calibration source is a file that ``ask`` can write."""
    path = Path(source).expanduser()
    return path.suffix == ".jsonl" and not source.startswith("hf:") and not path.exists()


def ask_arguments(model: str, file: str, is_base: bool) -> list[str]:
    """The words after ``mergekit-slta`` with which a model writes the file of its answers."""
    return ["ask", model, "-o", file, *(_OF_BASE.split() if is_base else [])]


def _ask(model: str, file: str, is_base: bool) -> str:
    return shlex.join(["mergekit-slta", *ask_arguments(model, file, is_base)]) + _CACHE * ("+" in model)


def _require_sources(method: str, experts: int, sources: int) -> None:
    """Refuse a method without data with calibration sources or for one expert, and a wrong number of sources."""
    with_data = " or ".join(WITH_DATA)
    if method not in WITH_DATA and sources:
        raise SltaError(f"'{method}' uses no prompts: leave --calibration out, or choose {with_data}.")
    if experts == 1 and not (method in WITH_DATA or _FORMS[method].of_mergekit):
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
