"""A commented recipe to start from, with what only the user can know left to fill in."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jinja2
import yaml

from mergekit_slta.errors import SltaError

_RECIPE = """\
{% if keep %}
# Take what a fine-tune learned, and keep what its base model can.
{% else %}
# A merge of {{ experts|length }} experts with {{ base }} as their base model.
{% endif %}
#   mergekit-slta check RECIPE      says what is missing or wrong, before any work
#   mergekit-yaml RECIPE ./merged   merges (or: mergekit-slta merge RECIPE ./merged)
{% if keep %}
merge_method: featcal   # every linear map is solved, so that it does what each model does on that model's samples
{% else %}
merge_method: slta      # weights for each part of the model, solved from samples. Others: featcal (every linear map
                        # solved, with samples), actmat and sftm (without samples, so without 'calibration')
{% endif %}
base_model: {{ base|scalar }}
models:
{% for expert in experts %}
  - model: {{ expert|scalar }}
    parameters:
{% if loop.first %}
      # Some 30 prompts of this expert's own task, with answers: a file (.jsonl, .json, .csv, .parquet or .txt with a
      # sample on each line), or a dataset of the Hub, "hf:ORG/NAME?config=main&split=train". Each expert needs its own.
      # template: "{question} {answer}"   # how a record becomes text, where its fields have other names than usual
{% endif %}
      calibration: ""
{% endfor %}
{% if keep %}
  - model: {{ base|scalar }}
    parameters:
      # Some 30 prompts, with answers, of what the base model can do and the merge should not forget: your own chats, or
      # a general instruction dataset. Without them, delete this entry, and the merge is little more than the expert.
      calibration: ""
      weight: 1.0         # more keeps more of the base model, less gains more of the expert; 0 leaves it out
{% endif %}
parameters:
{% if not keep %}
  level: attn_mlp       # what gets weights of its own: model, layer, attn_mlp, head_mlp or linear
{% endif %}
  samples: 30           # samples of each task
  max_tokens: 512       # of each sample; the rest is cut
{% if not keep %}
  # statistics: merge.slta.safetensors   # keep what was measured in a file, to merge again without data
{% endif %}
  # report: report/                      # write what the merge keeps of each expert, as a page with figures
dtype: float32          # merge in this type ...
out_dtype: bfloat16     # ... and round once, to this one
"""


def new_recipe(base: str, experts: Sequence[str]) -> str:
    """Write a recipe with comments that say what there is to fill in and to choose.

    Several experts are merged by ``slta``; one by ``featcal``, with prompts of what the base model is to keep.

    Args:
        base: the base model, a folder or a Hub id.
        experts: the experts, folders or Hub ids; an adapter behind its base model, ``BASE+ADAPTER``. A folder that is
            there is written with a leading ``./``, which mergekit does not look up on the Hub.

    Returns:
        The recipe as YAML. It can be read as it is; ``check`` names the calibration sources that are missing.

    Raises:
        SltaError: there is no expert, or one is named twice.
    """
    if not experts:
        raise SltaError("A merge needs at least one expert: name the models that were fine-tuned from the base model.")
    base, *experts = map(_local, (base, *experts))
    if len({base, *experts}) < 1 + len(experts):
        raise SltaError(f"A model is named twice ({', '.join((base, *experts))}): name each once.")
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters["scalar"] = _scalar
    return environment.from_string(_RECIPE).render(base=base, experts=experts, keep=len(experts) == 1)


def _local(name: str) -> str:
    """A model's name; a relative path to an existing folder begins with a dot, so that it is no Hub id."""
    parts = name.split("+")
    return "+".join(f"./{part}" if part and part[0] not in "./~" and os.path.isdir(part) else part for part in parts)


def _scalar(name: str) -> str:
    """A name as YAML, quoted where that is needed."""
    return yaml.safe_dump(name, width=10**6, allow_unicode=True).removesuffix("\n").removesuffix("\n...")
