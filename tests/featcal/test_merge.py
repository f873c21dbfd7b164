"""The feature merge against explicit least squares on whole models, its limits, and what must not change it."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from mergekit.io.tasks import LoaderCache
from support import depths, families, featcal_reference
from support.architecture_table import CURRENT
from support.copies import edit_tensors
from support.families import ARCHITECTURES, LAYERS, MULTIMODAL, UNSPLIT, Family
from support.memory import peak_of
from support.reference import forget
from support.slow import slow_but

from mergekit_slta.featcal import head, regression
from mergekit_slta.featcal.anchor import ActmatAnchor
from mergekit_slta.featcal.groups import solved_in
from mergekit_slta.featcal.layer import ENOUGH_TOKENS
from mergekit_slta.featcal.merge import stages
from mergekit_slta.featcal.passage import LayerPassage
from mergekit_slta.layers.calls import LayerCall
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import output_head
from mergekit_slta.layers.maps import linear_maps
from mergekit_slta.layers.trace import trace

# Of a tensor's norm; float32 features and products against float64 ones.
TOLERANCE = 1e-4
DECODERS = (*ARCHITECTURES, *UNSPLIT, *MULTIMODAL)
# Every input of every map has full rank, so that the calibration data alone decide the maps.
DETERMINED = ("llama", "qwen2", "phi3", "glm4_moe", "gpt_oss", "lfm2", "granite_moe_hybrid")
# The maps of a layer that are not solved in what people merge now.
KEPT = {
    "llama4_vision": ("feed_forward.router",),
    "qwen3_5_moe": ("mlp.gate",),
    "minimax": ("mlp.gate",),
}
# Their linear maps are called as those of another architecture are.
LIKE_OTHERS = (*("gemma", "llama_dynamic", "mistral", "olmo2", "phi3_longrope", "qwen3", "qwen3_moe", "cohere"),)
EXACT = 1e-9  # a ridge that holds nothing

State = dict[str, torch.Tensor]
Tasks = list[list[list[int]]]


def merged_tensors(family: Family, folder: Path, **arguments: Any) -> State:
    """What a feature merge solves; ``arguments`` are those of ``families.feature_merge``."""
    families.feature_merge(family, folder, **arguments)
    return families.solved_tensors(folder)


def relative_errors(found: State, expected: State) -> dict[str, float]:
    """Each found tensor's error relative to its norm."""
    norms = {name: float(expected[name].norm()) for name in found}
    return {name: float((found[name] - expected[name]).norm()) / (norms[name] or 1.0) for name in found}


def worst(found: State, expected: State) -> float:
    return max(relative_errors(found, expected).values())


def actmat_state(family: Family) -> State:
    """Every tensor of the anchor ``actmat``, by the model's names."""
    decoder, model = trace(family.config), family.model(0)
    anchor = ActmatAnchor(families.checkpoints(family.folders), decoder)
    names = {name: name for name, _ in model.named_parameters()}
    model.load_state_dict(anchor.read(names, decoder.model.base_model_prefix), strict=False)
    state: State = model.state_dict()  # names of the same tensor too
    return state


def solved_names(decoder: Decoder) -> set[str]:
    """The tensors that are solved, by the model's names."""
    head = output_head(decoder)
    return set(solved_in(decoder)) | ({name for name in (head.weight, head.bias) if name} if head else set())


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


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *((name, {}) for name in featcal_reference.GROUPS if name != "longcat_flash"),
        pytest.param("longcat_flash", {}, marks=pytest.mark.slow),  # it has many groups of maps
        ("llama", {"head": False}),
        *((name, {"by_tasks": True, "ridge": 0.1}) for name in ("mixtral", "gpt2")),
    ],
    ids=str,
)
def test_equals_the_reference(
    architecture: str, settings: dict[str, Any], make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture, records=4, longest=16)
    base, *experts = family.models()
    tasks = family.token_ids()
    anchor = actmat_state(family) if settings.get("by_tasks") else None
    expected = featcal_reference.merge(base, experts, tasks, architecture, anchor=anchor, **settings)
    found = merged_tensors(family, tmp_path, batch_tokens=50, **settings)
    head = settings.get("head", True)
    start = anchor or base.state_dict()
    before = {name: start[name].double() for name, _ in base.named_parameters()}  # shared ones by their first name
    assert worst(before | found, expected) < TOLERANCE
    # Not the anchor that a solution is compared with, either.
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, expected[name])}
    assert changed == solved_names(trace(family.config)) - (set() if head else {"lm_head.weight"})


