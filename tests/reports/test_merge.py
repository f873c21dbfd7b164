"""The report: its sentence's numbers, its files, and that it needs nothing from outside."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support import families, reference, synthetic
from support.command import run
from support.families import Family
from support.html_elements import Elements, assert_self_contained
from support.rounding import SOLVED_IN_FLOAT64

from mergekit_slta.reports.merge import DRAWS, SCALE, report, report_page
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.slta.statistics_file import CalibrationInfo
from mergekit_slta.words import as_score


def interfering(powers: Sequence[float], samples: int = 6) -> Statistics:
    """Two experts whose feature changes are orthogonal: 1 on the own data, and ``power`` on the other's, by layer.

    Then both weights are 1 / (1 + power), and the merge retains just that share of each in the layer.
    """

    def grams(name: str, number: int) -> torch.Tensor:
        own, other = torch.diag(torch.tensor([1.0, powers[number]])), torch.diag(torch.tensor([powers[number], 1.0]))
        return torch.stack([own] * samples + [other] * samples).double()

    return synthetic.statistics(["math", "code"], ["layer"], layers=len(powers), samples=samples, grams=grams)


def test_the_sentence_says_what_is_kept_of_each_expert_and_where() -> None:
    solution = interfering([0.25, 1.0, 4.0]).solve("layer", task_weights={})
    kept = ", ".join(f"layer.{layer} {as_score(float(one[0]))}" for layer, one in enumerate(solution.retained.values()))
    assert kept == "layer.0 0.80, layer.1 0.50, layer.2 0.20"
    share = as_score(float(solution.retained_overall[0]))
    where = "(from 0.20 in layer 2 to 0.80 in layer 0)"
    said = f"At level layer, the merge retains {share} of math's feature change {where} and {share} of code's {where}."
    assert solution.verdict() == said


def test_the_sentence_says_which_expert_changes_nothing() -> None:
    statistics = interfering([0.5] * 4)
    for gram in statistics.grams.values():
        gram[:, 1], gram[:, :, 1] = 0, 0
    said = statistics.solve("layer").verdict()
    assert said.endswith(" and – of code's (it has none: is it a copy of the base model?).")


def test_the_base_models_own_task_is_said() -> None:
    keep = CalibrationInfo(source="chat.jsonl", template="", sha256="0" * 64)
    info = synthetic.info(["math", "code"], ["layer"], 1, 4, keep=keep)
    task, grams = torch.arange(3).repeat_interleave(4), synthetic.random_grams(3, 4)[:, :2, :2]
    solution = Statistics({"layer.0": grams}, task, torch.full_like(task, 7), info).solve("layer")
    kept = as_score(solution.kept_base_overall)
    assert solution.verdict().endswith(f"; it keeps {kept} of the base model on its own task.")
    page = report_page(solution)
    assert page.facts["Base model's task"] == "chat.jsonl, weight 1"


@pytest.mark.parametrize("level", ["model", "attn_mlp", "linear"])
def test_the_page_needs_nothing_else_and_its_tables_hold_the_solution(level: str, tmp_path: Path) -> None:
    """The experts' names try to break out."""
    models = ["org/<script>alert(1)</script>", 'org/$a_{\\beta$&"quoted"', "_hidden"]
    statistics = synthetic.statistics(models, [level], layers=2)
    if level == "linear":
        statistics.grams["layer.0.mlp.experts.1.down_proj"] = torch.zeros(12, 3, 3).double()
    solution = statistics.solve()
    text = report(solution, tmp_path / "new").read_text()
    assert_self_contained(text)
    elements = Elements(text)
    said = " ".join(elements.text.split())
    meaning = "The share of the feature change says little about accuracy"
    assert 0 < said.index(solution.verdict()) < said.index(meaning) < said.index("Measurement")
    pictures = {f"{chart}-{level}.png" for chart in ("retained", "alpha") if level != "model"}
    images = [attributes for tag, attributes in elements.found if tag == "img"]
    assert len(pictures) == len(images) == sum(tag == "details" for tag, _ in elements.found)
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"report.html", *pictures}
    for name, alpha in solution.alpha.items():
        shares = [f"<td>{as_score(share)}</td>" for share in solution.retained[name].tolist()]
        assert all(share in text for share in shares)
        assert all(f"<td>{as_score(weight)} (" in text for weight in alpha.tolist())
        row = f'<th scope="row">{name}</th>{"".join(shares)}</tr>'
        assert (row in text) == (level != "model")  # whose rows are the experts


