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
from mergekit_slta.errors import SltaError


class _Form(NamedTuple):
    """What a recipe says of its method.

    Attributes:
        does: what the method does.
        shared: the lines of the parameters of the whole merge.
        expert: the lines of an expert's parameters; none of a method that merges by samples.
        of_mergekit: whether the method is mergekit's own, which ``check`` does not know.
    """

    does: str
    shared: str = ""
    expert: str = ""
    of_mergekit: bool = False


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
  ridge: 0.1            # pulls every matrix towards the experts' mean; at least 0
  scale: 1.0            # multiplies the merged change
""",
        _COUNTS,
    ),
    "sftm": _Form(
        "merges the singular features of every matrix, without prompts",
        """\
  density: 0.2          # the share of each change's entries to keep, the largest ones
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
        expert=f"{_COUNTS}      density: 0.5        # the share of the change's entries to keep, the largest ones\n",
        of_mergekit=True,
    ),
}
METHODS = tuple(_FORMS)
WITH_DATA = tuple(method for method, form in _FORMS.items() if not form.expert)

# The topics of prompts by an expert's name or card: three, so that there are some 75 prompts, of which 30 calibrate.
_SUGGESTED = {
    r"math|gsm|arith|\bsums?\b|algebra": ("sums", "reasoning", "explaining"),
    r"code|coding|coder|program|python|sql": ("code", "reasoning", "instructions"),
    r"reason|think|prover|logic|\br1\b": ("reasoning", "sums", "explaining"),
    r"chat|dialog|assist": ("chat", "instructions", "explaining"),
    r"writ|story|stories|creative|novel|poe[mt]|role-?play": ("writing", "chat", "instructions"),
    r"transl|lingual|german|french|spanish|italian|japanese|chinese|russian": ("languages", "explaining", "chat"),
}
_GENERAL = ("instructions", "chat", "explaining")  # what a base model should not forget

_RECIPE = """\
{% set learners = experts|length ~ ' experts' if experts|length > 1 else 'one expert' %}
{% if kept %}
# Merge {{ learners }} and the base model {{ base }}, which has prompts of its own.
{% else %}
# Merge {{ learners }}, fine-tuned from the base model {{ base }}.
{% endif %}
{% if commands %}
# No data? With these commands, each model answers prompts of the package and so writes its file. Prompts of its own
# task are better: mergekit-slta ask MODEL PROMPTS -o FILE
{% for command in commands %}
#   {{ command }}
{% endfor %}
# The topics are {{ topics|join(", ") }}.
# Then:
{% endif %}
{% if not form.of_mergekit %}
#   mergekit-slta check RECIPE      finds what is missing or wrong, before the merge
{% endif %}
#   mergekit-yaml RECIPE ./merged   merges (or: mergekit-slta merge RECIPE ./merged)
{% if with_data %}
#   mergekit-slta evaluate RECIPE ./merged ./other   compares this merge with another, such as one by ties
{% else %}
#   mergekit-slta evaluate OTHER ./merged   scores the merge on the prompts in another recipe, such as one for featcal
{% endif %}
merge_method: {{ "%-8s"|format(method) }}  # {{ form.does }}
base_model: {{ base|scalar }}
models:
{% for expert, source in experts %}
  - model: {{ expert|scalar }}
    parameters:
{% if with_data %}
{% if loop.first %}
      # 60 or more prompts of this expert's task, with answers: 30 for the merge, the others for `evaluate`. Name a file
      # (.jsonl, .json, .csv, .parquet, or .txt with a prompt on each line) or a dataset on the Hub,
      # "hf:ORG/NAME?config=main&split=train". Each expert needs prompts of its own.
      # template: "{question} {answer}"   # how a row becomes text, if its fields have unusual names
{% endif %}
      calibration: {{ source|quoted }}
{% else %}
{{ form.expert }}{% endif %}
{% endfor %}
{% if kept %}
  - model: {{ base|scalar }}
    parameters:
      # 60 or more prompts, with answers, on which the merge should do what the base model does: your own chats, or a
      # general instruction dataset. Without such prompts, delete this entry.
      calibration: {{ kept[0]|quoted }}
      weight: 1.0         # κ: higher favors the base model, lower the experts; 0 leaves these prompts out
      # samples: 120      # with several experts, take this and weight 1.5, and mix texts, instructions and chats
{% elif with_data %}
  # To keep the base model's abilities, give it prompts of its own:
  # - model: {{ base|scalar }}
  #   parameters: {calibration: FILE, weight: 1.0}
{% endif %}
{% if form.shared %}
parameters:
{{ form.shared }}{% endif %}
dtype: float32          # merge in this type ...
out_dtype: bfloat16     # ... and round once, to this one
"""