@pytest.mark.parametrize(("architecture", "by_tasks"), [("gpt2", False), ("mixtral", True)])
def test_fewer_tokens_than_dimensions_give_the_same_merge(
    architecture: str, by_tasks: bool, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture, records=2, longest=8)
    base, *experts = family.models()
    tasks = family.token_ids()
    assert sum(len(ids) for task in tasks for ids in task) < 32  # the dimensions of every input
    anchor = actmat_state(family) if by_tasks else None
    expected = featcal_reference.merge(base, experts, tasks, architecture, ridge=0.05, by_tasks=by_tasks, anchor=anchor)
    found = merged_tensors(family, tmp_path, by_tasks=by_tasks, ridge=0.05, batch_tokens=8)
    assert worst((anchor or dict(base.named_parameters())) | found, expected) < TOLERANCE


def test_few_different_tokens_cost_no_digits(make_family: MakeFamily, tmp_path: Path) -> None:
    """The first layer's inputs then are rank-deficient."""
    ridge = 1.1e-4
    family = make_family("llama", records=4)
    base, *experts = family.models()
    before = base.state_dict()
    tasks = [[[1 + token % 3 for token in ids] for ids in task] for task in family.token_ids()]
    expected = featcal_reference.merge(base, experts, tasks, "llama", ridge=ridge)
    found = merged_tensors(family, tmp_path, tasks=tasks, ridge=ridge, batch_tokens=50)
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"model.layers.0.self_attn.{name}.weight"
        change = expected[key] - before[key]
        assert (found[key] - expected[key]).norm() < 1e-5 * change.norm()


@pytest.mark.parametrize(
    ("architecture", "copies", "by_tasks"),
    [("llama", 1, True), ("llama", 2, True), ("llama", 1, False), ("gpt2", 1, True), ("mixtral", 1, True)],
)
def test_the_base_models_task_is_that_of_as_many_copies_of_it_as_it_counts(
    architecture: str, copies: int, by_tasks: bool, make_family: MakeFamily, tmp_path: Path
) -> None:
    whole = make_family(architecture, experts=3, records=4)
    tasks, family = whole.token_ids(), replace(whole, experts=whole.experts[:2])
    copied = replace(whole, experts=(*family.experts, *[whole.base] * copies))
    settings: dict[str, Any] = {"by_tasks": by_tasks, "ridge": 0.1, "batch_tokens": 50}
    expected = merged_tensors(copied, tmp_path / "copied", tasks=[*tasks[:2], *[tasks[2]] * copies], **settings)
    found = merged_tensors(family, tmp_path / "kept", tasks=tasks, keep_weight=float(copies), **settings)
    assert found.keys() == expected.keys()
    assert worst(found, expected) < 1e-6


# Limits