def test_one_expert_and_one_sample(tmp_path: Path) -> None:
    """At the default level."""
    statistics = synthetic.statistics(["org/math"], ["model", "attn_mlp"], layers=1, samples=1)
    first, _ = report_page(statistics).verdict
    assert first == f"{SCALE} At level attn_mlp, the merge retains 1.00 of math's feature change."
    assert report(statistics, tmp_path).is_file()


@pytest.mark.parametrize("samples", [1, 4])
def test_the_weights_stand_with_their_intervals(samples: int) -> None:
    """One sample per task gives no bootstrap interval."""
    solution = synthetic.statistics(levels=["attn_mlp"], samples=samples).solve()
    chart = report_page(solution).charts[1]
    ends = torch.stack(list(solution.bootstrap(DRAWS).intervals(0.9).values()), 1)  # [2, S, T]
    weights, low, high = (as_score(float(values[0, 0])) for values in (solution.alpha["layer.0.attn"][None], *ends))
    assert chart.table.rows[0][1] == (f"{weights} ({low}–{high})" if samples > 1 else weights)


def test_the_command_writes_the_report_and_says_its_sentence(tmp_path: Path) -> None:
    statistics = interfering([0.1, 3.0])
    statistics.save(tmp_path / "stats.safetensors")
    said = run("report", tmp_path / "stats.safetensors", "-o", tmp_path / "new").output
    solution = statistics.solve("layer")
    assert said.startswith(f"{SCALE} {solution.verdict()}\n")
    assert (tmp_path / "new" / "report.html").is_file()
    assert "There is no statistics file" in run("report", tmp_path / "none", "-o", tmp_path / "other", code=1).output
    assert not (tmp_path / "other").exists()


def test_a_recipe_writes_the_report_of_its_merge(llama: Family, tmp_path: Path) -> None:
    recipe = families.recipe(
        llama, level="layer", ridge=0.2, statistics=str(tmp_path / "s.safetensors"), report=str(tmp_path / "report")
    )
    families.merge(recipe, tmp_path / "out")
    measured = Statistics.load(tmp_path / "s.safetensors")
    text = " ".join(Elements((tmp_path / "report" / "report.html").read_text()).text.split())
    assert measured.solve("layer", ridge=0.2).verdict() in text and "ridge 0.2" in text


# The numbers, against dense features and against solving anew


def test_what_is_kept_is_the_share_of_the_squared_feature_change() -> None:
    names = synthetic.submodules(["attn_mlp"], 3)
    deltas = {name: reference.random_deltas([4] * 3, 3, seed) for seed, name in enumerate(names)}
    solution = synthetic.statistics(grams={name: own.grams() for name, own in deltas.items()}).solve("attn_mlp")
    alpha = {name: reference.merging_weights(own) for name, own in deltas.items()}
    by_layer = solution.retained_by_layer()
    of_layers = {layer: [f"layer.{layer}.attn", f"layer.{layer}.mlp"] for layer in range(3)}
    assert list(by_layer) == [*of_layers]
    pairs = [(solution.retained_overall, names), *((by_layer[layer], own) for layer, own in of_layers.items())]
    for found, own in pairs:
        expected = reference.retained([deltas[name] for name in own], [alpha[name] for name in own])
        assert torch.allclose(found, expected, rtol=0, atol=SOLVED_IN_FLOAT64)