def new_recipe(base: str, experts: Sequence[str], method: str = "featcal", calibration: Sequence[str] = ()) -> str:
    """Write a recipe with comments that say what there is to fill in and to choose.

    The merge keeps the base model's abilities, unless only several experts have a calibration source.

    Args:
        base: the base model, a folder or a Hub id.
        experts: the experts, folders or Hub ids; an adapter after its base model, ``BASE+ADAPTER``. A folder that is
            there is written with a leading ``./``, which mergekit does not look up on the Hub.
        method: one of ``METHODS``.
        calibration: the experts' calibration sources in their order, and after them that of the base model, if any.

    Returns:
        The recipe as YAML. Without calibration sources it names files of the models' answers, and above it are the
        commands that write them; ``check`` says which are missing.

    Raises:
        SltaError: a model is missing or named twice, or the calibration sources are not as many as the models that
            need one.
    """
    base, *experts = map(files.local_name, (base, *experts))
    if len({base, *experts}) < 1 + len(experts):
        raise SltaError(f"A model is named twice ({', '.join((base, *experts))}): name each model once.")
    form = _FORMS[method]
    if method == "actmat" and any("+" in expert for expert in experts):
        form = form._replace(shared=form.shared.replace("ridge: 0.1 ", "ridge: 10.0"))  # as the check of a recipe says
    _require_sources(method, len(experts), len(calibration))
    commands = _questions((*experts, base)) if method in WITH_DATA and not calibration else {}
    sources = [*calibration] or [*commands] or [""] * len(experts)
    if method in WITH_DATA and len(experts) == 1 == len(sources):
        sources.append("")  # of the base model
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters.update(scalar=_scalar, quoted=lambda text: json.dumps(text, ensure_ascii=False))
    rows, kept = list(zip(experts, sources, strict=False)), sources[len(experts) :]
    return environment.from_string(_RECIPE).render(
        {"base": base, "experts": rows, "kept": kept, "method": method, "form": form, "topics": TOPICS},
        with_data=method in WITH_DATA,
        commands=commands.values(),
    )


def _questions(models: Sequence[str]) -> dict[str, str]:
    """The files that the models' answers go to, and the commands that write them; the base model is the last one."""
    commands: dict[str, str] = {}
    for model in models:
        stem = os.path.basename(os.path.normpath(model.rpartition("+")[2])).partition("@")[0]
        names = (f"{stem}{number}-answers.jsonl" for number in ("", *range(2, 1 + len(models))))
        file = next(name for name in names if name not in commands)
        is_base = len(commands) == len(models) - 1
        options = [f"--topic {topic}" for topic in (_GENERAL if is_base else _topics(model, stem))]
        options += ["--max-new-tokens 128"] * is_base  # as measured; longer answers take many minutes on a CPU
        options += ["--lora-merge-cache ./adapters"] * ("+" in model)
        commands[file] = " ".join(["mergekit-slta ask", shlex.quote(model), "-o", shlex.quote(file), *options])
    return commands


def _topics(model: str, stem: str) -> list[str]:
    """The topics that an expert's name suggests, or else the tags of its model card; none if neither does."""
    card = Path(os.path.expanduser(model.rpartition("+")[2]), "README.md")
    tags = re.match(r"---\n.*?\n---", card.read_text("utf-8", "replace") if card.is_file() else "", re.DOTALL)
    for text in (stem, tags[0] if tags else ""):
        known = [topics for words, topics in _SUGGESTED.items() if re.search(words, text.lower())]
        if known:
            return [topic for topic in TOPICS if any(topic in topics for topics in known)]
    return []


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
        given = "once" if sources == 1 else f"{sources} times"
        raise SltaError(
            f"--calibration is given {given} for {f'{experts} experts' if experts > 1 else 'one expert'}: give it once "
            "for each expert, in their order, and once more for the base model, all its prompts in one file, if the "
            "merge is to keep its abilities."
        )


def _scalar(name: str) -> str:
    """A name as YAML, quoted where that is needed."""
    return yaml.safe_dump(name, width=10**6, allow_unicode=True).removesuffix("\n").removesuffix("\n...")
