"""Feature deltas between models: scores against dense features in float64, and submodules whose score is known."""

import copy
import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from support import families, reference
from support.families import LAYERS, Family
from support.linearity_values import NAMES, assert_same, plan_of
from support.rounding import distance_rounding

from mergekit_slta.nonlinearity.studies import STEPS, Study, merge_study, path_study, plan_studies
from mergekit_slta.reports.linearity import linearity_page
from mergekit_slta.slta import grams
from mergekit_slta.tables import as_json

TOLERANCE = distance_rounding(1 / STEPS)  # scores are shares of feature deltas, the least that of one step
SUBMODULE_LEVELS = ("layer", "attn_mlp", "head_mlp")
# Two merges of the last two of three experts.
SOME_MERGES = Study((1, 2), torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0.2, 1], [0, 0.6, 0.4]]).double())


def interpolated(models: Sequence[torch.nn.Module], setting: Sequence[float]) -> torch.nn.Module:
    """The model of a setting, from the base model and the experts, in float64."""
    base, *experts = [model.state_dict() for model in models]
    model = copy.deepcopy(models[0])
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            changes = [weight * (expert[name] - base[name]) for weight, expert in zip(setting, experts, strict=True)]
            tensor.copy_(base[name] + torch.stack(changes).sum(0))
    return model


def features_of(
    models: Sequence[torch.nn.Module], samples: Sequence[Sequence[int]], level: str, split: reference.Split
) -> dict[str, list[torch.Tensor]]:
    """Each submodule's features [settings, S * D] on every sample, by whole models."""
    found: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad(), reference.float64():
        for ids in samples:
            for name, features in reference.sample_features(models, torch.tensor([ids]), level, split):
                found.setdefault(name, []).append(torch.stack([feature.flatten() for feature in features]))
    return found


def dense_score(features: torch.Tensor) -> float:
    """Eq. 19 on features [N + 1, S * D], as it is printed."""

    def distance(i: int, j: int) -> float:
        return float((features[i] - features[j]).norm())

    points = range(STEPS + 1)
    return sum((distance(i, j) / distance(STEPS, 0) - abs(i - j) / STEPS) ** 2 for i in points for j in points)


@pytest.mark.parametrize(
    ("architecture", "levels"),
    [
        ("llama", ("model", *SUBMODULE_LEVELS, "linear")),
        ("gemma2", ("model", "attn_mlp")),
        ("phi", SUBMODULE_LEVELS),
        ("mixtral", ("model", "layer", "attn_mlp")),
    ],
)
def test_single_experts_equal_the_reference(architecture: str, levels: Sequence[str], make_family: MakeFamily) -> None:
    family = make_family(architecture, records=2)
    tasks = family.token_ids()
    result = plan_of(family, levels, plan_studies(2, pairs=False), tasks).measure()
    models = family.models()
    for expert in range(2):
        way = [interpolated(models, [step / STEPS * (other == expert) for other in range(2)]) for step in range(11)]
        for level in levels:
            expected = features_of(way, tasks[expert], level, reference.SPLITS[architecture])
            found = result.metrics["non_linearity"][level][NAMES[expert]]
            assert found.keys() == expected.keys()
            for name, features in expected.items():
                scores = torch.tensor([dense_score(own) for own in features])
                assert found[name].mean == pytest.approx(scores.mean().item(), abs=TOLERANCE)
                assert found[name].std == pytest.approx(scores.std(correction=0).item(), abs=TOLERANCE)
                assert found[name].n == len(tasks[expert])
                for step in (0, 3, STEPS):
                    left = [float((own[step] - own[-1]).norm() / (own[0] - own[-1]).norm()) for own in features]
                    curve = result.metrics[f"distance_{step / STEPS:.1f}"][level][NAMES[expert]][name]
                    assert curve.mean == pytest.approx(sum(left) / len(left), abs=TOLERANCE)


