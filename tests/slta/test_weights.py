"""Which merging weights every tensor takes, against the table made by hand."""

import functools
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from support import families, reference
from support.copies import edit_tensors
from support.families import EVERY
from support.merging import stored
from support.rounding import IN_FLOAT64, weight_rounding
from support.synthetic import random_alpha, solutions

from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.trace import trace
from mergekit_slta.levels import LEVELS
from mergekit_slta.slta.weights import TensorWeights

EXPERTS = 2


@functools.cache
def opened(architecture: str) -> tuple[Any, Decoder]:
    config = families.config_of(architecture)
    return families.random_model(config), trace(config)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("architecture", EVERY)
def test_every_tensor_takes_the_weights_of_the_table(architecture: str, level: str) -> None:
    model, decoder = opened(architecture)
    split = reference.SPLITS[architecture]
    alpha = random_alpha(decoder, level)
    state = model.state_dict(keep_vars=True)
    places = {id(tensor): [name for name in state if state[name] is tensor] for tensor in state.values()}
    weights = TensorWeights(decoder, level, solutions(alpha), families.own_layout(decoder))
    for name, tensor in state.items():
        found = weights[name]
        found = found.view(EXPERTS, *found.shape[1:], *[1] * (tensor.ndim + 1 - found.ndim))
        shared = places[id(tensor)] if ".layers." in name else [name]  # layers' tensors take the mean of all places
        own = [reference.tensor_weights(place, tensor, model, alpha, level, split) for place in shared]
        everywhere = torch.zeros(*tensor.shape, EXPERTS, dtype=torch.float64) + torch.stack(own).mean(0)
        spread = found.movedim(0, -1).expand(*tensor.shape, EXPERTS)
        assert torch.allclose(spread, everywhere, rtol=0, atol=IN_FLOAT64), name


@torch.no_grad()
def test_an_expert_whose_change_no_input_excites_takes_its_branchs_weight(
    make_family: MakeFamily, tmp_path: Path
) -> None:
    """The base model's norm lets nothing through in one dimension, and one expert changes a map in that one alone."""
    family = make_family("llama", records=3, longest=12)
    norm, key = (f"model.layers.1.{name}.weight" for name in ("post_attention_layernorm", "mlp.up_proj"))
    edit_tensors(family.base, lambda own: own[norm][5].zero_())
    base = stored(family.base)
    edit_tensors(family.experts[0], lambda own: own.update({key: base[key] + torch.eye(32)[5]}))
    expert, other = map(stored, family.experts)
    deltas = reference.deltas(family.models(), family.token_ids(), "linear", reference.SPLITS["llama"])
    alpha = reference.solve(deltas)
    assert alpha["layer.1.mlp.up_proj"][0] == 0 != alpha["layer.1.mlp.up_proj"][1]
    branch = (alpha["layer.1.mlp.gate_proj"] + alpha["layer.1.mlp.down_proj"])[0] / 2
    expected = base[key] + branch * (expert[key] - base[key])
    expected += alpha["layer.1.mlp.up_proj"][1] * (other[key] - base[key])
    merged = families.merge(families.recipe(family, level="linear", samples=3), tmp_path / "merged")
    # The one expert changes a column by 1 and the weights are off by their rounding.
    assert torch.allclose(stored(merged)[key], expected, rtol=0, atol=weight_rounding())


def test_a_norm_whose_expert_changes_no_map_of_the_branch_gets_the_layers_mean(
    make_family: MakeFamily, tmp_path: Path
) -> None:
    family, key = make_family("llama", experts=2, records=3), "model.layers.1.post_attention_layernorm.weight"
    base = stored(family.base)
    edit_tensors(family.experts[0], lambda own: own.update({name: base[name] for name in own if ".mlp." in name}))
    alpha = reference.solve(reference.deltas(family.models(), family.token_ids(), "linear", reference.SPLITS["llama"]))
    names = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    means = [
        statistics.fmean(float(alpha[f"layer.1.{branch}.{name}_proj"][expert]) for name in names[branch])
        for expert, branch in enumerate(["self_attn", "mlp"])
    ]
    merged = stored(families.merge(families.recipe(family, level="linear", samples=3), tmp_path / "merged"))
    experts = [stored(folder)[key] for folder in family.experts]
    expected = base[key] + sum(mean * (own - base[key]) for mean, own in zip(means, experts, strict=True))
    assert torch.allclose(merged[key], expected, rtol=0, atol=weight_rounding())
