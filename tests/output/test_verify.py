"""A second look at finished merges: sound ones of every method, and every way in which one can be spoilt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import MakeFamily
from mergekit.config import MergeConfiguration
from safetensors.torch import load_file, save_file
from support import families
from support.families import Family

from mergekit_slta.cli.commands import main
from mergekit_slta.errors import SltaError
from mergekit_slta.layers import parts
from mergekit_slta.output.verify import Verification, verify
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.measure import measure

QUERY = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def check(content: dict[str, Any], out: Path, **options: Any) -> Verification:
    recipe = Recipe.from_config(MergeConfiguration.model_validate(content), content)
    return verify(recipe, out, quiet=True, **options)


def change(out: Path, spoil: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write the merged model's one weight file anew, with changed tensors."""
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file)
    index = out / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file.name)}))


@pytest.fixture(scope="module")
def merged(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A bfloat16 merge of float32 models with its statistics; not to be changed."""
    folder = tmp_path_factory.mktemp("merged")
    content = families.recipe(llama, samples=3, out_dtype="bfloat16", statistics=str(folder / "statistics.safetensors"))
    return content, families.merge(content, folder / "out")


@pytest.fixture
def copied(merged: tuple[dict[str, Any], Path], tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """A merge that a test may spoil."""
    return merged[0], Path(shutil.copytree(merged[1], tmp_path / "copy"))


# Sound merges


def test_a_sound_merge_is_as_near_as_the_dense_sum_says(llama: Family, merged: tuple[dict[str, Any], Path]) -> None:
    content, out = merged
    found = check(content, out)
    assert found.problems == ()
    frame, (said, _) = found.to_frame(), str(found).splitlines()
    assert frame.to_dict("list") == {"kind": ["verdict", "note"], "sentence": [said, *found.notes]}
    (file,) = out.glob("*.safetensors")
    written = load_file(file)
    assert found.tensors == found.compared == len(written)
    alpha = measure(Recipe.from_config(MergeConfiguration.model_validate(content)), quiet=True).solve().alpha
    base, *experts = (model.state_dict() for model in llama.models())
    errors = {}
    for name in written:
        wanted = base[name]
        if name.startswith("model.layers."):
            layer = name.split(".")[2]
            branch = "attn" if "self_attn" in name or "input_layernorm" in name else "mlp"
            weights = alpha[f"layer.{layer}.{branch}"]
            wanted = wanted + sum(a * (expert[name] - base[name]) for a, expert in zip(weights, experts, strict=True))
        errors[name] = float((written[name].double() - wanted).abs().max())
    assert found.largest == pytest.approx(max(errors.values()), rel=1e-6)
    assert found.where == max(errors, key=lambda name: errors[name])
    assert str(found).startswith("No difference beyond rounding.")
    said, note = str(found).split("\n")  # the fixture's merge is without a tokenizer
    assert said.endswith(f" in {found.where}. transformers loads the folder, which has all tensors of the base model.")
    assert note.startswith("Note: tokenizer.json, tokenizer_config.json of ") and str(llama.base) in note


@pytest.mark.parametrize(("level", "dtype"), [("model", "bfloat16"), ("head_mlp", "bfloat16"), ("linear", "float32")])
def test_every_level_is_compared(llama: Family, tmp_path: Path, level: str, dtype: str) -> None:
    content = families.recipe(llama, samples=2, level=level, dtype=dtype, statistics=str(tmp_path / "stats"))
    found = check(content, families.merge(content, tmp_path / "out"))
    assert found.problems == () and found.compared == found.tensors > 0


def test_the_experts_of_a_mixture_are_compared_each_with_its_own_weights(
    make_family: MakeFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CACHED", 20_000)  # an expert of the mixture at once
    content = families.recipe(make_family("mixtral"), level="linear", statistics=str(tmp_path / "stats"))
    out = families.merge(content, tmp_path / "out")
    found = check(content, out)
    assert found.problems == () and found.compared == found.tensors > 0
    name = next(
        name for name in load_file(out / "model.safetensors") if ".layers.1." in name and ".experts.3.w2." in name
    )
    change(out, lambda tensors: tensors[name].mul_(1.001))
    assert [name in problem for problem in check(content, out).problems] == [True]


def test_a_vocabulary_that_mergekit_aligned_is_not_compared(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, samples=2, statistics=str(tmp_path / "stats")) | {"tokenizer_source": "base"}
    found = check(content, families.merge(content, tmp_path / "out"))
    assert found.problems == () and found.tensors - found.compared == 2  # the embedding and the head


def test_a_merge_by_mergekits_own_method(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "linear", calibration=False, per_expert={"weight": 1.0})
    del content["base_model"]
    found = check(content, families.merge(content, tmp_path / "out"))
    assert found.problems == () and found.tensors > 0


# Spoilt merges


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tensors: tensors.pop(QUERY), "is missing"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "The tensor more does not belong to the model"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY].float()}), "is of type float32, not bfloat16"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY][1:].clone()}), "has the shape [31, 32], not [32, 32]"),
        (lambda tensors: tensors[QUERY][0, :2].fill_(torch.nan), "has 2 values that are not finite"),
    ],
)
def test_what_is_wrong_is_named(
    copied: tuple[dict[str, Any], Path], spoil: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    content, out = copied
    change(out, spoil)
    (problem,) = check(content, out).problems
    assert said in problem


# What is refused


def test_a_merge_without_statistics_is_refused_rather_than_measured(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, samples=2)
    with pytest.raises(SltaError, match=r"statistics at level attn_mlp are not in .*: measure them"):
        check(content, llama.base)


def test_a_merge_without_compared_values_is_not_called_equal(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", calibration=False)
    found = check(content, families.merge(content, tmp_path / "out"))
    assert found.compared == 0 and str(found).startswith(
        f"Values of actmat cannot be compared; name, shape, data type and finiteness of {found.tensors} tensors were "
        "checked: nothing is wrong. transformers loads"
    )


def test_the_command_ends_with_status_1_on_a_difference(copied: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    content, out = copied
    recipe = families.write_recipe(tmp_path / "recipe.yml", content)
    done = CliRunner().invoke(main, ["verify", str(recipe), str(out), "--quiet"])
    assert done.exit_code == 0 and "No difference beyond rounding" in done.stdout, done.output
    change(out, lambda tensors: tensors[QUERY][5].mul_(1.05))
    done = CliRunner().invoke(main, ["verify", str(recipe), str(out), "--quiet"])
    assert done.exit_code == 1 and "1 problem found." in done.stderr
    assert QUERY in done.stderr and "Traceback" not in done.stderr