@pytest.mark.parametrize("group", [(0, 2), (0, 1, 2)])
def test_merges_equal_the_reference(group: tuple[int, ...], make_family: MakeFamily) -> None:
    family = make_family("llama", experts=3, records=1)
    tasks = family.token_ids()
    levels = ("model", "attn_mlp")
    study = merge_study(group, 3)
    result = plan_of(family, levels, [study], tasks).measure()
    settings = torch.cat([torch.zeros(1, 3).double(), study.settings])
    family_models = family.models()
    models = [interpolated(family_models, setting.tolist()) for setting in settings]
    samples = [ids for expert in group for ids in tasks[expert]]
    name_of_group = "+".join(NAMES[expert] for expert in group)
    cosine = torch.nn.functional.cosine_similarity
    for level in levels:
        for name, features in features_of(models, samples, level, reference.SPLITS["llama"]).items():
            ratios, cosines, base = [], [], []
            for own in features:
                experts, merges = own[1 : 1 + len(group)] - own[0], own[1 + len(group) :] - own[0]
                planned = study.settings[len(group) :, list(group)] @ experts
                cosines.append(cosine(merges, planned))
                ratios.append(merges.norm(dim=1) * cosines[-1] / planned.norm(dim=1))
                base.append(torch.stack([cosine(a, b, dim=0) for a, b in combinations(experts, 2)]).mean())
            expected = {
                "projection_distance": (1 - torch.stack(ratios).mean(0)).abs(),
                "cosine_merge": torch.stack(cosines).mean(0),
                "cosine_base": torch.stack(base),
            }
            for metric, numbers in expected.items():
                found = result.metrics[metric][level][name_of_group][name]
                assert found.mean == pytest.approx(numbers.mean().item(), abs=TOLERANCE), (metric, name)
                assert found.std == pytest.approx(numbers.std(correction=0).item(), abs=TOLERANCE), (metric, name)
                assert found.n == len(numbers)


def test_samples_without_any_change_are_left_out_and_counted(make_family: MakeFamily) -> None:
    family = make_family(touch=lambda name: "self_attn" in name, records=2)
    result = plan_of(family, ("attn_mlp",), plan_studies(2), family.token_ids()).measure()
    for metric, by_level in json.loads(as_json(result.metrics)).items():
        for group, submodules in by_level["attn_mlp"].items():
            for name, value in submodules.items():
                if name.endswith(".mlp"):
                    assert value == {"mean": None, "std": None, "n": 0}, metric
                else:
                    assert value["n"] > 0
            assert result.skipped["attn_mlp"][group] == LAYERS * (4 if "+" in group else 2)
    assert f"{LAYERS * (2 + 2 + 4)} times at attn_mlp" in linearity_page(result).facts["Left out"]


def test_batches_do_not_matter(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [samples[:2] for samples in llama.token_ids()]
    studies = [path_study(0, 3), SOME_MERGES]
    levels = ("model", "attn_mlp")
    at_once = plan_of(llama, levels, studies, tasks).measure()
    with families.batches_of(30):
        assert_same(at_once, plan_of(llama, levels, studies, tasks).measure(), TOLERANCE)
    monkeypatch.setattr(grams, "LOGITS", 5 * llama.config.vocab_size)  # of five positions
    assert_same(at_once, plan_of(llama, levels, studies, tasks).measure(), TOLERANCE)


@pytest.mark.parametrize("levels", [("model",), ("attn_mlp", "head_mlp"), ("linear",), ("model", "layer", "attn_mlp")])
def test_the_passes_that_are_announced_are_run(
    levels: Sequence[str], llama: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every setting: the whole model, whole layers, and branches; each attention runs once in each pass."""
    studies = [*plan_studies(3, pairs=False), SOME_MERGES]
    planned = plan_of(llama, levels, studies, [samples[:1] for samples in llama.token_ids()])
    planned.measure()  # finds out what it needs to know about the layers
    ran, attention = list[int](), torch.nn.functional.scaled_dot_product_attention

    def counted(*arguments: Any, **more: Any) -> torch.Tensor:
        ran.append(1)
        return attention(*arguments, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    with families.batches_of(1):
        planned.measure()
    assert len(ran) == LAYERS * planned.passes and f"takes {planned.passes} forward passes" in str(planned)
