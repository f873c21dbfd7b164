"""The report on linearity: its schema, its sentences, its figures, and that it needs nothing from outside."""

import json
from pathlib import Path

import pytest
from conftest import MakeFamily
from support import families
from support.html_elements import Elements, assert_self_contained
from support.linearity_values import NAMES, plan_of

from mergekit_slta.nonlinearity.result import METRIC, SCORE, Linearity
from mergekit_slta.nonlinearity.studies import plan_studies
from mergekit_slta.reports.linearity import linearity_page, write_linearity


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Linearity, Path]:
    """Everything measured at the coarser levels, and the folder that it was written to."""
    config = families.config_of("llama", num_hidden_layers=1)
    family = families.make_family(tmp_path_factory.mktemp("family"), config, experts=3, records=1, longest=8)
    levels, studies = ("model", "layer", "attn_mlp"), plan_studies(3, triples=True)
    result = plan_of(family, levels, studies, family.token_ids()).measure()
    return result, write_linearity(result, tmp_path_factory.mktemp("linearity") / "new").parent


def test_the_json_has_its_schema(written: tuple[Linearity, Path]) -> None:
    content = json.loads((written[1] / "linearity.json").read_text())
    assert set(content) == {
        "non_linearity", "projection_distance", "cosine_merge", "cosine_base",
        *(f"distance_{step / 10}" for step in range(11)),
    }  # fmt: skip
    merges = {"one+two", "one+three", "two+three", "one+two+three"}
    submodules = {"model": 1, "layer": 1, "attn_mlp": 2}
    for metric, by_level in content.items():
        single = metric == "non_linearity" or metric.startswith("distance")
        assert set(by_level) == set(submodules)
        for level, groups in by_level.items():
            assert set(groups) == (set(NAMES) if single else merges)
            for group, values in groups.items():
                assert len(values) == submodules[level]
                samples = 1 + group.count("+")
                settings = 27 if group.count("+") == 2 else 25
                for value in values.values():
                    assert set(value) == {"mean", "std", "n"}
                    assert isinstance(value["mean"], float) and value["std"] >= 0
                    assert value["n"] == (samples if single or metric == "cosine_base" else settings)


def test_the_page_says_what_was_measured(written: tuple[Linearity, Path]) -> None:
    result, folder = written
    text = (folder / "linearity.html").read_text()
    assert_self_contained(text)
    elements = Elements(text)
    said = " ".join(elements.text.split())
    page = linearity_page(result)
    assert "The non-linearity score sums" in said
    assert all(f"{name}, 1 prompt" in said for name in NAMES)
    charts = [chart.name for chart in page.charts]
    assert charts == ["non-linearity", "projection-distance", "cosine", "distances"]
    assert {*charts} == {file.stem for file in folder.glob("*.png")}
    images = [image for tag, image in elements.found if tag == "img"]
    assert len(images) == len(charts)
    assert all(str(image["src"]).startswith("data:image/svg+xml;base64,") for image in images)


def test_the_tables_of_charts_name_their_rows(written: tuple[Linearity, Path]) -> None:
    _, projection, cosine, _ = (chart.table for chart in linearity_page(written[0]).charts)
    assert [row[0] for row in projection.rows] == ["model", "layer", "attention", "MLP"]
    assert [row[0] for row in cosine.rows][:2] == ["model: merge and sum", "model: with each other"]
    assert cosine.header[0] == "1 − cosine similarity"


def test_it_prints_as_tables(written: tuple[Linearity, Path]) -> None:
    result, _ = written
    scores, _, distances, _ = repr(result).split("\n\n")
    table = result.table(SCORE, {METRIC: ""}, result.experts)
    assert scores == str(table) and distances.splitlines()[0].endswith("one + two + three")
    assert [row[0] for row in table.rows] == ["model", "layer", "attention", "MLP"]


def test_one_expert_alone_has_a_page(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(experts=1, records=1)
    result = plan_of(family, ("attn_mlp",), plan_studies(1, triples=True), family.token_ids()).measure()
    assert [chart.name for chart in linearity_page(result).charts] == ["non-linearity", "distances"]
    assert write_linearity(result, tmp_path / "new" / "folder").is_file()
