"""The language tower of multimodal models: measured, merged and put back between the other towers."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from mergekit.common import ModelReference
from safetensors.torch import load_file, save_file
from support import families, reference
from support.adapters import write_adapter
from support.families import CURRENT, MULTIMODAL, Family
from support.merging import fuse_experts
from support.reference import gram_difference
from support.rounding import gram_rounding, state_rounding
from support.slow import slow_but
from test_architectures import LONGEST, RECORDS, assert_tensors_equal
from transformers import AutoConfig, AutoModelForCausalLM

from mergekit_slta.levels import LEVELS
from mergekit_slta.models.adapters import merge_adapter
from mergekit_slta.slta.statistics import Statistics

SCALE = 0.2  # of the task vectors: features are rounded alike whatever it is, so their deltas are known better
GRAM_TOLERANCE = gram_rounding(SCALE)
# Gemma 4 does not divide its attention's logits by the root of a head's width, 8, so float32 rounds its heads more.
SHARP_GRAM_TOLERANCE = 8**0.5 * GRAM_TOLERANCE
# Qwen 3.5's linear attention passes a state from token to token, which makes a sum after the other for each of 45.
SCANNED_GRAM_TOLERANCE = gram_rounding(SCALE, 4 + 45)
PROMPT = torch.tensor([[families.BOS, 5, 6, 7]])


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """The family of an architecture, made once: not to be changed."""

    @functools.cache
    def make(name: str) -> Family:
        folder = tmp_path_factory.mktemp(name)
        family = families.make_family(folder, name, records=RECORDS, longest=LONGEST, scale=SCALE)
        if name == "qwen3_5_moe":  # as on the Hub
            for own in family.folders:
                fuse_experts(own)
        return family

    return make


def load(folder: Path) -> Any:
    """A merged model that loads without complaint, in float64."""
    cls = families.model_class(AutoConfig.from_pretrained(folder))
    # The faster ways to run a mixture's experts know no float64, and torch's own attention lets PaliGemma see ahead.
    settings: Any = {"dtype": torch.float64, "experts_implementation": "eager", "attn_implementation": "eager"}
    model, info = cls.from_pretrained(folder, output_loading_info=True, **settings)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("name", slow_but(("gemma4_vision", "qwen3_5_moe", "paligemma"), MULTIMODAL))
def test_grams_are_those_of_the_whole_models_forward_pass(name: str, family_of: Callable[[str], Family]) -> None:
    family, tasks = family_of(name), families.wide_tasks(2, samples=2)
    measured, models = families.measure(family, *LEVELS, tasks=tasks), family.models()
    expected: dict[str, reference.Deltas] = {}
    for level in LEVELS:
        expected |= reference.deltas(models, tasks, level, reference.SPLITS[name])
    assert measured.keys() == expected.keys()
    for submodule, own in expected.items():
        sharp = name == "gemma4_vision" and ".head." in submodule
        usual = SCANNED_GRAM_TOLERANCE if name.startswith("qwen3_5") else GRAM_TOLERANCE
        assert gram_difference(measured[submodule], own.grams()) < (SHARP_GRAM_TOLERANCE if sharp else usual), submodule


@pytest.mark.parametrize("name", slow_but(("gemma4_vision", "qwen3_5_moe", "llama4_vision", "qwen2_5_vl"), MULTIMODAL))
def test_the_merged_model_is_the_one_made_by_hand(
    name: str, family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    """Its other towers are the base model's, at level model too."""
    family, split, level = family_of(name), reference.SPLITS[name], "model" if name == "qwen2_5_vl" else "layer"
    merged = load(families.merge(families.recipe(family, level=level, samples=RECORDS), tmp_path / "merged"))
    by_hand: Any = family.model(0)
    alpha = reference.solve(reference.deltas(family.models(), family.token_ids(), level, split))
    expected = reference.merged(family.models(), alpha, level, split)
    assert_tensors_equal(merged.state_dict(), expected)
    by_hand.load_state_dict(expected)
    texts = [model.generate(PROMPT, max_new_tokens=8, do_sample=False) for model in (merged, by_hand)]
    assert torch.equal(*texts)


