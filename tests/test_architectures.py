"""Every architecture at every level against the naive reference, up to the merged model that transformers loads.

The architectures are those of tests/support/architecture_table.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from safetensors.torch import load_file, save_file
from support import families, reference
from support.adapters import write_adapter
from support.architecture_table import EVERY, LEVELS, UNMERGED
from support.copies import edit_tensors
from support.families import Family
from support.gram_difference import gram_difference
from support.rounding import gram_rounding
from transformers import AutoModelForCausalLM

from mergekit_slta.levels import of_level
from mergekit_slta.slta.solver import SubmoduleSolution, solve

RECORDS = 2
LONGEST = 12
LARGE_TASKS = ("falcon_h1",)  # which magnifies rounding, so its experts differ more from the base model
SCAN = 4 + LONGEST  # sums one after the other where a layer passes a state from token to token
ALPHA_TOLERANCE = 1e-5
# Of a tensor's largest element: the weights' error times the task vectors' share in it, and float32 rounding.
TENSOR_TOLERANCE = 1e-6

# Merged at every level; the others at their finest level alone, because tests/slta/test_weights.py says for all of them
# which weight each tensor takes at each level.
MERGED_AT_EVERY_LEVEL = ("llama", "gpt2", "gemma4", "mixtral")
# Level model runs whole models, whatever their layers are.
MEASURED = [(name, level) for name in EVERY for level in LEVELS if level != "model" or name in MERGED_AT_EVERY_LEVEL]
MERGED = [(name, level) for name in EVERY for level in LEVELS if level == "linear" or name in MERGED_AT_EVERY_LEVEL]
MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe")  # those that transformers saves expert by expert

State = dict[str, torch.Tensor]


class Case:
    """A tiny family, what calibration measures on it, and what the reference says; measured once for all levels.

    Args:
        family: the models and data.
        split: how the layers split.
        levels: the levels that apply.
    """

    def __init__(self, family: Family, split: reference.Split, levels: tuple[str, ...] = LEVELS) -> None:
        self.family = family
        self.split = split
        self.levels = levels
        self.tasks = family.token_ids()

    @cached_property
    def grams(self) -> State:
        return families.measure(self.family, *self.levels)

    @cached_property
    def models(self) -> list[Any]:
        return self.family.models()

    @functools.cache  # noqa: B019, because a module has few cases
    def deltas(self, level: str) -> dict[str, reference.Deltas]:
        """The reference's feature deltas of a level."""
        return reference.deltas(self.models, self.tasks, level, self.split)

    def solutions(self, level: str) -> dict[str, SubmoduleSolution]:
        """Solved for from the measured Gram matrices."""
        task = torch.tensor([index for index, samples in enumerate(self.tasks) for _ in samples])
        return {name: solve(self.grams[name], task) for name in of_level(self.grams, level)}

    def alpha(self, level: str) -> State:
        return {name: solution.alpha for name, solution in self.solutions(level).items()}

    def merged(self, level: str) -> State:
        """The reference's merged tensors, from the reference's own merging weights."""
        alpha = reference.solve(self.deltas(level))
        return reference.merged(self.models, alpha, level, self.split)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The case of an architecture, made once."""

    @functools.cache
    def make(name: str) -> Case:
        folder = tmp_path_factory.mktemp(name)
        family = families.make_family(folder, name, records=RECORDS, longest=LONGEST, scale=scale_of(name))
        return Case(family, reference.SPLITS[name])

    return make


def scale_of(name: str) -> float:
    """The size of an architecture's task vectors."""
    return 0.2 if name in LARGE_TASKS else 0.1


def assert_tensors_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].isfinite().all(), name
        error = (found[name].double() - tensor.double()).abs().max()
        assert error <= TENSOR_TOLERANCE * tensor.double().abs().max(), name


def loaded(folder: Path) -> State:
    """The tensors of a merged model that loads without complaint and gives finite logits."""
    opened: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = opened
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[families.BOS, 5, 6, 7]])).logits).all()
    return dict(model.state_dict())


# The matrix