@pytest.mark.parametrize("architecture", ["gpt2", "glm4_moe"])
def test_an_endless_ridge_gives_the_anchor(architecture: str, make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(architecture, records=3)
    assert worst(merged_tensors(family, tmp_path, ridge=1e12), family.model(0).state_dict()) < 1e-7


@pytest.mark.parametrize(
    "architecture",
    slow_but(
        set(DECODERS)
        - set(featcal_reference.GROUPS)
        - set(LIKE_OTHERS)
        - {"gemma3n", "glm_moe_dsa"},  # which have many groups
        [name for name in DECODERS if name not in (*DETERMINED, *CURRENT)],
    ),
)
def test_one_expert_and_no_ridge_give_what_that_expert_does(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    decoder, tasks = families.skeleton(architecture), families.wide_tasks(1)
    family = make_family(architecture, experts=1, touch=solved_names(decoder).__contains__)
    found = merged_tensors(family, tmp_path, tasks=tasks, ridge=EXACT)
    base, expert = family.models()
    before, wanted = logits(base, {}, tasks), logits(expert, {}, tasks)
    assert (logits(base, found, tasks) - wanted).norm() < TOLERANCE * (before - wanted).norm()


def expert_change_missed(found: State, base: State, expert: State) -> float:
    """The largest error of a tensor relative to the expert's change of it."""
    moved = [name for name in found if not torch.equal(expert[name], base[name])]
    return max(float((found[name] - expert[name]).norm() / (expert[name] - base[name]).norm()) for name in moved)


@pytest.mark.parametrize(
    ("architecture", "ridge"),
    [*((name, EXACT) for name in (*DETERMINED, *CURRENT)), ("mixtral", 0.0)],
    ids=str,
)
def test_one_expert_and_no_ridge_give_that_expert(
    architecture: str, ridge: float, make_family: MakeFamily, tmp_path: Path
) -> None:
    decoder = families.skeleton(architecture)
    touched = solved_names(decoder)
    if architecture in CURRENT:  # nothing but the maps that are known to be kept is left out
        for layer in range(len(decoder)):
            names = decoder.layer_tensors(layer)
            others = [m for m in linear_maps(decoder.layers[layer]) if names[m.weight] not in touched]
            assert all(m.module.startswith(KEPT.get(architecture, ())) for m in others)
    family = make_family(architecture, experts=1, touch=touched.__contains__)
    found = merged_tensors(family, tmp_path, tasks=families.wide_tasks(1), ridge=ridge)
    base, expert = (model.state_dict() for model in family.models())
    assert expert_change_missed(found, base, expert) < 1e-3


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_equal_experts_give_that_expert(architecture: str, make_family: MakeFamily, tmp_path: Path) -> None:
    touched = solved_names(families.skeleton(architecture))
    one = make_family(architecture, experts=1, touch=touched.__contains__)
    family = Family(one.base, one.experts * 3, one.data * 3, one.config)
    found = merged_tensors(family, tmp_path, tasks=families.wide_tasks(3, samples=6), ridge=EXACT)
    base, expert = (one.model(index).state_dict() for index in (0, 1))
    assert expert_change_missed(found, base, expert) < 1e-3


# What must not matter


@pytest.mark.parametrize(
    "architecture",
    # tests/slta/test_calibrate.py cuts the batches of the others, too.
    slow_but(("mixtral", "falcon_alibi"), ("mixtral", "falcon_alibi", "llama4", "granite_moe_hybrid", "gemma4")),
)
def test_batches_and_their_padding_do_not_matter(architecture: str, make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(architecture, longest=30)
    rows = [row for task in family.token_ids() for row in task]
    assert len({len(row) for row in rows}) > 3
    weights = [torch.arange(1.0, len(row) + 1) for row in rows]  # so that each must find its own token
    one_by_one, *others = (
        merged_tensors(family, tmp_path / str(positions), batch_tokens=positions, weights=weights)
        for positions in (1, 70, 10000)
    )
    assert all(worst(other, one_by_one) < TOLERANCE for other in others)


def test_the_order_of_the_samples_does_not_matter(llama: Family, tmp_path: Path) -> None:
    tasks = llama.token_ids()
    first = merged_tensors(llama, tmp_path / "forwards", tasks=tasks, batch_tokens=60)
    backwards = [samples[::-1] for samples in tasks]
    assert worst(merged_tensors(llama, tmp_path / "backwards", tasks=backwards, batch_tokens=60), first) < 1e-5


def test_a_sample_of_weight_two_is_two_samples(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("mixtral")
    tasks = family.token_ids()
    weights = [torch.full((len(row),), 1.0 + (number == 0)) for task in tasks for number, row in enumerate(task)]
    weighted = merged_tensors(family, tmp_path / "weighted", tasks=tasks, weights=weights)
    repeated = merged_tensors(family, tmp_path / "repeated", tasks=[[task[0], *task] for task in tasks])
    assert worst(weighted, repeated) < 1e-5
    assert worst(weighted, merged_tensors(family, tmp_path / "alike", tasks=tasks)) > 1e-3


def test_the_order_of_the_experts_does_not_matter(llama: Family, tmp_path: Path) -> None:
    tasks, order = llama.token_ids(), (2, 0, 1)
    other = Family(llama.base, tuple(llama.experts[i] for i in order), (), llama.config)
    first = merged_tensors(llama, tmp_path / "first", tasks=tasks)
    assert worst(merged_tensors(other, tmp_path / "second", tasks=[tasks[i] for i in order]), first) < 1e-5


def test_following_the_anchor_changes_nothing(llama: Family, tmp_path: Path) -> None:
    first, second = (merged_tensors(llama, tmp_path / str(compare), compare=compare) for compare in (False, True))
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


# Every architecture; those that are not quick are solved above, or their maps are called as another's are
QUICK = ("gemma", "gpt_oss", "gemma4_vision", "mamba")


@pytest.mark.parametrize("architecture", slow_but(QUICK, DECODERS))
def test_every_architecture_gives_finite_tensors_of_its_shapes(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture, records=3, longest=12)
    found = merged_tensors(family, tmp_path)
    model: Any = family.model(0)
    state, decoder = model.state_dict(), trace(family.config)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    layers = {name for layer in range(len(decoder)) for name in decoder.layer_tensors(layer).values()}
    assert set(found) == (
        layers if tied else layers | {name for name in solved_names(decoder) if ".layers." not in name}
    )
    for name, tensor in found.items():
        assert tensor.shape == state[name].shape
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()
    parameters = dict(model.named_parameters())  # transformers fills some buffers anew when it loads a model
    changed = {name for name in found if name in parameters and not torch.equal(found[name].double(), state[name])}
    assert changed == solved_names(decoder)


def test_the_head_in_parts_is_the_same(llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = merged_tensors(llama, tmp_path / "whole", ridge=0.003)
    monkeypatch.setattr(head, "HEAD_ELEMENTS", 32 * 7)
    assert worst(merged_tensors(llama, tmp_path / "parts", ridge=0.003), whole) < 1e-6


# Routed experts


def test_routed_experts_that_few_tokens_reach_keep_the_anchors_maps_and_are_named(
    make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = make_family("mixtral")
    with caplog.at_level(logging.WARNING, logger="mergekit_slta"):
        found = merged_tensors(family, tmp_path, tasks=[[[1, 5]], [[1, 9]]])
    named = {
        (int(layer), int(expert), name, int(tokens))
        for record in caplog.records
        if (layer := (re.findall(r"^Layer (\d+): .* keep the anchor's weights$", record.message) or [None])[0])
        for expert, name, tokens in re.findall(r"mlp\.experts\.(\d+)\.(\w+) \((\d+) tokens\)", record.message)
    }
    assert any(tokens == 0 for *_, tokens in named)
    assert all(tokens < ENOUGH_TOKENS * {"gate_up_proj": 32, "down_proj": 48}[name] for _, _, name, tokens in named)
    base = family.model(0).state_dict()
    kept = set()
    for layer in range(LAYERS):
        for expert in range(4):
            for name in ("gate_up_proj", "down_proj"):
                full = f"model.layers.{layer}.mlp.experts.{name}"
                if torch.equal(found[full][expert].double(), base[full][expert]):
                    kept.add((layer, expert, name))
    assert kept == {entry[:3] for entry in named}
    assert len(kept) < LAYERS * 4 * 2


# Numerics


def with_massive_dimension(family: Family, dimension: int = 5, size: float = 1e3) -> Family:
    """Give the residual stream a dimension that is a thousand times as large as the others, at every token."""

    def plant(tensors: State) -> None:
        tensors["model.embed_tokens.weight"][:, dimension] = size

    for folder in family.folders:
        edit_tensors(folder, plant)
    return family


def test_massive_activations_do_not_make_the_solution_useless(
    make_family: MakeFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = with_massive_dimension(make_family("llama", records=20))

    def share_of_the_anchors_error(folder: Path) -> float:
        errors = families.feature_merge(family, folder, compare=True).errors()
        return float((errors["error.merged"] / errors["error.anchor"])[-1].max())

    found = share_of_the_anchors_error(tmp_path / "found")
    monkeypatch.setattr(regression, "MASSIVE", torch.inf)
    assert found < 0.5 < share_of_the_anchors_error(tmp_path / "ridge by the mean")


def test_a_layer_that_cannot_be_solved_keeps_the_anchors_maps_and_says_so(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(regression, "times_inverse", lambda target, system: None)
    with caplog.at_level(logging.WARNING, logger="mergekit_slta"):
        found = merged_tensors(llama, tmp_path)
    base = llama.model(0).state_dict()
    assert all(torch.equal(tensor.double(), base[name]) for name, tensor in found.items())
    said = [record.message for record in caplog.records]
    assert len(said) == LAYERS * 4 + 1
    assert said[0].startswith(
        "Layer 0: self_attn.q_proj, self_attn.k_proj, self_attn.v_proj (their inputs are not finite)"
    )
    assert "output head" in said[-1]


# How far the features are


def layer_outputs(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """What each layer gives [S, D] on a sample."""
    outputs: list[torch.Tensor] = []

    def note(module: Any, arguments: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [layer.register_forward_hook(note) for layer in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs


def errors_by_hand(models: list[Any], state: State, tasks: Tasks) -> torch.Tensor:
    """The mean relative error [L, T] of a model with the tensors ``state``, from whole models in float64."""
    merged, *experts = models
    merged.load_state_dict(merged.state_dict() | {name: tensor.double() for name, tensor in state.items()})
    errors = []
    for expert, samples in zip(experts, tasks, strict=True):
        tokens = []
        for ids in samples:
            pairs = zip(layer_outputs(merged, ids), layer_outputs(expert, ids), strict=True)
            tokens.append(torch.stack([(found - own).norm(dim=1) / own.norm(dim=1) for found, own in pairs]))
        errors.append(torch.cat(tokens, 1).mean(1))
    return torch.stack(errors, 1)


def test_errors_are_those_of_whole_models(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("gemma2", records=20)
    errors = families.feature_merge(family, tmp_path, compare=True, batch_tokens=70).errors()
    tasks, state = family.token_ids(), families.solved_tensors(tmp_path)
    assert torch.allclose(errors["error.merged"], errors_by_hand(family.models(), state, tasks), rtol=1e-4)
    assert torch.allclose(errors["error.anchor"], errors_by_hand(family.models(), {}, tasks), rtol=1e-4)
    assert (errors["error.merged"] < 0.8 * errors["error.anchor"]).all()


def test_the_errors_of_the_actmat_merge_are_those_of_whole_models(make_family: MakeFamily, tmp_path: Path) -> None:
    """Although the anchor's maps are solved one group after the other."""
    family = make_family("mixtral", records=4)
    expected = errors_by_hand(family.models(), actmat_state(family), family.token_ids())
    errors = families.feature_merge(family, tmp_path, by_tasks=True, ridge=0.1, compare=True).errors()
    assert torch.allclose(errors["error.anchor"], expected, rtol=1e-4)


def test_the_actmat_merge_of_a_mixtures_experts_takes_the_memory_of_one_matrix(make_family: MakeFamily) -> None:
    """Beside the result, where a GPU holds all experts of a layer."""
    family = make_family("mixtral")
    decoder = trace(family.config)
    anchor = ActmatAnchor(families.checkpoints(family.folders), decoder)
    names = {name: full for name, full in decoder.layer_tensors(0).items() if name.endswith("experts.down_proj")}
    draw = torch.Generator().manual_seed(0)
    tensors = [{name: torch.randn(24, 400, 300, generator=draw) for name in names} for _ in family.folders]
    anchor.of(names, [{name: tensor[:1] for name, tensor in own.items()} for own in tensors])  # the first warms up
    assert peak_of(lambda: anchor.of(names, tensors)) < 5 * 24 * 400 * 300 * 4


# Progress, interruptions, memory


@pytest.mark.parametrize(("architecture", "head"), [("llama", True), ("llama", False), ("gemma", True)])
def test_progress_counts_every_sample_at_every_stage(
    architecture: str, head: bool, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture)
    seen: list[tuple[str, int]] = []
    families.feature_merge(family, tmp_path, head=head, progress=lambda *step: seen.append(step))
    decoder = trace(family.config)
    assert sum(samples for _, samples in seen) == stages(decoder, head) * sum(map(len, family.token_ids()))
    named = [stage for stage, _ in seen]
    assert f"layer 0 of {LAYERS}, self_attn.q_proj/k_proj/v_proj" in named
    assert ("output head" in named) == (head and output_head(decoder) is not None)


class Interrupted(Exception):
    """Stands for whatever ends a process."""


def test_what_layers_share_is_found_and_resumed_where_it_is_solved(make_family: MakeFamily, tmp_path: Path) -> None:
    """The second layer that shares a transformer solves adapters that belong to the first one's tensors."""
    family = make_family("zamba2")

    def interrupt(name: str, samples: int) -> None:
        if name.startswith("layer 3 of 4, linear"):
            raise Interrupted

    with pytest.raises(Interrupted):
        families.feature_merge(family, tmp_path / "cut", progress=interrupt)
    LoaderCache.loaders.clear()
    whole, cut = (families.feature_merge(family, tmp_path / name) for name in ("whole", "cut"))
    base, decoder = family.model(0).state_dict(), trace(family.config)
    names, changed = decoder.layer_tensors(1).values(), set()
    for name in names:
        found, resumed = whole.tensor(name), cut.tensor(name)
        assert found is not None and resumed is not None and torch.equal(found, resumed)
        changed |= set() if torch.equal(found.double(), base[name]) else {name}
    assert changed == solved_in(decoder).keys() & set(names)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device on which more than 40 token positions do not fit in layer 1; collects the positions that were tried."""
    tried: list[int] = []
    run = Decoder.run

    def limited(self: Decoder, layer: int, weights: Any, hidden: torch.Tensor, call: LayerCall, **settings: Any) -> Any:
        positions = hidden.shape[0] * hidden.shape[1]
        if layer == 1:
            tried.append(positions)
            if positions > 40:
                raise torch.OutOfMemoryError("no memory left")
        return run(self, layer, weights, hidden, call, **settings)

    monkeypatch.setattr(Decoder, "run", limited)
    return tried


def test_batches_are_halved_until_they_fit(small_memory: list[int], llama: Family, tmp_path: Path) -> None:
    halved: list[int] = []
    small: list[int] = []
    tensors = merged_tensors(llama, tmp_path / "halved", progress=lambda stage, samples: halved.append(samples))
    assert max(small_memory) > 40 >= small_memory[-1]
    expected = merged_tensors(
        llama, tmp_path / "small", batch_tokens=1, progress=lambda stage, samples: small.append(samples)
    )
    assert worst(tensors, expected) < TOLERANCE
    assert sum(halved) == sum(small)


def test_out_of_memory_forgets_what_layers_share(
    make_family: MakeFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out once a layer's maps are solved, which later layers share: the solution is no anchor of itself."""
    family, finish = make_family("zamba2"), LayerPassage.finish
    expected = merged_tensors(family, tmp_path / "expected", ridge=1.0)
    failed: list[int] = []

    def once(self: LayerPassage, number: int, merged: Any) -> dict[int, torch.Tensor]:
        if self.layer == 1 and not failed:
            failed.append(number)
            raise torch.OutOfMemoryError("no memory left")
        return finish(self, number, merged)

    monkeypatch.setattr(LayerPassage, "finish", once)
    assert worst(merged_tensors(family, tmp_path / "halved", ridge=1.0), expected) < TOLERANCE
    assert failed


def test_tokens_without_features_have_no_relative_error(make_family: MakeFamily, tmp_path: Path) -> None:
    """The first expert's embedding of the first token is zero, and everything about the second expert is."""
    family = make_family(experts=2)

    def forget_first_token(tensors: State) -> None:
        tensors["model.embed_tokens.weight"][families.BOS] = 0

    def forget_everything(tensors: State) -> None:
        for tensor in tensors.values():
            tensor.zero_()

    edit_tensors(family.experts[0], forget_first_token)
    edit_tensors(family.experts[1], forget_everything)
    LoaderCache.loaders.clear()
    errors = families.feature_merge(family, tmp_path, compare=True).errors()["error.merged"]
    assert errors[:, 0].isfinite().all() and errors[:, 0].all()
    assert errors[:, 1].isnan().all()


def test_the_head_is_solved_whatever_token_pads(make_family: MakeFamily, tmp_path: Path) -> None:
    family, pad = make_family("llama"), -1
    for folder in family.folders:  # not before: some versions of transformers save no model with a token below 0
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    family.config.pad_token_id = pad
    head = families.feature_merge(family, tmp_path).tensor("lm_head.weight")
    assert head is not None and head.isfinite().all()
    assert not torch.equal(head.double(), family.model(0).state_dict()["lm_head.weight"])


def merge_tasks(family: Family, folder: Path) -> None:
    families.feature_merge(family, folder, tasks=depths.TASKS, compare=True)


@depths.needs_account
def test_memory_does_not_grow_with_the_number_of_layers(forks: ForkServerContext, tmp_path: Path) -> None:
    both = depths.shallow_and_deep(tmp_path, times=2)
    peaks = [
        depths.peak_in_a_process(forks, merge_tasks, family, tmp_path / str(number))
        for number, family in enumerate(both)
    ]
    assert peaks[1] < 1.1 * peaks[0]
