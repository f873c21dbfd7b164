"""Linearity: scores against dense features of whole models in float64, and submodules whose score is known."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import MakeFamily, WriteRecipe
from safetensors.torch import load_file, save_file
from support import families, reference, synthetic
from support.families import LAYERS, Family
from support.html_elements import Elements, assert_self_contained
from support.linearity_values import all_values, assert_same

from mergekit_slta.cli.commands import main
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.nonlinearity import interpolation
from mergekit_slta.nonlinearity.interpolation import Study
from mergekit_slta.nonlinearity.scores import (
    STEPS,
    Linearity,
    Plan,
    Value,
    distance_metric,
    distances,
    linearity,
    merge_study,
    non_linearity,
    pair_cosine,
    path_study,
    plan_linearity,
    plan_studies,
    pooled,
    projection_and_cosine,
)
from mergekit_slta.reports.linearity import linearity_page, merge_sentence, score_sentence, score_table, write_linearity
from mergekit_slta.reports.merge import report
from mergekit_slta.tables import as_json

NAMES = ("one", "two", "three")
SUBMODULE_LEVELS = ("layer", "attn_mlp", "head_mlp")
Tasks = list[list[list[int]]]


def plan(family: Family, levels: Sequence[str], studies: Sequence[Study], tasks: Tasks, **arguments: Any) -> Plan:
    models = families.checkpoints(family.folders)
    return Plan(Decoder(family.config), models, NAMES[: len(models) - 1], tasks, levels, studies, **arguments)


# From Gram matrices to scores


def random_features(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_distances_are_those_of_the_features() -> None:
    deltas = random_features(3, STEPS, 7)
    features = torch.cat([torch.zeros(3, 1, 7).double(), deltas], dim=1)
    expected = torch.cdist(features, features) / deltas[:, -1:].norm(dim=-1, keepdim=True)
    assert torch.allclose(distances(deltas @ deltas.mT), expected, atol=1e-12)


def test_a_straight_and_even_way_is_linear() -> None:
    deltas = torch.arange(1, STEPS + 1)[:, None] * random_features(1, 5)
    assert non_linearity(distances(deltas @ deltas.T)).item() < 1e-20


def test_the_score_sums_over_all_pairs_of_points() -> None:
    ratios = random_features(STEPS + 1, STEPS + 1)
    expected = sum((ratios[i, j] - abs(i - j) / STEPS) ** 2 for i in range(STEPS + 1) for j in range(STEPS + 1))
    assert non_linearity(ratios).item() == pytest.approx(float(expected))


def test_an_expert_that_changes_nothing_has_no_score() -> None:
    assert non_linearity(distances(torch.zeros(STEPS, STEPS).double())).isnan()


@pytest.mark.parametrize("experts", [2, 3])
def test_merges_are_compared_with_the_weighted_sum(experts: int) -> None:
    features = random_features(1 + experts, 9)
    alpha = torch.linspace(0.2, 0.7, experts, dtype=torch.float64)
    merged, planned = features[0], (alpha[:, None] * features[1:]).sum(0)
    grams = features @ features.T
    cosine = torch.nn.functional.cosine_similarity(merged, planned, dim=0)
    found = projection_and_cosine(grams, alpha)
    assert found[0].item() == pytest.approx((merged.norm() * cosine / planned.norm()).item())
    assert found[1].item() == pytest.approx(cosine.item())


def test_the_baseline_is_the_mean_over_all_pairs() -> None:
    features = random_features(3, 9)
    pairs = [
        torch.nn.functional.cosine_similarity(features[a], features[b], dim=0) for a, b in combinations(range(3), 2)
    ]
    assert pair_cosine(features @ features.T).item() == pytest.approx(torch.stack(pairs).mean().item())


def test_pooled_values_are_those_of_all_numbers() -> None:
    parts = [random_features(4), random_features(9) + 2, torch.full((2,), math.nan).double()]
    everything = torch.cat(parts[:2])
    found = pooled([Value.of(part) for part in parts])
    assert found.n == 13
    assert found.mean == pytest.approx(everything.mean().item())
    assert found.std == pytest.approx(everything.std(correction=0).item())
    assert math.isnan(pooled([Value.of(parts[2])]).mean)


# What is measured


def test_settings_are_the_papers() -> None:
    way, pair, triple = path_study(1, 3), merge_study((0, 2), 3), merge_study((0, 1, 2), 3)
    assert torch.allclose(way.settings[:, 1], torch.arange(1, 11).double() / 10)
    assert not way.settings[:, [0, 2]].any()
    grid = pair.others
    assert len(grid) == len(grid.unique(dim=0)) == 25
    assert torch.allclose(grid[:, 0].unique(), torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0]).double())
    assert not grid[:, 1].any()
    grid = triple.others
    assert len(grid) == len(grid.unique(dim=0)) == 27
    assert torch.allclose(grid.unique(), torch.tensor([0.3, 0.5, 0.7]).double())
    assert [study.experts for study in plan_studies(3, pairs=True, triples=True)] == [
        (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2),
    ]  # fmt: skip
    assert [study.experts for study in plan_studies(2, pairs=False)] == [(0,), (1,)]


# Measured on models


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
    [("llama", ("model", *SUBMODULE_LEVELS)), ("gemma2", ("model", "attn_mlp")), ("phi", SUBMODULE_LEVELS)],
)
def test_single_experts_equal_the_reference(architecture: str, levels: Sequence[str], make_family: MakeFamily) -> None:
    family = make_family(architecture, records=2)
    tasks = family.token_ids()
    result = plan(family, levels, plan_studies(2, pairs=False), tasks).measure()
    models = family.models()
    for expert in range(2):
        way = [interpolated(models, [step / STEPS * (other == expert) for other in range(2)]) for step in range(11)]
        for level in levels:
            expected = features_of(way, tasks[expert], level, reference.SPLITS[architecture])
            found = result.metrics["non_linearity"][level][NAMES[expert]]
            assert found.keys() == expected.keys()
            for name, features in expected.items():
                scores = torch.tensor([dense_score(own) for own in features])
                assert found[name].mean == pytest.approx(scores.mean().item(), abs=1e-6)
                assert found[name].std == pytest.approx(scores.std(correction=0).item(), abs=1e-6)
                assert found[name].n == len(tasks[expert])
                for step in (0, 3, STEPS):
                    left = [float((own[step] - own[-1]).norm() / (own[0] - own[-1]).norm()) for own in features]
                    curve = result.metrics[distance_metric(step)][level][NAMES[expert]][name]
                    assert curve.mean == pytest.approx(sum(left) / len(left), abs=1e-6)


@pytest.mark.parametrize("group", [(0, 2), (0, 1, 2)])
def test_merges_equal_the_reference(group: tuple[int, ...], make_family: MakeFamily) -> None:
    family = make_family("llama", experts=3, records=1)
    tasks = family.token_ids()
    levels = ("model", "attn_mlp")
    study = merge_study(group, 3)
    result = plan(family, levels, [study], tasks).measure()
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
                planned = study.others[:, list(group)] @ experts
                cosines.append(cosine(merges, planned))
                ratios.append(merges.norm(dim=1) * cosines[-1] / planned.norm(dim=1))
                base.append(torch.stack([cosine(a, b, dim=0) for a, b in combinations(experts, 2)]).mean())
            projected = (1 - torch.stack(ratios).mean(0)).abs()
            for metric, numbers in (
                ("projection_distance", projected),
                ("cosine_merge", torch.stack(cosines).mean(0)),
                ("cosine_base", torch.stack(base)),
            ):
                found = result.metrics[metric][level][name_of_group][name]
                assert found.mean == pytest.approx(numbers.mean().item(), abs=1e-6), (metric, name)
                assert found.std == pytest.approx(numbers.std(correction=0).item(), abs=1e-6), (metric, name)
                assert found.n == len(numbers)


def change(folder: Path, **factors: float) -> None:
    """Multiply tensors of a checkpoint whose names contain the given words."""
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        for word, factor in factors.items():
            if word in name:
                tensors[name] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def untouched(name: str) -> bool:
    return False


def only_output_maps(name: str) -> bool:
    return "o_proj" in name or "down_proj" in name


def test_branches_that_change_in_their_last_map_only_are_linear(make_family: MakeFamily) -> None:
    family = make_family(touch=only_output_maps, records=2)
    levels = ("layer", "attn_mlp", "head_mlp", "linear")
    result = plan(family, levels, plan_studies(2), family.token_ids()).measure()
    for (metric, level, _, name), value in all_values(result).items():
        if level == "layer" or not value.n:
            continue
        if metric == "non_linearity":
            assert value.mean < 1e-9, name
        elif metric == "projection_distance":
            assert value.mean < 1e-6, name
        elif metric == "cosine_merge":
            assert value.mean == pytest.approx(1, abs=1e-9), name
    assert max(value.mean for value in result.metrics["non_linearity"]["layer"]["one"].values()) > 1e-4


def test_linear_maps_are_linear(llama: Family) -> None:
    result = plan(llama, ("linear",), plan_studies(3, triples=True), llama.token_ids()).measure()
    assert "distances-1" not in [chart.name for section in linearity_page(result).sections for chart in section.charts]
    assert max(value.mean for value in result.metrics["non_linearity"]["linear"]["two"].values()) < 1e-20
    assert max(value.mean for value in result.metrics["projection_distance"]["linear"]["one+two"].values()) < 1e-12


def test_a_product_of_two_changes_has_its_analytic_score(make_family: MakeFamily) -> None:
    """Attention is linear in its values and in its output map: doubled both, it grows by (1 + a)^2."""
    family = make_family(experts=2, touch=untouched, records=2)
    change(family.experts[0], v_proj=2.0, o_proj=2.0)
    change(family.experts[1], v_proj=2.0)
    result = plan(family, ("attn_mlp",), plan_studies(2), family.token_ids()).measure()
    steps = [step / STEPS for step in range(STEPS + 1)]
    expected = sum((abs((1 + a) ** 2 - (1 + b) ** 2) / 3 - abs(a - b)) ** 2 for a in steps for b in steps)
    for layer in range(LAYERS):
        found = result.metrics["non_linearity"]["attn_mlp"]
        assert found["one"][f"layer.{layer}.attn"].mean == pytest.approx(expected, abs=1e-6)
        assert found["two"][f"layer.{layer}.attn"].mean == pytest.approx(0, abs=1e-9)
        # What is added to values is (a + b), to the output map a: (1 + a + b)(1 + a) against 3a + b.
        weights = (0.2, 0.4, 0.6, 0.8, 1.0)
        distance = [abs(1 - ((1 + a + b) * (1 + a) - 1) / (3 * a + b)) for a in weights for b in weights]
        value = result.metrics["projection_distance"]["attn_mlp"]["one+two"][f"layer.{layer}.attn"]
        assert value.mean == pytest.approx(sum(distance) / 25, abs=1e-6)
        assert value.std == pytest.approx(torch.tensor(distance).std(correction=0).item(), abs=1e-6)
        assert result.metrics["cosine_merge"]["attn_mlp"]["one+two"][f"layer.{layer}.attn"].mean == pytest.approx(1)
        assert result.metrics["cosine_base"]["attn_mlp"]["one+two"][f"layer.{layer}.attn"].mean == pytest.approx(1)


def test_samples_without_any_change_are_left_out_and_counted(make_family: MakeFamily) -> None:
    family = make_family(touch=lambda name: "self_attn" in name, records=2)
    result = plan(family, ("attn_mlp",), plan_studies(2), family.token_ids()).measure()
    for metric, by_level in json.loads(as_json(result.metrics)).items():
        for group, submodules in by_level["attn_mlp"].items():
            for name, value in submodules.items():
                if name.endswith(".mlp"):
                    assert value == {"mean": None, "std": None, "n": 0}, metric
                else:
                    assert value["n"] > 0
            assert result.skipped["attn_mlp"][group] == LAYERS * (4 if "+" in group else 2)
    page = linearity_page(result)
    assert f"{LAYERS * (2 + 2 + 4)} times at attn_mlp" in page.facts["Left out"]


def test_the_order_of_the_samples_does_not_matter(llama: Family) -> None:
    tasks = [samples[:2] for samples in llama.token_ids()]
    studies = [path_study(0, 3), merge_study((1, 2), 3)]
    levels = ("model", "layer", "attn_mlp", "linear")
    first, second = (
        plan(llama, levels, studies, order).measure() for order in (tasks, [samples[::-1] for samples in tasks])
    )
    assert_same(first, second, 1e-6)


def test_batches_do_not_matter(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [samples[:2] for samples in llama.token_ids()]
    studies = [path_study(0, 3), merge_study((1, 2), 3)]
    levels = ("model", "attn_mlp")
    at_once = plan(llama, levels, studies, tasks).measure()
    assert_same(at_once, plan(llama, levels, studies, tasks, batch_tokens=30).measure(), 1e-6)
    for tokens in (5, 45):  # a part of a sample, several samples
        monkeypatch.setattr(interpolation, "LOGITS", tokens * llama.config.vocab_size)
        assert_same(at_once, plan(llama, levels, studies, tasks).measure(), 1e-6)


@pytest.mark.parametrize("levels", [("model",), ("attn_mlp", "head_mlp"), ("linear",), ("model", "layer", "attn_mlp")])
def test_the_passes_that_are_announced_are_made(levels: Sequence[str], llama: Family) -> None:
    studies = [*plan_studies(3, pairs=False), merge_study((0, 2), 3)]
    planned = plan(llama, levels, studies, [samples[:1] for samples in llama.token_ids()])
    done: list[int] = []
    planned.measure(done.append)
    assert sum(done) == planned.passes * LAYERS
    assert str(planned.passes) in str(planned)
    assert str(plan(llama, levels, studies, [[[1]], [], []])).partition("same ")[2].startswith("1 sample takes ")


# From a recipe to files


def test_a_recipe_is_measured_on_its_first_samples(llama: Family) -> None:
    experiment = families.experiment(families.recipe(llama))
    planned = plan_linearity(experiment, ["layer"], samples=2, triples=True)
    assert [list(map(list, samples)) for samples in planned.tasks] == [task[:2] for task in llama.token_ids()]
    assert planned.names == [folder.name for folder in llama.experts]
    assert len(planned.studies) == 3 + 3 + 1
    assert experiment.settings.samples == 30


def test_linearity_measures_what_is_planned(llama: Family, caplog: pytest.LogCaptureFixture) -> None:
    experiment = families.experiment(families.recipe(llama))
    planned = plan_linearity(experiment, ["layer"], samples=1, pairs=False)
    with caplog.at_level("INFO", "mergekit_slta.nonlinearity.scores"):
        found = linearity(experiment, ["layer"], samples=1, pairs=False)
    assert_same(found, planned.measure(), 0)
    assert f"{planned} ".strip() in caplog.text
    opened = linearity(experiment.recipe, ["layer"], samples=1, pairs=False, quiet=True)
    assert_same(found, opened, 0)


def test_an_expert_without_data_is_refused(llama: Family) -> None:
    experiment = families.experiment(families.recipe(llama, calibration=False))
    with pytest.raises(SltaError, match="calibration"):
        plan_linearity(experiment, ["layer"])


def test_a_layer_without_heads_is_measured_by_branches(make_family: MakeFamily) -> None:
    family = make_family("granite_moe_hybrid", records=1)
    found = plan(family, ("head_mlp",), plan_studies(2), family.token_ids()).measure()
    submodules = {name for metric in found.metrics.values() for own in metric["head_mlp"].values() for name in own}
    assert {"layer.0.attn", "layer.0.mlp", "layer.1.head.0", "layer.1.mlp"} <= submodules
    assert "layer.0.head.0" not in submodules


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Linearity, Path]:
    """Everything measured but heads, and the folder that it was written to."""
    config = families.config_of("llama", num_hidden_layers=2)
    family = families.make_family(tmp_path_factory.mktemp("family"), config, experts=3, records=2, longest=8)
    levels, studies = ("model", "layer", "attn_mlp", "linear"), plan_studies(3, triples=True)
    result = plan(family, levels, studies, family.token_ids()).measure()
    return result, write_linearity(result, tmp_path_factory.mktemp("linearity") / "new").parent


def test_bars_say_what_their_thin_lines_are(written: tuple[Linearity, Path]) -> None:
    charts = [chart for section in linearity_page(written[0]).sections for chart in section.charts]
    bars = [chart for chart in charts if chart.alt.startswith("Bars")]
    assert [chart.name for chart in bars] == ["non-linearity", "projection-distance", "cosine"]
    for chart in bars:
        assert "thin line at its end reaches one standard deviation" in chart.caption
        assert "mean ± standard deviation" in chart.alt


def test_the_json_has_its_schema(written: tuple[Linearity, Path]) -> None:
    content = json.loads((written[1] / "linearity.json").read_text())
    assert set(content) == {
        "non_linearity", "projection_distance", "cosine_merge", "cosine_base",
        *(f"distance_{step / 10}" for step in range(11)),
    }  # fmt: skip
    merges = {"one+two", "one+three", "two+three", "one+two+three"}
    submodules = {"model": 1, "layer": 2, "attn_mlp": 2 * 2, "linear": 2 * 7}
    for metric, by_level in content.items():
        single = metric == "non_linearity" or metric.startswith("distance")
        assert set(by_level) == set(submodules)
        for level, groups in by_level.items():
            assert set(groups) == (set(NAMES) if single else merges)
            for group, values in groups.items():
                assert len(values) == submodules[level]
                samples = 2 * (1 + group.count("+"))
                settings = 27 if group.count("+") == 2 else 25
                for value in values.values():
                    assert set(value) == {"mean", "std", "n"}
                    assert isinstance(value["mean"], float) and value["std"] >= 0
                    assert value["n"] == (samples if single or metric == "cosine_base" else settings)


def test_the_page_says_what_was_measured(written: tuple[Linearity, Path]) -> None:
    result, folder = written
    text = (folder / "linearity.html").read_text()
    assert_self_contained(text)
    said = " ".join(Elements(text).text.split())
    scores = result.metrics["non_linearity"]
    model = torch.tensor([scores["model"][name]["model"].mean for name in NAMES]).mean()
    layers = torch.tensor([value.mean for name in NAMES for value in scores["layer"][name].values()]).mean()
    assert f"{model:.2g} for the whole model, {layers:.2g} for a layer" in score_sentence(result)
    distance = result.metrics["projection_distance"]["model"]["one+two+three"]["model"].mean
    assert f"{distance:.2g} for the whole model" in merge_sentence(result, 3)
    assert said.index(score_sentence(result)) < said.index(merge_sentence(result, 2)) < said.index("Single experts")
    assert [row[0] for row in score_table(result).rows] == ["model", "layer", "attention", "MLP", "linear map"]
    assert all(f"{name}, 2 samples" in said for name in NAMES)


def test_the_figures_are_files_and_in_the_page(written: tuple[Linearity, Path]) -> None:
    text = (written[1] / "linearity.html").read_text()
    charts = [chart for section in linearity_page(written[0]).sections for chart in section.charts]
    assert {chart.name for chart in charts} == {file.stem for file in written[1].glob("*.png")} == {
        "non-linearity", "non-linearity-by-layer", "projection-distance", "cosine", "distance-curve",
        "distances-1", "distances-2", "distances-3",
    }  # fmt: skip
    images = [image for tag, image in Elements(text).found if tag == "img"]
    assert all(str(image["src"]).startswith("data:image/svg+xml;base64,") for image in images)
    assert [image["alt"] for image in images] == [chart.alt for chart in charts]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (0.5, "at least 4 times more linear than the whole models"),
        (2.0, "Not all submodules"),
        (0.0, "perfectly linear"),
    ],
)
def test_the_verdict_compares_submodules_with_the_model(layer: float, said: str) -> None:
    scores = {"model": {"one": {"model": Value(2.0, 0, 1)}}, "layer": {"one": {"layer.0": Value(layer, 0, 1)}}}
    result = Linearity(("one",), ("model", "layer"), (1,), {"non_linearity": scores}, {}, {}, {})
    assert said in score_sentence(result)
    assert f"2 for the whole model and {layer:.2g} for a layer" in score_sentence(result)


def test_one_expert_alone_has_a_page(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(experts=1, records=1)
    result = plan(family, ("attn_mlp",), plan_studies(1, triples=True), family.token_ids()).measure()
    assert "Merges" not in [section.title for section in linearity_page(result).sections]
    assert write_linearity(result, tmp_path / "new" / "folder").is_file()


def test_the_report_on_a_merge_may_go_into_the_same_folder(written: tuple[Linearity, Path], tmp_path: Path) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    linearity, folder = contents(written[1]), tmp_path / "both"
    shutil.copytree(written[1], folder)
    report(synthetic.statistics([f"org/{name}" for name in NAMES], ["attn_mlp"], layers=LAYERS), folder)
    both = contents(folder)
    index = both.pop("index.html").decode()
    assert both.items() > linearity.items()
    assert [link["href"] for tag, link in Elements(index).found if tag == "a"] == ["linearity.html", "report.html"]


def test_the_command_says_the_passes_first(llama: Family, write_recipe: WriteRecipe, tmp_path: Path) -> None:
    arguments = ["linearity", str(write_recipe(llama)), "-o", str(tmp_path / "new"), "--samples", "1", "--no-pairs"]
    result = CliRunner().invoke(main, [*arguments, "--level", "layer", "--level", "model", "--quiet"])
    assert result.exit_code == 0, result.output
    planned = plan(llama, ("model", "layer"), plan_studies(3, pairs=False), [t[:1] for t in llama.token_ids()])
    assert f"{planned.passes} forward passes" in result.output.splitlines()[0]
    assert re.search(r"^layer +\S+ ± ", result.output, re.MULTILINE)
    assert json.loads((tmp_path / "new" / "linearity.json").read_text())["non_linearity"].keys() == {"model", "layer"}
    wrong = CliRunner().invoke(main, [*arguments, "--level", "heads"])
    assert wrong.exit_code == 2