def test_a_head_that_is_stored_is_not_tied_by_a_default(tmp_path: Path) -> None:
    """As Mistral Small's, whose configuration says nothing of it, and whose class ties."""
    family = families.make_family(tmp_path, families.config_of("mistral3", tie_word_embeddings=False), experts=2)
    for folder in family.folders:
        config = json.loads((folder / "config.json").read_text())
        assert not config.pop("tie_word_embeddings")
        (folder / "config.json").write_text(json.dumps(config))
    recipe = families.recipe(family, "featcal")
    assert families.experiment(recipe).decoder.head is not None
    out = families.merge(recipe, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    merged: Any = load(out)
    assert not torch.equal(merged.get_output_embeddings().weight, merged.get_input_embeddings().weight)


def adapted_maps(name: str) -> list[str]:
    """The linear maps in an architecture's decoder layers that peft can adapt."""
    layers, modules = reference.SPLITS[name].layers, families.skeleton(name).model.named_modules()
    maps = [path for path, own in modules if isinstance(own, torch.nn.Linear) and path.startswith(f"{layers}.")]
    return [path for path in maps if not path.endswith("mamba.out_proj")]  # which peft refuses


# Routed experts apart, and all of them in one matrix.
ADAPTED = ("qwen3_5_moe", "llama4_vision")


@pytest.mark.parametrize("name", slow_but(ADAPTED, CURRENT))
def test_an_adapter_is_merged_as_the_model_that_peft_makes_of_it(
    name: str, family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    family = family_of(name)
    experts = {"qwen3_5_moe": ["experts.gate_up_proj", "experts.down_proj"]}.get(name, [])
    adapter = write_adapter(family.base, tmp_path / "adapter", *adapted_maps(name), parameters=experts)
    by_peft = peft.PeftModel.from_pretrained(
        families.model_class(family.config).from_pretrained(family.base, dtype=torch.float32), str(adapter)
    )
    by_peft.merge_and_unload().save_pretrained(tmp_path / "full")
    expert = merge_adapter(ModelReference.parse(f"{family.base}+{adapter}"), str(tmp_path / "cache"), False, "float32")
    states = [load(folder).state_dict() for folder in (Path(expert.model.path), tmp_path / "full")]
    assert_tensors_equal(*states)
    base = family.model(0).state_dict()
    changed = {path for path in base if not torch.equal(states[0][path], base[path])}
    assert {f"{path}.weight" for path in adapted_maps(name)} <= changed
    assert all(any(parameter in path for path in changed) for parameter in experts)


def test_a_plain_recipe_tells_the_towers_apart(family_of: Callable[[str], Family], tmp_path: Path) -> None:
    family, level = family_of("gemma3_vision"), "model"
    shared: Any = {"level": level, "statistics": str(tmp_path / "s.safetensors")}
    merged = load(families.merge(families.recipe(family, samples=RECORDS, **shared), tmp_path / "merged"))
    paths = {folder.name: str(folder) for folder in family.folders}
    solution = Statistics.load(tmp_path / "s.safetensors").solve(level)
    solution.save_recipe(tmp_path / "plain.yml", models=paths)
    weights = json.dumps(families.yaml.safe_load((tmp_path / "plain.yml").read_text()))
    assert "language_model" in weights
    for folder in family.folders:  # mergekit alone knows the names of the checkpoints on the Hub only
        as_on_the_hub(folder, tmp_path / folder.name)
    plain = weights.replace(str(family.base.parent), str(tmp_path))
    again = load(families.merge(json.loads(plain), tmp_path / "plain"))
    assert_tensors_equal(again.state_dict(), merged.state_dict())


def as_on_the_hub(folder: Path, copy: Path) -> None:
    """Gemma 3 as transformers 4 saved it, with another module around its vision tower."""
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    spelled = {name.replace("vision_tower.", "vision_tower.vision_model."): own for name, own in tensors.items()}
    save_file(spelled, copy / "model.safetensors", {"format": "pt"})


def test_a_checkpoint_of_an_older_transformers_is_the_same_model(
    family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    family = family_of("gemma3_vision")
    recipe = families.recipe(family, level="layer", samples=RECORDS)
    expected = load(families.merge(recipe, tmp_path / "same")).state_dict()
    as_on_the_hub(family.experts[0], tmp_path / "older")
    recipe["models"][0]["model"] = str(tmp_path / "older")
    assert_tensors_equal(load(families.merge(recipe, tmp_path / "merged")).state_dict(), expected)


def save_text_model(family: Family, index: int, folder: Path) -> Path:
    """The language tower of a family's model as a model of its own."""
    whole = families.model_class(family.config).from_pretrained(family.folders[index], dtype=torch.float32)
    text = AutoModelForCausalLM.from_config(family.config.get_text_config(), dtype=torch.float32)
    split = reference.SPLITS["llama4_vision" if "llama4" in family.config.model_type else "qwen3_vl"]
    tower = split.layers.removesuffix("layers")
    state = {name.replace(tower, "model."): tensor for name, tensor in whole.state_dict().items()}
    state |= {name.removeprefix("language_model."): tensor for name, tensor in state.items()}
    text.load_state_dict({name: state[name] for name in text.state_dict()})
    text.save_pretrained(folder)
    families.write_tokenizer(folder)
    return folder


def without_spaces(family: Family, folder: Path) -> Family:
    """A family's models with a copy of its data that every class of tokenizers takes apart alike."""
    files = tuple(folder / file.name for file in family.data)
    for file, spaceless in zip(family.data, files, strict=True):
        spaceless.write_text(file.read_text().replace('": "', '":"').replace(" ", ""))
    return Family(family.base, family.experts, files, family.config)


def test_a_text_model_is_the_language_tower_of_a_multimodal_one(
    family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    family = without_spaces(family_of("llama4_vision"), tmp_path)
    recipe = families.recipe(family, level="model", samples=RECORDS)
    expected = load(families.merge(recipe, tmp_path / "same"))
    for index in (0, 1):
        content = json.loads(json.dumps(recipe))
        folder = str(save_text_model(family, index, tmp_path / f"text{index}"))
        content |= {"base_model": folder} if index == 0 else {}
        content["models"][0] |= {"model": folder} if index == 1 else {}
        merged = load(families.merge(content, tmp_path / f"merged{index}"))
        assert type(merged).__name__.endswith("ForCausalLM") == (index == 0)
        with torch.no_grad():
            assert torch.allclose(merged(PROMPT).logits, expected(PROMPT).logits, rtol=0, atol=state_rounding())


def test_experts_that_are_all_text_models_leave_the_other_towers_alone(
    family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    family = without_spaces(family_of("qwen3_5"), tmp_path)
    recipe = families.recipe(family, "featcal", samples=RECORDS)
    for index, entry in enumerate(recipe["models"], 1):
        entry["model"] = str(save_text_model(family, index, tmp_path / f"text{index}"))
    merged, base = load(families.merge(recipe, tmp_path / "merged")).state_dict(), family.model(0).state_dict()
    assert all(torch.equal(merged[name], base[name]) for name in base if ".visual." in name)
    assert not torch.equal(merged["lm_head.weight"], base["lm_head.weight"])
