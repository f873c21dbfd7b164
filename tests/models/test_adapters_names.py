"""Adapters that were trained on the same modules under other names, or on others: applied whole, or refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from mergekit.common import ModelReference
from support import families
from support.adapters import EXPERTS, FUSED, State, edit, merged_by_hand, of_experts, renamed, saved, write_adapter
from support.examining import problems, save_random
from support.merging import load, wrong_tensors
from support.slow import slow_but
from transformers import AutoConfig

from mergekit_slta.models.adapters import merge_adapter

FULL = "layers.1.self_attn.q_proj"
Q_AND_DOWN = ("self_attn.q_proj", "mlp.down_proj")


def tower_of(folder: Path) -> str:
    model = families.open_model(folder)
    paths = [path for path, _ in model.named_modules()]
    is_text = model.config.get_text_config() is model.config
    layers = [path for path in paths if path.endswith(".layers") and (is_text or "language_model" in path)]
    return layers[0].removesuffix(".layers")


def text_of(base: Path, folder: Path) -> Path:
    """A language model of a multimodal one's tower."""
    return save_random(AutoConfig.from_pretrained(base).get_text_config(), folder / "text")


def maps_of(folder: Path) -> list[str]:
    return [f"{tower_of(folder)}.layers.{layer}.{path}" for layer in range(2) for path in Q_AND_DOWN]


def listed(text: Path, whole: Path, folder: Path) -> tuple[Path, Path]:
    """Its matrices are filled by chance where they are missing."""
    return whole, edit(write_adapter(text, folder, *Q_AND_DOWN), init_lora_weights=False)


def patterned(text: Path, whole: Path, folder: Path) -> tuple[Path, Path]:
    return whole, edit(write_adapter(text, folder, *Q_AND_DOWN), target_modules=r".*\.(q|down)_proj")


def sized_apart(text: Path, whole: Path, folder: Path) -> tuple[Path, Path]:
    sizes: dict[str, Any] = {"rank_pattern": {f"model.{FULL}": 3}, "alpha_pattern": {f"model.{FULL}": 9}}
    return whole, write_adapter(text, folder, *Q_AND_DOWN, layers_to_transform=[1], **sizes)


def of_the_bare_model(text: Path, whole: Path, folder: Path) -> tuple[Path, Path]:
    adapter = write_adapter(text, folder, *Q_AND_DOWN)
    return whole, edit(adapter, renamed(lambda name: name.replace("base_model.model.model.", "base_model.model.")))


def by_older_names(text: Path, whole: Path, folder: Path) -> tuple[Path, Path]:
    """As of transformers 4."""
    adapter, maps = write_adapter(whole, folder, *maps_of(whole)), maps_of(whole)

    def older(name: str) -> str:
        return name.replace(tower_of(whole), "language_model.model")

    return whole, edit(adapter, renamed(older), target_modules=[older(path) for path in maps])


def for_the_text_alone(text: Path, whole: Path, folder: Path) -> tuple[Path, Path]:
    return text, edit(write_adapter(whole, folder, *maps_of(whole)), target_modules=r".*\.(q|down)_proj")


WAYS = (listed, patterned, sized_apart, of_the_bare_model, by_older_names, for_the_text_alone)
WITH_TEXT_MODELS = ("gemma3_vision", "gemma4_vision", "llama4_vision", "mistral3", "paligemma", "qwen3_5")


@pytest.mark.parametrize("architecture", slow_but({"gemma3_vision"}, WITH_TEXT_MODELS))
@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_is_applied_by_whichever_names_it_has(
    way: Any, architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    """Against W + scale B A in float64: every tensor of the adapter is in the expert, and nothing else is."""
    family = make_family(architecture, experts=0)
    base, adapter = way(text_of(family.base, tmp_path), family.base, tmp_path / "adapter")
    expert = merge_adapter(ModelReference.parse(f"{base}+{adapter}"), str(tmp_path / "cache"), False, "float32")
    inner, tower = re.compile(r".*?(layers\.)"), tower_of(base)
    found, before = load(Path(expert.model.path))[0], load(base)[0]
    alphas = {FULL: 9 if way is sized_apart else 4}
    wanted = merged_by_hand(before, adapter, lambda name: inner.sub(rf"{tower}.\1", name, count=1), **alphas)
    assert wrong_tensors(found, wanted.__getitem__, wanted) == []
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    assert len(changed) == len(saved(adapter)) / 2


def with_experts_by_hand(base: State, adapter: Path, architecture: str) -> State:
    place, maps = EXPERTS[architecture]
    found, tensors = {name: tensor.double() for name, tensor in base.items()}, saved(adapter)
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        change = 2 * tensors[name.replace("lora_A", "lora_B")].double() @ down.double()
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        layer, _, rest = module.partition(f".{place}.")
        if rest == "gate":
            found[f"{layer}.mlp.gate.weight"] += change
            continue
        _, expert, old = rest.split(".")
        fused = next(own for own, names in maps.items() if old in names)
        index, stack = maps[fused].index(old), found[f"{layer}.mlp.experts.{fused}"]
        stack[int(expert)].chunk(len(maps[fused]))[index].add_(change)
    return found


@pytest.mark.parametrize("architecture", EXPERTS)
@pytest.mark.parametrize("parts", [(*FUSED, "gate"), ("down_proj",)], ids="+".join)
def test_an_adapter_of_experts_by_older_names_is_applied(
    architecture: str, parts: tuple[str, ...], make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture)
    adapter = of_experts(load(family.base)[0], architecture, tmp_path / "adapter", parts)
    recipe = families.recipe(family, experts=[0, 1])
    recipe["models"][1]["model"] = f"{family.base}+{adapter}"
    assert problems(recipe, options={"lora_merge_cache": str(tmp_path / "cache")}) == []
    expert = merge_adapter(ModelReference.parse(f"{family.base}+{adapter}"), str(tmp_path / "cache"), False, "float32")
    found = load(Path(expert.model.path))[0]
    wanted = with_experts_by_hand(load(family.base)[0], adapter, architecture)
    assert wrong_tensors(found, wanted.__getitem__, wanted) == []
