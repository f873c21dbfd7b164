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
  samples: 30           # samples of each task
  max_tokens: 512       # of each sample; the rest is cut
"""
_LEVEL = "  level: attn_mlp       # what gets weights of its own: model, layer, attn_mlp, head_mlp or linear\n"
_STATISTICS = (
    "  # statistics: merge.slta.safetensors   # keep what was measured in a file, to merge again without data\n"
)
_REPORT = """\
  # report: report/                      # write what the merge keeps of each expert, as a page with figures
"""
_COUNTS = "      weight: 1.0         # how much the expert counts\n"
_FORMS = {
    "featcal": _Form(
        "every linear map is solved, so that it does what each model does on that model's samples", _SAMPLES + _REPORT
    ),
    "slta": _Form(
        "weights for each part, solved from samples (featcal gives more exact answers)",
        _LEVEL + _SAMPLES + _STATISTICS + _REPORT,
    ),
    "actmat": _Form(
        "every linear map is solved, without samples",
        """\
  ridge: 0.1            # draws every matrix towards the experts' mean; at least 0
  scale: 1.0            # multiplies the merged change
""",
        _COUNTS,
    ),
    "sftm": _Form(
        "every matrix is merged through its singular features, without samples",
        """\
  density: 0.2          # the share of each change's entries to keep, the largest ones
  lambda: 0.6           # multiplies the merged change
""",
        "      weight: 1.0         # multiplies its change\n",
    ),
    "task_arithmetic": _Form(
        "mergekit's sum of the experts' changes, to compare with",
        expert="      weight: 0.5         # multiplies its change\n",
        of_mergekit=True,
    ),
    "ties": _Form(
        "mergekit's mean of the experts' changes where most agree in sign, to compare with",
        expert=f"{_COUNTS}      density: 0.5        # the share of its change's entries to keep, the largest ones\n",
        of_mergekit=True,
    ),
}
METHODS = tuple(_FORMS)
WITH_DATA = tuple(method for method, form in _FORMS.items() if not form.expert)

# What an expert's name or card tells of the topics of its prompts, two or three of them, so that there are 50 or more.
_SUGGESTED = {
    r"math|gsm|arith|\bsums?\b|algebra": ("sums", "reasoning"),
    r"code|coding|coder|program|python|sql": ("code", "reasoning"),
    r"reason|think|prover|logic|\br1\b": ("reasoning", "sums"),
    r"chat|dialog|assist": ("chat", "instructions", "explaining"),
    r"writ|story|stories|creative|novel|poe[mt]|role-?play": ("writing", "chat"),
    r"transl|lingual|german|french|spanish|italian|japanese|chinese|russian": ("languages", "explaining"),
}
_GENERAL = ("instructions", "chat", "explaining")  # what a base model should not forget

_RECIPE = """\
{% set learners = experts|length ~ ' experts' if experts|length > 1 else 'one expert' %}
{% if kept %}
# Take what {{ learners }} learned, and keep what the base model {{ base }} can.
{% else %}
# A merge of {{ learners }} with {{ base }} as their base model.
{% endif %}
{% if commands %}
# If you have no data, have each model answer prompts, those of the package or your own (ask MODEL PROMPTS -o FILE):
{% for command in commands %}
#   {{ command }}
{% endfor %}
# The topics are {{ topics|join(", ") }}. Then:
{% endif %}
{% if not form.of_mergekit %}
#   mergekit-slta check RECIPE      says what is missing or wrong, before any work
{% endif %}
#   mergekit-yaml RECIPE ./merged   merges (or: mergekit-slta merge RECIPE ./merged)
{% if with_data %}
#   mergekit-slta evaluate RECIPE ./merged ./other   scores it beside another merge, such as one of new --method ties
{% else %}
#   mergekit-slta evaluate OTHER ./merged   scores it on the samples that OTHER names, as a recipe of featcal does
{% endif %}
merge_method: {{ "%-8s"|format(method) }}  # {{ form.does }}
base_model: {{ base|scalar }}
models:
{% for expert, source in experts %}
  - model: {{ expert|scalar }}
    parameters:
{% if with_data %}
{% if loop.first %}
      # Prompts of this expert's own task, with answers, 60 or more: 30 calibrate, the rest is for `evaluate`. A file
      # (.jsonl, .json, .csv, .parquet or .txt with a sample on each line), or a dataset of the Hub,
      # "hf:ORG/NAME?config=main&split=train". Each expert needs its own.
      # template: "{question} {answer}"   # how a record becomes text, where its fields have other names than usual
{% endif %}
      calibration: {{ source|quoted }}
{% else %}
{{ form.expert }}{% endif %}
{% endfor %}
{% if kept %}
  - model: {{ base|scalar }}
    parameters:
      # Prompts, with answers, of what the base model can do and the merge should not forget, 60 or more: your own
      # chats, or a general instruction dataset. Without them, delete this entry.
      calibration: {{ kept[0]|quoted }}
      weight: 1.0         # more keeps more of the base model, less gains more of the expert; 0 leaves it out
{% endif %}
{% if form.shared %}
parameters:
{{ form.shared }}{% endif %}
dtype: float32          # merge in this type ...
out_dtype: bfloat16     # ... and round once, to this one
"""


def new_recipe(base: str, experts: Sequence[str], method: str = "featcal", calibration: Sequence[str] = ()) -> str:
    """Write a recipe with comments that say what there is to fill in and to choose.

    It keeps what the base model does on prompts, unless only several experts have a calibration source.

    Args:
        base: the base model, a folder or a Hub id.
        experts: the experts, folders or Hub ids; an adapter behind its base model, ``BASE+ADAPTER``. A folder that is
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
    base, *experts = map(_local, (base, *experts))
    if len({base, *experts}) < 1 + len(experts):
        raise SltaError(f"A model is named twice ({', '.join((base, *experts))}): name each once.")
    form = _FORMS[method]
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
        topics = _topics(model, stem) if len(commands) < len(models) - 1 else _GENERAL
        options = [f"--topic {topic}" for topic in topics] + ["--lora-merge-cache ./adapters"] * ("+" in model)
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
        raise SltaError(f"'{method}' takes no calibration data: leave --calibration out, or choose {with_data}.")
    if experts == 1 and not (method in WITH_DATA or _FORMS[method].of_mergekit):
        raise SltaError(
            f"'{method}' merges several experts: name another one, or choose {with_data}, which merge one expert and "
            "keep what its base model can."
        )
    if sources and sources not in (experts, experts + 1):
        given = "once" if sources == 1 else f"{sources} times"
        raise SltaError(
            f"--calibration is given {given} for {f'{experts} experts' if experts > 1 else 'one expert'}: give it once "
            "for each expert, in their order, and once more, all records in one file, for what the base model could "
            "and the merge should keep."
        )


def _local(name: str) -> str:
    """A model's name; a relative path to an existing folder begins with a dot, so that it is no Hub id."""
    parts = name.split("+")
    return "+".join(f"./{part}" if part and part[0] not in "./~" and os.path.isdir(part) else part for part in parts)


def _scalar(name: str) -> str:
    """A name as YAML, quoted where that is needed."""
    return yaml.safe_dump(name, width=10**6, allow_unicode=True).removesuffix("\n").removesuffix("\n...")
