"""A second look at finished merges: sound ones of every method, and every way in which one can be spoilt."""

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
from support.copies import edit_tensors, edited
from support.examining import edit_config, swap_ids
from support.families import Family

from mergekit_slta.errors import SltaError
from mergekit_slta.output.verify import Verification, verify
from mergekit_slta.recipe.recipe import Recipe

QUERY = "model.layers.1.self_attn.q_proj.weight"
OTHERS = "The tensors have other names, shapes, types or values than those that the merge wrote"
ROTATION = {"rope_type": "default", "rope_theta": 5.0}
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
    assert said.startswith(f"Nothing is wrong with the names, shapes, types and sampled values of {found.tensors}")
    assert note.startswith("Note: tokenizer.json, tokenizer_config.json of ") and str(llama.base) in note


@pytest.mark.parametrize("shard", [20_000, 10**9])
@pytest.mark.parametrize("safe", [True, False])
def test_a_merge_is_read_back_from_files_of_any_kind(safe: bool, shard: int, llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", calibration=False)
    out = families.merge(content, tmp_path / "out", safe_serialization=safe, out_shard_size=shard)
    assert check(content, out).problems == () and any(out.glob("*.bin")) != safe


def test_an_adapter_as_the_base_model(llama: Family, tmp_path: Path) -> None:
    base = f"{llama.base}+{write_adapter(llama.base, tmp_path / 'adapter')}"
    content = families.recipe(llama, "actmat", calibration=False) | {"base_model": base}
    cache = str(tmp_path / "adapters")
    out = families.merge(content, tmp_path / "out", lora_merge_cache=cache)
    assert check(content, out, lora_merge_cache=cache).problems == ()
    edit_tensors(out, lambda tensors: tensors.pop(QUERY))
    found = check(content, out, lora_merge_cache=cache)
    changed, missing = found.problems
    assert changed.startswith(OTHERS) and missing.startswith(f"transformers misses {QUERY}")
    assert "2 problems found" in str(found)


def test_a_vocabulary_that_mergekit_aligned_may_have_other_rows(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", calibration=False)
    content |= {"tokenizer": {"source": "base", "pad_to_multiple_of": 128}}
    out = families.merge(content, tmp_path / "out")
    assert check(content, out).problems == ()
    del content["tokenizer"]
    (problem,) = check(content, out).problems
    had = "which had tokenizer_source base instead of None: is this the recipe of this folder?"
    assert problem == f"{out} holds another merge, {had}"
    for file in out.glob("tokenizer*"):
        file.unlink()
    content["tokenizer_source"] = "base"
    assert (
        f"{out} has no tokenizer, which the recipe's 'tokenizer' asks for: merge again." in check(content, out).problems
    )


def test_a_model_that_transformers_cannot_build_is_not_called_sound(family: Family, tmp_path: Path) -> None:
    for folder in family.folders:
        edit_config(folder, hidden_act="nosuch")
    content = families.recipe(family, "actmat", calibration=False)
    (problem,) = check(content, families.merge(content, tmp_path / "out")).problems
    assert problem.startswith("transformers cannot load the folder (")


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
        (lambda own: own.pop(QUERY), f"transformers misses {QUERY}"),
        (lambda own: own.update(more=torch.zeros(2)), "transformers does not know more"),
        (lambda own: own.update({QUERY: own[QUERY].float()}), OTHERS),
        (lambda own: own.update({QUERY: own[QUERY].to(torch.int8)}), OTHERS),
        (lambda own: own.update({QUERY: own[QUERY][1:].clone()}), f"{QUERY} have other shapes than the folder's"),
        (lambda own: own[QUERY][0, :2].fill_(torch.nan), f"Tensors have values that are not finite: {QUERY} (2); mer"),
        (lambda own: [tensor.fill_(torch.nan) for tensor in own.values()], " and 27 more; merge in 'dtype: float32'."),
        (lambda own: own[QUERY].add_(1.0), OTHERS),
    ],
)
def test_what_is_wrong_is_named(copied: tuple[dict[str, Any], Path], spoil: Spoil, said: str) -> None:
    content, out = copied
    edit_tensors(out, spoil)
    changed, *more = check(content, out).problems
    assert changed.startswith(OTHERS) and said in [changed, *more][-1]


HEAD = "mtp.layers.0.self_attn.q_proj.weight"
UP = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


