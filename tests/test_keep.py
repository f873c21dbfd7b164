"""The base model as a task: what it does on prompts of its own is kept, by stock merges and from statistics files."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import families, reference
from support.examining import only
from support.families import Family, recipe
from support.merging import same_tensors, worst_error
from support.rounding import IN_FLOAT64, gram_rounding, regression_rounding

from mergekit_slta.checks.examine import check
from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.regression import RIDGES
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.measure import statistics_of
from mergekit_slta.slta.statistics import Statistics


def keeping(family: Family, method: str = "slta", *experts: int, **shared: Any) -> dict[str, Any]:
    """A recipe of two experts, or those that are given, that lists the base model with the third one's prompts."""
    keep = {"weight": shared.pop("weight")} if "weight" in shared else {}
    return recipe(family, method, experts=experts or (0, 1), keep=keep, **shared)


def merged(content: dict[str, Any], out: Path) -> dict[str, torch.Tensor]:
    return load_file(families.merge(content, out) / "model.safetensors")


@pytest.mark.parametrize("level", ["model", "attn_mlp", "linear"])
def test_one_expert_takes_its_closed_form(level: str, llama: Family, tmp_path: Path) -> None:
    """alpha = g / (g + kappa g_0), the sizes of the change per token measured on whole models in float64."""
    content = keeping(llama, "slta", 0, weight=2.0, level=level)
    models, tasks = llama.models()[:2], llama.token_ids()
    found = statistics_of(families.experiment(content), [level], tmp_path / "stats.safetensors")
    solution = found.solve(level, keep_weight=2.0)
    measured = reference.deltas(models, [tasks[0], tasks[2]], level, reference.SPLITS["llama"])
    assert set(measured) == set(solution.alpha)
    for name, deltas in measured.items():
        sizes = [[], []]  # type: list[list[torch.Tensor]]
        lengths = [len(ids) for ids in (*tasks[0], *tasks[2])]
        for delta, task, tokens in zip(deltas.samples, deltas.task, lengths, strict=True):
            sizes[task].append(delta.square().sum() / tokens)
        own, base = (torch.stack(found).mean() for found in sizes)
        assert torch.allclose(solution.alpha[name], own / (own + 2 * base), atol=gram_rounding(), rtol=0), name
        assert solution.kept_base[name] == pytest.approx(1 - float(solution.alpha[name]) ** 2, abs=IN_FLOAT64)


def test_the_file_says_what_is_kept_and_gives_it_up(
    llama: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "stats.safetensors"
    content = keeping(llama, weight=0.5, statistics=str(file))
    families.merge(content, tmp_path / "merged", write_model_card=True)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert re.search(r"\| Base model \| .*`task2\.jsonl`.*0\.\d\d \|", card)
    statistics = Statistics.load(file)
    assert statistics.info.keep is not None
    assert statistics.info.keep.source == llama.data[2].name
    assert statistics.task.unique().tolist() == [0, 1, 2]
    assert statistics.grams["layer.0.attn"].shape[1:] == (2, 2)
    written = json.loads(statistics.solve(keep_weight=0.5).to_json())
    assert written["keep_weight"] == 0.5
    assert written["kept_base"].keys() == written["alpha"].keys()
    # A subset keeps the base model's task, under the next number.
    part = statistics.select(statistics.info.models[1])
    assert part.task.unique().tolist() == [0, 1]
    alone = statistics_of(families.experiment(keeping(llama, "slta", 1)), ["attn_mlp"], tmp_path / "alone")
    for name, alpha in part.solve().alpha.items():
        assert torch.allclose(alpha, alone.solve().alpha[name], atol=gram_rounding(), rtol=0)
    # The recipe without the base model reads the same file.
    plain = recipe(llama, experts=(0, 1), statistics=str(file))
    without = merged(recipe(llama, experts=(0, 1)), tmp_path / "without")
    assert "also has prompts for the base model" not in caplog.text
    assert same_tensors(merged(plain, tmp_path / "plain"), without)
    assert f"{file} also has prompts for the base model: to use them, give its entry" in caplog.text
    assert same_tensors(merged(keeping(llama, weight=0.0), tmp_path / "zero"), without)
    # A recipe that only weights the base model takes the file's prompts.
    unnamed = recipe(llama, experts=(0, 1), calibration=False, statistics=str(file))
    unnamed["models"].append({"model": str(llama.base), "parameters": {"weight": 0.5}})
    assert not any("have the same prompts" in note for note in check(Recipe.parse(json.dumps(unnamed), "recipe")).notes)
    assert same_tensors(merged(unnamed, tmp_path / "unnamed"), load_file(tmp_path / "merged" / "model.safetensors"))


def test_a_file_without_the_base_models_task_is_refused(llama: Family, tmp_path: Path) -> None:
    file = tmp_path / "stats.safetensors"
    statistics_of(families.experiment(recipe(llama, experts=(0, 1))), ["attn_mlp"], file)
    with pytest.raises(SltaError, match="without prompts for the base model"):
        Statistics.load(file).solve(keep_weight=1.0)
    with pytest.raises(SltaError, match="was measured without prompts for the base model"):
        merged(keeping(llama, statistics=str(file)), tmp_path / "out")


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_copies_of_the_base_model_as_experts_give_the_same_feature_merge(
    weight: float, llama: Family, tmp_path: Path
) -> None:
    copied = recipe(llama, "featcal", experts=(0, 1))
    for number in range(int(weight)):  # with the same prompts, which two experts may not have
        copy, data = shutil.copytree(llama.base, tmp_path / f"copy{number}"), tmp_path / f"copy{number}.jsonl"
        lines = llama.data[2].read_text().splitlines(keepends=True)
        data.write_text("".join(lines[::-1] if number else lines))
        copied["models"].append({"model": str(copy), "parameters": {"calibration": str(data)}})
    found = merged(keeping(llama, "featcal", weight=weight), tmp_path / "kept")
    assert worst_error(found, merged(copied, tmp_path / "copied")) < regression_rounding(RIDGES[0])


@pytest.mark.parametrize(
    ("method", "parameters"), [("slta", {}), ("sftm", {"calibration": "a.jsonl", "weight": 1.0})], ids=str
)
def test_a_base_model_without_a_task_is_ignored(
    method: str, parameters: dict[str, Any], llama: Family, tmp_path: Path
) -> None:
    """One without parameters, and by a method without data, which says so."""
    content = recipe(llama, method, experts=(0, 1), calibration=method == "slta")
    without = merged(content, tmp_path / "without")
    content["models"].append({"model": str(llama.base), "parameters": parameters})
    found = check(Recipe.parse(json.dumps(content), "recipe"))
    assert not found.problems
    assert ("'sftm' ignores calibration, weight of the base model" in "".join(found.notes)) == bool(parameters)
    assert same_tensors(merged(content, tmp_path / "listed"), without)


def test_a_mistake_is_one_sentence(llama: Family) -> None:
    content = recipe(llama, experts=(0, 1))
    content["models"].append({"model": str(llama.base), "parameters": {"weight": -1.0, "calibration": "a.jsonl"}})
    assert re.search("'weight' in the parameters of .* greater than or equal to 0", only(content))
    content["models"][-1]["parameters"] = {"weight": 1.0}
    assert re.search("The base model .* has no 'calibration'", only(content))