@pytest.mark.parametrize(("name", "level"), MEASURED)
def test_grams_and_merging_weights_equal_the_reference(name: str, level: str, case: Callable[[str], Case]) -> None:
    found = case(name)
    expected = found.deltas(level)
    assert set(of_level(found.grams, level)) == set(expected)
    alpha = found.alpha(level)
    if level == "attn_mlp":  # each branch changes what the layer does
        assert all(deltas.grams().any() for deltas in expected.values())
    tolerance = gram_rounding(scale_of(name), SCAN)
    for submodule, deltas in expected.items():
        assert gram_difference(found.grams[submodule], deltas.grams()) < tolerance, submodule
        error = (alpha[submodule] - reference.merging_weights(deltas)).abs().max()
        assert error < ALPHA_TOLERANCE, submodule


@pytest.mark.parametrize(("name", "level"), [case for case in MERGED if case[0] not in UNMERGED])
def test_the_merged_model_is_the_references_and_loads(
    name: str, level: str, case: Callable[[str], Case], tmp_path: Path
) -> None:
    found = case(name)
    recipe = families.recipe(found.family, level=level, samples=RECORDS)
    merged = families.merge(recipe, tmp_path / "merged")
    assert_tensors_equal(loaded(merged), found.merged(level))


# Experts that leave submodules alone


def test_lora_experts_that_touch_attention_only(
    make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two LoRA on query projections and a full expert, against the same models merged by hand."""
    family = make_family("llama", experts=3, records=RECORDS, longest=LONGEST)
    recipe = families.recipe(family, samples=RECORDS)
    for index in range(2):
        adapter = write_adapter(family.base, tmp_path / f"adapter{index}", seed=index, alpha=8)
        recipe["models"][index]["model"] = f"{family.base}+{adapter}"
        tensors, factors = (
            load_file(path) for path in (family.base / "model.safetensors", adapter / "adapter_model.safetensors")
        )
        for name in tensors:
            down, up = (
                factors.get(f"base_model.model.{name.replace('.weight', f'.lora_{part}.weight')}") for part in "AB"
            )
            if down is not None and up is not None:
                tensors[name] += 8 / 2 * up @ down
        save_file(tensors, family.experts[index] / "model.safetensors", metadata={"format": "pt"})
    found = Case(family, reference.SPLITS["llama"])
    with caplog.at_level(logging.WARNING, "mergekit_slta"):
        merged = families.merge(recipe, tmp_path / "merged", lora_merge_cache=str(tmp_path / "loras"))
    assert_tensors_equal(loaded(merged), found.merged("attn_mlp"))
    assert caplog.text.count("linearly dependent") == 1
    for level in ("head_mlp", "linear"):
        for name in found.deltas(level):  # what no expert touches is exactly zero
            gram, alpha = found.grams[name], found.alpha(level)[name]
            touched = name.endswith(".q_proj") or ".head." in name
            assert gram[:, 2, 2].all()
            assert bool(gram[:, :2].any()) == bool(alpha[:2].any()) == touched


# Mixtures of experts


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
    found = Case(family, reference.SPLITS["gpt_oss"], ("linear",))
    unreached = {submodule for submodule in found.grams if ".experts.3." in submodule}
    assert unreached
    assert unreached == {submodule for submodule, gram in found.grams.items() if not gram.any()}
    merged = families.merge(families.recipe(family, level="linear", samples=RECORDS), tmp_path / "merged")
    expected = found.merged("linear")
    assert_tensors_equal(loaded(merged), expected)
    base = found.models[0].state_dict()
    for key, tensor in expected.items():
        if key.endswith("experts.gate_up_proj"):
            assert not torch.equal(tensor[3], base[key][3])


def test_a_map_that_is_never_called_takes_its_branchs_weights_and_the_log_says_so(
    case: Callable[[str], Case], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Jamba's mixer uses the weights of ``dt_proj`` itself."""
    found = case("jamba_dense")
    with caplog.at_level(logging.WARNING, "mergekit_slta"):
        merged = families.merge(families.recipe(found.family, level="linear", samples=RECORDS), tmp_path / "merged")
    base, result = found.models[0].state_dict(), loaded(merged)
    for name in ("weight", "bias"):
        assert not torch.equal(
            result[f"model.layers.0.mamba.dt_proj.{name}"], base[f"model.layers.0.mamba.dt_proj.{name}"]
        )
    assert "In 2 of 21 submodules (layer.0.mamba.dt_proj ...) experts are linearly dependent or change" in caplog.text