@pytest.mark.parametrize(
    ("architecture", "spoil", "said"),
    [
        ("mixtral", lambda own: None, ""),
        ("mixtral", lambda own: own.pop(UP), "transformers cannot load the folder ("),
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2}, ["differs from that of BASE in num_hidden_layers", "does not know model.layers.2."]),
        ({"num_hidden_layers": 4}, ["differs from that of BASE in num_hidden_layers", "misses model.layers.3."]),
        ({"hidden_act": "gelu"}, ["differs from that of BASE in hidden_act: copy these entries from there."]),
        ({"rms_norm_eps": 0.1, "rope_parameters": ROTATION}, ["in rms_norm_eps, rope_parameters.rope_theta: copy"]),
        ({"model_type": "nosuch"}, ["transformers cannot read the config.json of OUT ("]),
        ({"num_attention_heads": "four"}, ["transformers cannot read the config.json of OUT ("]),
        ({"architectures": ["LlamaModel"]}, ["of BASE in architectures", "does not know lm_head.weight."]),
        ({"torch_dtype": "float32", "use_cache": False, "eos_token_id": 5, "transformers_version": "4"}, []),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_the_base_models(
    changes: dict[str, Any], said: list[str], copied: tuple[dict[str, Any], Path], llama: Family
) -> None:
    content, out = copied
    edit_config(out, **changes)
    problems = check(content, out).problems
    assert len(problems) == len(said)
    for problem, words in zip(problems, said, strict=True):
        assert words.replace("BASE", str(llama.base)).replace("OUT", str(out)) in problem


def test_a_recipe_or_folder_of_another_merge(copied: tuple[dict[str, Any], Path], llama: Family) -> None:
    """Each is one sentence, whatever it takes along."""
    content, out = copied
    expert = llama.experts[0]
    with pytest.raises(SltaError, match="There is no folder none: name the folder of the merge"):
        check(content, Path("none"))
    assert ["is it the recipe's folder?" in problem for problem in check(content, expert).problems] == [True]
    for change, had in (
        ({"merge_method": "featcal"}, "which had the method slta instead of featcal"),
        ({"parameters": {"samples": 4}}, "which had samples of expert0 3 instead of 4, "),
        ({"out_dtype": "float16"}, "which had out_dtype bfloat16 instead of float16"),
        ({"models": content["models"][:1]}, "which had the model "),
    ):
        (problem,) = check(content | change, out).problems
        assert problem.startswith(f"{out} holds another merge, ") and had in problem
    edit_tensors(llama_copy := Path(shutil.copytree(llama.base, out.parent / "base")), lambda own: own[QUERY].add_(1.0))
    (problem,) = check(content | {"base_model": str(llama_copy)}, out).problems
    assert "which had other weights of base" in problem
    (problem,) = check(of_mergekits_own_method(llama), out).problems
    assert problem.startswith(f"{out} holds a merge by slta: ")


def test_models_that_have_moved_are_known_by_their_content(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", calibration=False)
    out = families.merge(content, tmp_path / "out")
    moved = Path(shutil.copytree(llama.experts[0], tmp_path / "moved"))
    content["models"][0]["model"] = str(moved)
    assert check(content, out).problems == ()
    edit_tensors(moved, lambda own: own[QUERY].add_(1.0))
    (problem,) = check(content, out).problems
    assert "which had the model expert0" in problem


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: (out / "tokenizer.json").write_text("{"), "OUT has no usable tokenizer ("),
        (swap_ids, "The tokenizer in OUT is not that of BASE: it has no or another id for a, b."),
        (lambda out: None, ""),
    ],
)
def test_a_tokenizer_that_is_not_the_base_models(spoil: Any, said: str, llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "sftm", calibration=False)
    out = families.merge(content, tmp_path / "out", copy_tokenizer=True)
    spoil(out)
    problems = check(content, out).problems
    assert len(problems) == bool(said)
    assert all(said.replace("BASE", str(llama.base)).replace("OUT", str(out)) in problem for problem in problems)


def test_what_a_base_model_stores_wider_stays_as_wide(family: Family, tmp_path: Path) -> None:
    """Such as a router's bias in float32 beside bfloat16 matrices."""
    norms = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(families.LAYERS)]
    numbers = torch.linspace(6.82, 7.06, 32)

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = numbers.clone() if name in norms else tensors[name].bfloat16()

    for folder in family.folders:
        edit_tensors(folder, narrow)
    for method, settings in (("sftm", {"calibration": False}), ("slta", {"samples": 2})):
        content = families.recipe(family, method, **settings) | {"dtype": "float32", "out_dtype": "bfloat16"}
        out = families.merge(content, tmp_path / method, copy_tokenizer=True)
        stored = load_file(out / "model.safetensors")
        assert {name for name, tensor in stored.items() if tensor.dtype == torch.float32} == {*norms}
        assert all(torch.equal(stored[name], numbers) for name in norms)
        assert check(content, out) == Verification((), 30)


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
