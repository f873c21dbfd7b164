"""A second look at finished merges: sound ones of every method, and every way in which one can be spoilt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from safetensors.torch import load_file
from support import families
from support.adapters import write_adapter
from support.command import run
from support.copies import edit_tensors, edited
from support.examining import edit_config
from support.families import Family

from mergekit_slta.output.verify import Verification, verify
from mergekit_slta.recipe.recipe import Recipe

QUERY = "model.layers.1.self_attn.q_proj.weight"
Spoil = Callable[[dict[str, torch.Tensor]], object]


def check(content: dict[str, Any], out: Path, **options: Any) -> Verification:
    return verify(Recipe(content), out, quiet=True, **options)


@pytest.fixture(scope="module")
def merged(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A bfloat16 merge of float32 models, of which only the base model is left; not to be changed."""
    folder = tmp_path_factory.mktemp("merged")
    content = families.recipe(llama, samples=3, out_dtype="bfloat16")
    out = families.merge(content, folder / "out")
    for entry in content["models"]:
        entry["model"], entry["parameters"] = str(folder / entry["model"]), {"calibration": "of another machine.jsonl"}
    return content, out


@pytest.fixture
def copied(merged: tuple[dict[str, Any], Path], tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """A merge that a test may spoil."""
    return merged[0], Path(shutil.copytree(merged[1], tmp_path / "copy"))


def test_a_sound_merge_needs_its_base_model_alone(llama: Family, merged: tuple[dict[str, Any], Path]) -> None:
    content, out = merged
    found = check(content, out)
    assert found.problems == () and found.tensors == len(load_file(out / "model.safetensors"))
    said, note = str(found).split("\n")  # the fixture's merge is without a tokenizer
    assert said == (
        f"Nothing is wrong with the names, shapes, data types and values of {found.tensors} tensors. transformers "
        "loads the folder, which has all tensors of the base model."
    )
    assert note.startswith("Note: tokenizer.json, tokenizer_config.json of ") and str(llama.base) in note


def test_an_adapter_as_the_base_model(llama: Family, tmp_path: Path) -> None:
    base = f"{llama.base}+{write_adapter(llama.base, tmp_path / 'adapter')}"
    content = families.recipe(llama, "actmat", calibration=False) | {"base_model": base}
    cache = str(tmp_path / "adapters")
    out = families.merge(content, tmp_path / "out", lora_merge_cache=cache)
    assert check(content, out, lora_merge_cache=cache).problems == ()
    edit_tensors(out, lambda tensors: tensors.pop(QUERY))
    assert len(check(content, out, lora_merge_cache=cache).problems) == 1


def test_a_vocabulary_that_mergekit_aligned_may_have_other_rows(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", calibration=False)
    content |= {"tokenizer": {"source": "base", "pad_to_multiple_of": 128}}
    out = families.merge(content, tmp_path / "out")
    assert check(content, out).problems == ()
    del content["tokenizer"]
    assert len(check(content, out).problems) == 2  # the embedding and the head


def of_mergekits_own_method(family: Family) -> dict[str, Any]:
    content = families.recipe(family, "linear", calibration=False, per_expert={"weight": 1.0})
    del content["base_model"]
    return content


@pytest.mark.parametrize("sliced", [False, True])
def test_a_merge_by_mergekits_own_method(llama: Family, tmp_path: Path, sliced: bool) -> None:
    content = of_mergekits_own_method(llama)
    if sliced:
        sources = [{**entry, "layer_range": [0, 1]} for entry in content.pop("models")]
        content["slices"] = [{"sources": sources}, {"sources": sources}]
    out = families.merge(content, tmp_path / "out")
    assert check(content, out).problems == ()
    edit_tensors(out, lambda tensors: tensors.pop(QUERY))
    assert [QUERY in problem for problem in check(content, out).problems] == [True]


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
def test_what_is_wrong_is_named(copied: tuple[dict[str, Any], Path], spoil: Spoil, said: str) -> None:
    content, out = copied
    edit_tensors(out, spoil)
    (problem,) = check(content, out).problems
    assert said in problem


HEAD, NORM = "mtp.layers.0.self_attn.q_proj.weight", "model.norm.weight"
UP = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


@pytest.mark.parametrize(
    ("architecture", "spoil", "said"),
    [
        ("mixtral", lambda own: None, ""),
        ("mixtral", lambda own: own.pop("lm_head.weight"), "transformers misses lm_head.weight in the folder, and "),
        ("mixtral", lambda own: own.update(more=torch.zeros(2)), "transformers does not know more, which "),
        ("mixtral", lambda own: own.pop(UP), "transformers cannot load the folder ("),
        ("mixtral", lambda own: own.update({NORM: torch.zeros(31)}), f"{NORM} have other shapes than the folder's "),
        ("qwen3_5", lambda own: own.pop(HEAD), f"{HEAD} of "),  # which transformers ignores
    ],
)
def test_how_transformers_loads_a_merge_whose_tensors_mergekit_chose(
    architecture: str, spoil: Spoil, said: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture, experts=1)
    edit_tensors(family.base, lambda tensors: tensors.update({HEAD: torch.ones(32, 32)}))
    content = of_mergekits_own_method(family)
    content["models"].insert(0, {"model": str(family.base), "parameters": {"weight": 1.0}})
    problems = check(content, edited(family.base, tmp_path / "merged", spoil)).problems
    assert len(problems) == bool(said) and all(problem.startswith(said) for problem in problems), problems


def test_a_configuration_that_transformers_cannot_load(copied: tuple[dict[str, Any], Path]) -> None:
    content, out = copied
    edit_config(out, num_attention_heads="four")
    (problem,) = check(content, out).problems
    assert problem.startswith("transformers cannot load the folder (")


def test_files_that_converters_and_servers_read(family: Family) -> None:
    base, folder, content = family.base, family.experts[0], families.recipe(family, "sftm", calibration=False)
    assert check(content, folder).notes == ()
    for name in ("tokenizer.model", "preprocessor_config.json", "chat_template.jinja", "generation_config.json"):
        (base / name).write_text("{}")
    (folder / "generation_config.json").unlink()
    (lacking,) = check(content, folder).notes
    names = "chat_template.jinja, generation_config.json, preprocessor_config.json, tokenizer.model"
    assert lacking.startswith(f"{names} of {base} are not in the folder: copy them")
    # With a tokenizer and a template of its own, the merge needs the processor only.
    (processor,) = check(content | {"tokenizer_source": "base", "chat_template": "chatml"}, folder).notes
    assert processor.startswith("preprocessor_config.json of ")


def test_the_command_ends_with_status_1_on_a_problem(copied: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    content, out = copied
    recipe = families.write_recipe(tmp_path / "recipe.yml", content)
    assert "Nothing is wrong" in run("verify", recipe, out, "--quiet").stdout
    edit_tensors(out, lambda tensors: tensors[QUERY][5].mul_(torch.inf))
    said = run("verify", recipe, out, "--quiet", code=1).stderr
    assert "1 problem found" in said and QUERY in said
