"""The products that settings share: which maps they are of, and that they replace as many as they should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import MakeFamily
from support import families
from support.families import Family
from support.linearity_values import assert_same
from torch.utils.flop_counter import FlopCounterMode

from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.products import exact_products
from mergekit_slta.nonlinearity import interpolation
from mergekit_slta.nonlinearity.products import FirstMaps, first_maps
from mergekit_slta.nonlinearity.scores import Linearity, Plan, plan_studies

QUERIES = {f"self_attn.{name}_proj" for name in "qkv"}
GATES = {"mlp.gate_proj", "mlp.up_proj"}


@pytest.mark.parametrize(
    ("architecture", "whole", "attention", "mlp"),
    [
        ("llama", QUERIES, QUERIES, GATES),
        ("gemma2", QUERIES, QUERIES, GATES),
        ("gpt2", {"attn.c_attn"}, {"attn.c_attn"}, {"mlp.c_fc"}),
        ("phi", QUERIES | {"mlp.fc1"}, QUERIES, {"mlp.fc1"}),
        ("mixtral", QUERIES, QUERIES, set()),  # its router returns more than a product
    ],
)
def test_the_first_maps_of_a_layer_and_of_its_branches(
    architecture: str, whole: set[str], attention: set[str], mlp: set[str], make_family: MakeFamily
) -> None:
    found = first_maps(Decoder(make_family(architecture, experts=1, records=1).config), 0)
    assert {run: set(maps) for run, maps in found.items()} == {"whole": whole, "attn": attention, "mlp": mlp}


def base_norms(name: str) -> bool:
    return "norm" not in name


def any_tensor(name: str) -> bool:
    return True


def no_first_maps(decoder: Decoder, layer: int) -> FirstMaps:
    return {run: {} for run in ("whole", "attn", "mlp")}


@pytest.mark.parametrize(
    ("levels", "touch", "share"),
    [
        pytest.param(["attn_mlp"], base_norms, 0.5, marks=pytest.mark.slow),
        (["attn_mlp"], any_tensor, 0.6),
        (["layer", "attn_mlp"], base_norms, 0.75),
    ],
)
def test_settings_that_share_products_give_the_same_numbers_for_fewer(
    levels: list[str],
    touch: Callable[[str], bool],
    share: float,
    make_family: MakeFamily,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = make_family(families.config_of("llama", num_hidden_layers=1), experts=2, records=1, touch=touch)
    shared, fewer = counted(family, levels)
    monkeypatch.setattr(interpolation, "first_maps", no_first_maps)
    single, all_products = counted(family, levels)
    assert fewer < share * all_products
    assert_same(shared, single, 1e-6)


def counted(family: Family, levels: list[str]) -> tuple[Linearity, int]:
    """Linearity and the multiplications of its products of matrices, nearly all by linear maps."""
    models = families.checkpoints(family.folders)
    plan = Plan(Decoder(family.config), models, ("one", "two"), family.token_ids(), levels, plan_studies(2))
    first_maps(plan.decoder, 0)  # found once, whatever is measured
    with exact_products():  # tries its products once
        pass
    with FlopCounterMode(display=False) as counter:
        return plan.measure(), counter.get_flop_counts()["Global"][torch.ops.aten.mm]


def test_a_setting_of_several_studies_runs_once(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [samples[:1] for samples in llama.token_ids()]
    models = families.checkpoints(llama.folders)
    decoder, runs = Decoder(llama.config), 0
    plan = Plan(decoder, models, ("one", "two", "three"), tasks, ["layer"], plan_studies(3, triples=True))
    first_maps(decoder, 0)
    run = Decoder.run

    def counting(self: Decoder, *arguments: object, **more: object) -> object:
        nonlocal runs
        runs += 1
        return run(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "run", counting)
    plan.measure()
    # For each task: the base model, ten steps, two other experts, 25 merges in each of two pairs, 27 of the triple.
    assert runs == len(decoder) * 3 * (1 + 10 + 2 + 2 * 25 + 27)
    assert plan.passes == 3 * (1 + 10 + 2 + 2 * 25 + 27)
