"""Recipes and models with something wrong about them, and what examining them finds."""

import json
from pathlib import Path
from typing import Any

import transformers
from support import families
from support.families import Family

from mergekit_slta.checks.examine import Findings, examine
from mergekit_slta.errors import SltaError


def look(recipe: dict[str, Any], **arguments: Any) -> Findings:
    """Examine a recipe; ``options`` are those of ``MergeOptions``.

    The notes are those on anything but records for ``evaluate``, of which small families have none.
    """
    experiment = families.experiment(recipe, **arguments.pop("options", {}))
    try:
        notes = examine(experiment, **arguments)
        return Findings([], [note for note in notes if "left for `evaluate`" not in note])
    except SltaError as error:
        return Findings(list(error.sentences), [], exit_code=error.exit_code)


def problems(recipe: dict[str, Any], **arguments: Any) -> list[str]:
    return look(recipe, **arguments).problems


def only(recipe: dict[str, Any], **arguments: Any) -> str:
    """The one problem of a recipe."""
    (problem,) = problems(recipe, **arguments)
    return problem


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def save_random(config: transformers.PretrainedConfig, folder: Path, model: str = "AutoModelForCausalLM") -> Path:
    """A random model with the families' tokenizer."""
    auto = getattr(transformers, model)
    (auto.from_config(config) if model.startswith("Auto") else auto(config)).save_pretrained(folder)
    families.write_tokenizer(folder)
    return folder


def with_data(family: Family, calibration: Any, **parameters: Any) -> dict[str, Any]:
    """A recipe whose first expert has other data."""
    recipe = families.recipe(family, experts=[0, 1], **parameters)
    recipe["models"][0]["parameters"] |= {"calibration": str(calibration)}
    return recipe


def feature_recipe(family: Family, **parameters: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"samples": 6, **parameters}
    return families.recipe(family, "featcal", **settings)


def larger_vocabulary(folder: Path) -> Path:
    """A model with two more tokens than the families have."""
    return save_random(families.config_of("llama", vocab_size=families.VOCABULARY + 2), folder)


def swap_ids(folder: Path) -> None:
    """Give two tokens of a model's tokenizer each other's ids."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    tokens = content["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    file.write_text(json.dumps(content))


def add_tokens(folder: Path, *tokens: str, special: bool = False) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([*tokens], special_tokens=special)
    tokenizer.save_pretrained(folder)


CHATML = (
    "{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{% endfor %}"
)
MARKERS = ["<|im_start|>", "<|im_end|>"]


def chat_tokenizer(folder: Path) -> list[int]:
    """Give a tokenizer ChatML's template, and its markers the next free ids; the ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(MARKERS, special_tokens=True)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return [tokenizer.get_vocab()[marker] for marker in MARKERS]


def chat_model(folder: Path) -> list[int]:
    """Give a model ChatML's template, and its markers the next free ids, at the last of which it stops; the ids."""
    ids = chat_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[1], families.EOS], "top_k": 7}))
    edit_config(folder, eos_token_id=ids[1])
    return ids


def t5(folder: Path) -> Path:
    return save_random(families.config_of("t5"), folder, "T5ForConditionalGeneration")


def grow(folder: Path, nbytes: int) -> None:
    """Add a tensor of ``nbytes`` to a checkpoint; the file system stores none of them."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = len(content) - 8 - length
    header["model.huge"] = {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [end, end + nbytes]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + content[8 + length :])
        out.truncate(8 + len(text) + end + nbytes)
