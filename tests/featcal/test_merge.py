"""The feature merge against explicit least squares on whole models, its limits, and what must not change it."""

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from support import families, featcal_reference
from support.copies import edit_tensors
from support.examining import edit_config
from support.families import ARCHITECTURES, CURRENT, LAYERS, MULTIMODAL, UNSPLIT, Family
from support.reference import forget, layer_outputs
from support.rounding import regression_rounding, state_rounding
from support.slow import slow_but

from mergekit_slta.featcal import groups, merge, regression
from mergekit_slta.featcal.merge import ENOUGH_TOKENS
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.trace import trace

TOLERANCE = regression_rounding()  # of a tensor's norm; float32 features and products against float64 ones
DECODERS = (*ARCHITECTURES, *UNSPLIT, *MULTIMODAL)
EXACT = 1e-9  # a ridge that holds nothing

State = dict[str, torch.Tensor]
Tasks = list[list[list[int]]]


def merged_tensors(family: Family, folder: Path, **arguments: Any) -> State:
    """What a feature merge solves; ``arguments`` are those of ``families.feature_merge``."""
    families.feature_merge(family, folder, **arguments)
    return families.solved_tensors(folder)


def worst(found: State, expected: State) -> float:
    """The largest error of a found tensor relative to its norm."""
    return max(float((found[n] - expected[n]).norm() / (expected[n].norm() or 1.0)) for n in found)


def solved_names(decoder: Decoder) -> set[str]:
    head = decoder.head
    return families.solved_in_layers(decoder) | ({name for name in (head.weight, head.bias) if name} if head else set())


def logits(model: Any, state: State, tasks: Tasks) -> torch.Tensor:
    """The logits [tokens, V] of a model with other tensors, in float64."""
    model.load_state_dict(model.state_dict() | {name: tensor.double() for name, tensor in state.items()})
    found = []
    with torch.no_grad():
        for ids in (ids for task in tasks for ids in task):
            forget(model)
            found.append(model(torch.tensor([ids])).logits[0])
    return torch.cat(found)


# The reference


FEWER_TOKENS = {"records": 2, "longest": 8}  # in all, than the dimensions of every input


@pytest.mark.parametrize(
    ("architecture", "data", "ridge"),
    [
        *((name, {"records": 4, "longest": 16}, 0.1) for name in featcal_reference.GROUPS if name != "longcat_flash"),
        # it has many groups of maps
        pytest.param("longcat_flash", {"records": 4, "longest": 16}, 0.1, marks=pytest.mark.slow),
        ("mixtral", FEWER_TOKENS, 0.05),
    ],
)
def test_equals_the_reference(
    architecture: str, data: dict[str, int], ridge: float, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture, **data)
    base, *experts = family.models()
    tasks = family.token_ids()
    assert (sum(len(ids) for task in tasks for ids in task) < 32) == (data is FEWER_TOKENS)
    anchor = families.actmat_state(family)
    expected = featcal_reference.merge(base, experts, tasks, architecture, anchor, ridge=ridge)
    found = merged_tensors(family, tmp_path, batch_tokens=50, ridge=ridge)
    before = {name: anchor[name].double() for name, _ in base.named_parameters()}  # shared ones by their first name
    assert worst(before | found, expected) < TOLERANCE
    # Not the anchor that a solution is compared with, either.
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, expected[name])}
    assert changed == solved_names(trace(family.config))


# Limits


