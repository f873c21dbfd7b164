"""Every architecture at every level against the naive reference, up to the merged model that transformers loads."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from safetensors.torch import load_file, save_file
from support import families, reference
from support.adapters import merged_by_hand, write_adapter
from support.copies import edit_tensors
from support.families import EVERY, Family
from support.merging import State, load
from support.reference import gram_difference
from support.rounding import gram_rounding, rounding, weight_rounding
from support.slow import slow_but

from mergekit_slta.levels import LEVELS, of_level
from mergekit_slta.slta.solver import solve

RECORDS = 2
LONGEST = 12
LARGE_TASKS = ("falcon_h1",)  # which magnifies rounding, so its experts differ more from the base model
SCAN = 4 + LONGEST  # sums one after the other where a layer passes a state from token to token

# Merged at every level; the others at their finest level alone, because tests/slta/test_weights.py says for all of them
# which weight each tensor takes at each level.
MERGED_AT_EVERY_LEVEL = ("llama", "gpt2", "gemma4", "mixtral")
# Everything that moves a branch in them moves one in another architecture too.
ALIKE = ("mistral", "qwen2", "gemma", "gemma3", "phi3", "cohere", "qwen3_moe")


class Case:
    """A tiny family, what calibration measures on it at some levels, and what the reference says."""

    def __init__(self, family: Family, split: reference.Split, levels: Sequence[str] = LEVELS) -> None:
        self.family = family
        self.split = split
        self.tasks = family.token_ids()
        self.models: list[Any] = family.models()
        self.grams = families.measure(family, *levels)

    @functools.cache  # noqa: B019, because a test has one case
    def deltas(self, level: str) -> dict[str, reference.Deltas]:
        return reference.deltas(self.models, self.tasks, level, self.split)

    def alpha(self, level: str) -> State:
        """Solved for from the measured Gram matrices."""
        task = torch.tensor([index for index, samples in enumerate(self.tasks) for _ in samples])
        return {name: solve(self.grams[name], task).alpha for name in of_level(self.grams, level)}

    def merged(self, level: str) -> State:
        """The reference's merged tensors, from the reference's own merging weights."""
        alpha = reference.solve(self.deltas(level))
        return reference.merged(self.models, alpha, level, self.split)


def assert_tensors_equal(actual: State, expected: State) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].isfinite().all(), name
        error = (actual[name].double() - tensor.double()).abs().max()
        # The weights' error times the task vectors' share in a tensor is less than its own rounding.
        assert error <= rounding(SCAN) * tensor.double().abs().max(), name


def loaded(folder: Path) -> State:
    """The tensors of a merged model that loads without complaint."""
    state, info = load(folder)
    assert not any(info.values()), info
    return state


@pytest.mark.parametrize("name", slow_but({*EVERY} - {*ALIKE}, EVERY))
def test_grams_merging_weights_and_merged_models_are_the_references(
    name: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    scale = 0.2 if name in LARGE_TASKS else 0.1
    # Level model runs whole models, whatever their layers are.
    levels: Sequence[str] = LEVELS if name in MERGED_AT_EVERY_LEVEL else LEVELS[1:]
    family = make_family(name, records=RECORDS, longest=LONGEST, scale=scale)
    case = Case(family, reference.SPLITS[name], levels)
    for level in levels:
        expected, alpha = case.deltas(level), case.alpha(level)
        assert alpha.keys() == expected.keys()
        if level == "attn_mlp":  # each branch changes what the layer does
            assert all(deltas.grams().any() for deltas in expected.values())
        for submodule, deltas in expected.items():
            assert gram_difference(case.grams[submodule], deltas.grams()) < gram_rounding(scale, SCAN), submodule
            error = (alpha[submodule] - reference.merging_weights(deltas)).abs().max()
            assert error < weight_rounding(scale, SCAN), submodule
    for level in levels if name in MERGED_AT_EVERY_LEVEL else ["linear"]:
        recipe = families.recipe(family, level=level, samples=RECORDS)
        merged = families.merge(recipe, tmp_path / level)
        assert_tensors_equal(loaded(merged), case.merged(level))


def test_lora_experts_that_touch_attention_only(
    make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two LoRA on query projections and a full expert, against the same models merged by hand."""
    family = make_family("llama", experts=3, records=RECORDS, longest=LONGEST)
    recipe = families.recipe(family, samples=RECORDS)
    for index in range(2):
        adapter = write_adapter(family.base, tmp_path / f"adapter{index}", seed=index, alpha=8)
        recipe["models"][index]["model"] = f"{family.base}+{adapter}"
        by_hand = merged_by_hand(load_file(family.base / "model.safetensors"), adapter)
        tensors = {name: tensor.float() for name, tensor in by_hand.items()}
        save_file(tensors, family.experts[index] / "model.safetensors", metadata={"format": "pt"})
    case = Case(family, reference.SPLITS["llama"])
    merged = families.merge(recipe, tmp_path / "merged", lora_merge_cache=str(tmp_path / "loras"))
    assert_tensors_equal(loaded(merged), case.merged("attn_mlp"))
    assert caplog.text.count("linearly dependent") == 1
    for level in ("head_mlp", "linear"):
        for name, alpha in case.alpha(level).items():  # what no expert touches is exactly zero
            touched = name.endswith(".q_proj") or ".head." in name
            assert case.grams[name][:, 2, 2].all()
            assert bool(case.grams[name][:, :2].any()) == bool(alpha[:2].any()) == touched


def test_a_mixtures_expert_that_no_token_reaches_takes_its_branchs_weights(
    make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family("gpt_oss", records=RECORDS, longest=LONGEST)

    def shut(tensors: State) -> None:
        for key in tensors:
            if key.endswith("router.bias"):
                tensors[key][3] = -100.0

    for folder in family.folders:
        edit_tensors(folder, shut)
    case = Case(family, reference.SPLITS["gpt_oss"], ("linear",))
    unreached = {submodule for submodule in case.grams if ".experts.3." in submodule}
    assert unreached
    assert unreached == {submodule for submodule, gram in case.grams.items() if not gram.any()}
    merged = families.merge(families.recipe(family, level="linear", samples=RECORDS), tmp_path / "merged")
    expected = case.merged("linear")
    assert_tensors_equal(loaded(merged), expected)
    base = case.models[0].state_dict()
    for key, tensor in expected.items():
        if key.endswith("experts.gate_up_proj"):
            assert not torch.equal(tensor[3], base[key][3])
