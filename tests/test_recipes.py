"""Every recipe in ``examples/recipes``: it reads, its commands do, and tiny models of its architecture merge by it."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import families
from support.adapters import write_adapter
from support.examining import chat_model, problems
from transformers import AutoTokenizer

from mergekit_slta.cli.commands import main
from mergekit_slta.data.records import template_fields
from mergekit_slta.data.sources import is_dataset, source_key
from mergekit_slta.recipe.recipe import Recipe, require_calibration
from mergekit_slta.recipe.settings import SltaSettings

FOLDER = Path(__file__).parents[1] / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yml"))
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# The beginning of a recipe's name, and the tiny model of its architecture.
ARCHITECTURES = {
    "gemma-4": "gemma4_vision",
    "llama": "llama",
    "mistral": "mistral",
    "nemo": "mistral",
    "qwen3.6-27b": "qwen3_5",
    "qwen3.8-27b": "qwen3_5",
    "qwen3.6-35b-a3b": "qwen3_5_moe",
}
WITHOUT_CHAT_TEMPLATE = ("meta-llama/Llama-3.1-8B", "mistralai/Mistral-Nemo-Base-2407")
ADAPTED = "language_model.layers.0.self_attn.q_proj"

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def commands(path: Path) -> list[list[str]]:
    """The commands in a recipe's comment, by words."""
    comment = re.sub(r"\\\n#", "", path.read_text())
    return [shlex.split(line) for line in re.findall(r"^#   (merge.*?)(?:  +\(.*)?$", comment, re.M)]


@each_recipe
def test_a_recipe_is_sound(path: Path) -> None:
    recipe = Recipe.load(path)
    recipe.require_sound()
    assert recipe.config.dtype == "float32" and recipe.config.out_dtype == "bfloat16"
    names = [own.path for reference in recipe.references for own in (reference.model, reference.lora) if own]
    assert all(map(HUB_NAME.fullmatch, names))
    without = str(recipe.base) in WITHOUT_CHAT_TEMPLATE
    assert without == (recipe.tokenizer_owner in [expert.reference for expert in recipe.experts])
    assert without == bool(recipe.config.chat_template)
    if recipe.settings.runs_models:
        settings = recipe.settings
        require_calibration(recipe, statistics=isinstance(settings, SltaSettings) and bool(settings.statistics))
        for task in recipe.tasks:
            assert not task.template or template_fields(task.template)
            kind, dataset, *_ = source_key(task.calibration or "hf:org/none")
            assert kind == "file" or HUB_NAME.fullmatch(dataset)


@each_recipe
def test_the_commands_of_a_recipe_are_known_and_write_the_files_that_it_names(path: Path, here: None) -> None:
    shutil.copy(path, ".")
    Path("merged").mkdir()
    written: dict[str, str] = {}
    for program, name, *words in commands(path):
        if program == "mergekit-yaml":
            assert [name, words[0]] == [path.name, "./merged"]
            continue
        given = main.commands[name].make_context(name, [*words]).params  # refuses what the command does not know
        assert name == "ask" or path.name in words
        written |= {str(given["out"]): given["model"]} if name == "ask" else {}
    tasks = Recipe.load(path).tasks
    files = {task.calibration: str(task.reference) for task in tasks if not is_dataset(task.calibration)}
    assert written == {file: model for file, model in files.items() if file}


@each_recipe
def test_tiny_models_merge_by_a_recipe(path: Path, here: None, tmp_path: Path) -> None:
    """The recipe as it is, but for the names of models, fewer tokens, and data that are local and have a ``text``."""
    content = yaml.safe_load(path.read_text())
    architecture = next(known for name, known in ARCHITECTURES.items() if path.name.startswith(name))
    family = families.make_family(tmp_path, architecture, experts=len(content["models"]))
    names, options = {content["base_model"]: str(family.base)}, {}
    for index, entry in enumerate(content["models"]):
        model, _, adapter = entry["model"].partition("+")
        names.setdefault(model, str(family.experts[index]))
        entry["model"] = names[model]
        if adapter:
            entry["model"] += f"+{write_adapter(family.base, tmp_path / 'adapter', ADAPTED)}"
            options = {"lora_merge_cache": str(tmp_path / "lora")}
        if content["merge_method"] in ("slta", "featcal"):
            own: dict[str, Any] = {"weight": 1.0} if entry["model"] == str(family.base) else {}
            entry["parameters"] = own | {"calibration": str(family.data[index])}
    content["base_model"] = str(family.base)
    content.get("parameters", {}).pop("statistics", None)
    if owner := content.get("tokenizer"):
        owner["source"] = names[owner["source"]]
        end = chat_model(Path(owner["source"]))[1]
    assert problems(content, options=options) == []
    if owner:
        families.merge(content, tmp_path / "out", copy_tokenizer=True)
        merged = AutoTokenizer.from_pretrained(tmp_path / "out")
        text = merged.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        assert "<|im_start|>user\na<|im_end|>" in text
        stops = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
        assert end in (stops if isinstance(stops, list) else [stops])
