"""The folder of a feature merge's finished layers: what an interruption or a failure leaves in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import MakeFamily
from mergekit.io.tensor_writer import TensorWriter
from support import families
from support.examining import feature_recipe
from support.families import Family
from support.merging import same_tensors

from mergekit_slta.data.sources import CalibrationData
from mergekit_slta.engine.partial import Partial
from mergekit_slta.errors import SltaError
from mergekit_slta.featcal import merge
from mergekit_slta.featcal.merge import SolvedModel, solve_model, token_weights
from mergekit_slta.files import PARTIAL_OF_MERGE
from mergekit_slta.output.publish import publish
from mergekit_slta.reports.page import Page

Recipe = dict[str, Any]


def solve(content: Recipe, folder: Path, **arguments: Any) -> SolvedModel:
    """Solve a recipe as a merge does before its first tensor."""
    experiment, partial = families.experiment(content, **arguments), Partial(folder)
    with partial.held(experiment.ranks):
        return solve_model(experiment, partial)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What counts the feature merges that are computed."""
    counting = mock.Mock(wraps=merge.pass_layers)
    monkeypatch.setattr(merge, "pass_layers", counting)
    return counting


# The folder


def test_a_finished_merge_is_not_computed_again(llama: Family, merges: mock.Mock, tmp_path: Path) -> None:
    """Nor when the recipe is given a report."""
    solve(feature_recipe(llama), tmp_path)
    first, layers = contents(tmp_path), [f"layer-{layer:04d}.safetensors" for layer in range(families.LAYERS + 1)]
    assert sorted(first) == [*layers, "lock", "run.json"]
    found = solve(feature_recipe(llama, ridge="auto", report=str(tmp_path / "report")), tmp_path)
    assert merges.call_count == 1
    assert contents(tmp_path) == first
    for name, tensor in families.solved_tensors(tmp_path).items():
        assert torch.equal(found.tensor(name), tensor)  # type: ignore[arg-type]
    assert all(found.tensor(name) is None for name in ("model.embed_tokens.weight", "model.norm.weight"))


# What changes a recipe, given the family and the recipe of its experts 0 and 1.
OTHER_MERGES: dict[str, Callable[[Family, Recipe], object]] = {
    "expert": lambda family, content: content["models"][0].update(model=str(family.experts[2])),
    "data": lambda family, content: content["models"][0]["parameters"].update(calibration=str(family.data[2])),
    "base": lambda family, content: content.update(base_model=str(family.experts[2])),
    "ridge": lambda family, content: content["parameters"].update(ridge=0.1),
}


@pytest.mark.parametrize("other", OTHER_MERGES)
def test_the_layers_of_another_merge_are_refused_and_left_alone(other: str, llama: Family, tmp_path: Path) -> None:
    first, second = (feature_recipe(llama, experts=[0, 1]) for _ in range(2))
    OTHER_MERGES[other](llama, second)
    solve(first, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(SltaError, match=r"finished layers of another run \(different .*\): finish that run, or delete"):
        solve(second, tmp_path)
    assert contents(tmp_path) == before


def test_answers_count_more_than_prompts(llama: Family, tmp_path: Path) -> None:
    content = feature_recipe(llama, ridge=0.1)
    for file, model in zip(llama.data, content["models"], strict=True):
        texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
        model["parameters"]["calibration"] = str(tmp_path / file.name)
        pairs = [json.dumps({"prompt": text[:-4], "completion": text[-4:]}) for text in texts]
        (tmp_path / file.name).write_text("\n".join(pairs))
    experiment = families.experiment(content)
    data = experiment.load_data(experiment.recipe.experts)
    weights = token_weights(data)
    assert torch.cat(weights).unique().tolist() == [1.0, 8.0]
    families.feature_merge(llama, tmp_path / "weighted", tasks=[task.token_ids for task in data], token_weights=weights)
    solve(content, tmp_path / "solved")
    assert same_tensors(families.solved_tensors(tmp_path / "solved"), families.solved_tensors(tmp_path / "weighted"))


def test_an_answer_counts_from_the_token_that_predicts_its_first_one_as_far_as_it_goes() -> None:
    samples = [(6, (3, 5)), (4, (3, 40)), (2, None), (2, (1, 2))]  # lengths, and the places of answers
    ids, answers = (tuple(range(length)) for length, _ in samples), tuple(answer for _, answer in samples)
    data = CalibrationData("a.jsonl", tuple(ids), tuple(range(len(samples))), answers)
    expected = [[1, 1, 8, 8, 8, 1], [1, 1, 8, 8], [1, 1], [8, 8]]
    assert [row.tolist() for row in token_weights([data, data])] == 2 * expected


def test_a_tied_head_stays_without_a_word(
    make_family: MakeFamily, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = make_family("gemma")
    solve(feature_recipe(family), tmp_path)
    assert not caplog.records


# Removed, or kept


def test_it_is_kept_until_output_and_report_are_written(llama: Family, merges: mock.Mock, tmp_path: Path) -> None:
    content = feature_recipe(llama, report=str(tmp_path / "report"))
    save, out = TensorWriter.save_tensor, tmp_path / "out"
    saved: list[str] = []

    def full(self: TensorWriter, name: str, *arguments: Any, **more: Any) -> None:
        saved.append(name)
        if len(saved) > 5:
            raise OSError("No space left on device")
        save(self, name, *arguments, **more)

    full_too = mock.Mock(side_effect=OSError("No space left"))
    for where, name, function, said in (
        (Page, "write", full_too, "No space left: correct that and run the command again"),
        (TensorWriter, "save_tensor", full, "No space left"),
    ):
        with mock.patch.object(where, name, function), pytest.raises(SltaError, match=said):
            families.merge(content, out)
        assert (out / PARTIAL_OF_MERGE).is_dir()
    with pytest.raises(SltaError, match="is not finished: run it again"):
        publish(out, "org/name", dry_run=True)
    families.merge(content, out)
    assert merges.call_count == 1
    assert [file.name for file in (out / "mergekit-slta").iterdir()] == ["merge.json"]


# Interrupted


@pytest.mark.parametrize("architecture", ["mixtral", "gemma4", "zamba2"])
def test_finished_layers_are_repeated_to_the_last_bit(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    """Routed experts; layers that pass more than hidden states to later ones; layers that share tensors."""
    family = make_family(architecture, records=3)
    families.feature_merge(family, tmp_path, batch_tokens=60)
    before = families.solved_tensors(tmp_path)
    for file in sorted(tmp_path.glob("layer-*"))[2:]:
        file.unlink()
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("layer-*")}
    found = families.feature_merge(family, tmp_path, batch_tokens=60)
    assert len(kept) == 2 and kept == {file: file.stat().st_mtime_ns for file in kept}
    assert same_tensors(families.solved_tensors(tmp_path), before)
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in before.items())  # type: ignore[arg-type]