@pytest.mark.parametrize("architecture", slow_but({*CURRENT, "gpt_oss", "jamba_dense"}, DECODERS))
def test_one_expert_and_no_ridge_give_what_that_expert_does(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    tasks, solved = families.wide_tasks(1), solved_names(families.skeleton(architecture))
    family = make_family(architecture, experts=1, touch=solved.__contains__)
    found = merged_tensors(family, tmp_path, tasks=tasks, ridge=EXACT)
    base, expert = family.models()
    parameters, state = dict(base.named_parameters()), base.state_dict()
    assert all(tensor.shape == state[name].shape and tensor.dtype == torch.float32 for name, tensor in found.items())
    # transformers fills some buffers anew when it loads a model
    assert {n for n in found if n in parameters and not torch.equal(found[n].double(), state[n])} == solved
    before, wanted = logits(base, {}, tasks), logits(expert, {}, tasks)
    assert (logits(base, found, tasks) - wanted).norm() < TOLERANCE * (before - wanted).norm()


# What must not matter


@pytest.mark.parametrize(
    "architecture",
    # tests/slta/test_grams_calibration.py cuts the batches of the others, too.
    slow_but(("mixtral", "falcon_alibi"), ("mixtral", "falcon_alibi", "llama4", "granite_moe_hybrid", "gemma4")),
)
def test_batches_and_their_padding_do_not_matter(architecture: str, make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(architecture, longest=30)
    rows = [row for task in family.token_ids() for row in task]
    assert len({len(row) for row in rows}) > 3
    weights = [torch.arange(1.0, len(row) + 1) for row in rows]  # so that each must find its own token
    one_by_one, together = (
        merged_tensors(family, tmp_path / str(positions), batch_tokens=positions, token_weights=weights)
        for positions in (1, 70)
    )
    assert worst(together, one_by_one) < TOLERANCE


def test_the_order_of_the_prompts_chooses_no_ridge(
    make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    family = make_family("mixtral", records=7)
    tasks, found, ridges = family.token_ids(), [], []
    turned, twice = [[*samples[2:], *samples[:2]][::-1] for samples in tasks], [samples * 2 for samples in tasks]
    for name, ordered in {"drawn": tasks, "another": turned, "twice": twice}.items():
        caplog.clear()
        families.feature_merge(family, tmp_path / name, tasks=ordered, ridge=None)
        ridges.append(re.findall(r"solved with a ridge of (\S+)", caplog.text))
        found.append(families.solved_tensors(tmp_path / name))
    assert ridges[0] == ridges[1] == ridges[2] and len(set(ridges[0])) > 1
    assert worst(*found[:2]) < TOLERANCE and worst(*found[1:]) < TOLERANCE


def test_a_sample_of_weight_two_is_two_samples(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("mixtral")
    tasks = family.token_ids()
    weights = [torch.full((len(row),), 1.0 + (number == 0)) for task in tasks for number, row in enumerate(task)]
    weighted = merged_tensors(family, tmp_path / "weighted", tasks=tasks, token_weights=weights)
    repeated = merged_tensors(family, tmp_path / "repeated", tasks=[[task[0], *task] for task in tasks])
    assert worst(weighted, repeated) < regression_rounding(0.1)


def test_the_head_in_parts_is_the_same(llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = merged_tensors(llama, tmp_path / "whole", ridge=0.1)
    monkeypatch.setattr(merge, "HEAD_ELEMENTS", 32 * 7)
    assert worst(merged_tensors(llama, tmp_path / "parts", ridge=0.1), whole) < regression_rounding(0.1)


# Routed experts


def test_routed_experts_that_few_tokens_reach_keep_the_anchors_maps_and_are_named(
    make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = make_family("mixtral")
    monkeypatch.setattr(merge, "listed", ", ".join)  # all of them
    found = merged_tensors(family, tmp_path, tasks=[[[1, 5]], [[1, 9]]])
    said = [message for message in caplog.messages if message.endswith(" are merged as by actmat, not solved")]
    pattern = r"mlp\.experts\.(\d+)\.(\w+) \((\d+) tokens\)"
    named = {
        (f"model.layers.{message[6]}.mlp.experts.{name}", int(expert)): int(tokens)
        for message in said
        for expert, name, tokens in re.findall(pattern, message)
    }
    assert 0 in named.values()
    assert all(tokens < ENOUGH_TOKENS * (48 if "down" in name else 32) for (name, _), tokens in named.items())
    anchor, stacks = families.actmat_state(family), [name for name in found if ".mlp.experts." in name]
    parts = itertools.product(stacks, range(4))
    kept = {(n, e) for n, e in parts if worst({n: found[n][e]}, {n: anchor[n][e]}) < TOLERANCE}
    assert kept == named.keys() and len(kept) < LAYERS * 4 * 2


@pytest.mark.parametrize(
    ("architecture", "names", "why"),
    [("zamba2", "shared_transformer.", "shared by several layers"), ("jetmoe", "_linear.weight", groups.NO_ROUTES)],
)
def test_what_cannot_be_solved_stays_the_anchors_and_is_said_once(
    architecture: str, names: str, why: str, make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    jetmoe = families.small_config("JetMoeConfig")
    family = make_family(jetmoe if architecture == "jetmoe" else architecture, records=2)
    found, anchor = merged_tensors(family, tmp_path), families.actmat_state(family)
    kept = {name: tensor for name, tensor in found.items() if names in name and tensor.ndim > 1}
    assert kept and worst(kept, anchor) < TOLERANCE
    assert caplog.text.count(f"({why})") == 1


def test_a_layer_that_cannot_be_solved_keeps_the_anchors_maps_and_says_so(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(regression, "times_inverse", lambda target, system: None)
    found = merged_tensors(llama, tmp_path)
    assert worst(found, families.actmat_state(llama)) < TOLERANCE
    first, *_, last = caplog.messages
    maps = "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj"
    assert first.startswith(f"Layer 0: {maps} (their inputs are not finite)") and "output head" in last
    assert len(caplog.messages) == LAYERS + 1


# How far the features are


def errors_by_hand(models: list[Any], state: State, tasks: Tasks) -> torch.Tensor:
    """The mean relative error [L, T] of a model with the tensors ``state``, from whole models in float64."""
    merged, *experts = models
    merged.load_state_dict(merged.state_dict() | {name: tensor.double() for name, tensor in state.items()})
    errors = []
    for expert, samples in zip(experts, tasks, strict=True):
        tokens = []
        for ids in samples:
            outputs = (layer_outputs(model, torch.tensor([ids]), "model.layers") for model in (merged, expert))
            tokens.append(torch.cat([(x - own).norm(dim=2) / own.norm(dim=2) for x, own in zip(*outputs, strict=True)]))
        errors.append(torch.cat(tokens, 1).nan_to_num(torch.nan, torch.nan).nanmean(1))
    return torch.stack(errors, 1)


@pytest.mark.parametrize("architecture", ["gemma2", "mixtral"])
def test_errors_are_those_of_whole_models(architecture: str, make_family: MakeFamily, tmp_path: Path) -> None:
    """A token without features has no error."""
    family = make_family(architecture)

    def forget_first_token(tensors: State) -> None:
        tensors["model.embed_tokens.weight"][families.BOS] = 0

    edit_tensors(family.experts[0], forget_first_token)
    errors = families.feature_merge(family, tmp_path, batch_tokens=70).errors()
    state = families.actmat_state(family) | families.solved_tensors(tmp_path)
    models, tasks = family.models(), family.token_ids()
    expected = errors_by_hand(models, state, tasks)
    assert torch.allclose(errors, expected, rtol=0, atol=state_rounding(1.0))  # relative to the features


# Padding


def test_the_head_is_solved_whatever_token_pads(make_family: MakeFamily, tmp_path: Path) -> None:
    family, pad = make_family("llama"), -1
    for folder in family.folders:  # not before: some versions of transformers save no model with a token below 0
        edit_config(folder, pad_token_id=pad)
    family.config.pad_token_id = pad
    head = families.feature_merge(family, tmp_path).tensor("lm_head.weight")
    assert head is not None and head.isfinite().all()
    assert not torch.equal(head.double(), family.model(0).state_dict()["lm_head.weight"])
