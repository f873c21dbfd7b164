"""Every problem that preflight names, provoked with real checkpoints, and the same through mergekit's own command."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from click.testing import CliRunner
from conftest import MakeFamily
from families import Family
from hub import serve
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from mergekit.scripts.run_yaml import main as mergekit_yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from mergekit_slta import methods
from mergekit_slta import preflight as preflight_module
from mergekit_slta.methods import FeatcalMethod, SltaMethod
from mergekit_slta.needs import Needs
from mergekit_slta.preflight import Findings, examine, preflight
from mergekit_slta.sftm import SftmMethod

SPECS = {method.spec.name: method.spec for method in (SltaMethod, FeatcalMethod, SftmMethod)}
CHAT = "{% for turn in messages %}{{ turn.content }}{% endfor %}"


@pytest.fixture
def family(llama: Family, tmp_path: Path) -> Family:
    """A family that a test may change."""
    root = Path(shutil.copytree(llama.base.parent, tmp_path / "models"))
    return Family(
        root / "base",
        tuple(root / folder.name for folder in llama.experts),
        tuple(root / file.name for file in llama.data),
        llama.config,
    )


def look(recipe: dict[str, Any], **arguments: Any) -> Findings:
    """Examine a recipe; ``options`` are those of ``MergeOptions``."""
    options = MergeOptions(**arguments.pop("options", {}))
    config = MergeConfiguration.model_validate(recipe)
    return examine(config, options, SPECS[recipe["merge_method"]], source=recipe, **arguments)


def problems(recipe: dict[str, Any], **arguments: Any) -> list[str]:
    return look(recipe, **arguments).problems


def only(recipe: dict[str, Any], **arguments: Any) -> str:
    """The one problem of a recipe."""
    (problem,) = problems(recipe, **arguments)
    return problem


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def save_random(config: transformers.PretrainedConfig, folder: Path, model: str = "AutoModelForCausalLM") -> Path:
    """A random model with the families' tokenizer."""
    auto = getattr(transformers, model)
    (auto.from_config(config) if model.startswith("Auto") else auto(config)).save_pretrained(folder)
    families.write_tokenizer(folder)
    return folder


def with_expert(family: Family, expert: Path | str, method: str = "slta") -> dict[str, Any]:
    """A recipe whose second expert is another model."""
    recipe = families.recipe(family, method, experts=[0, 1], calibration=method == "slta")
    recipe["models"][1]["model"] = str(expert)
    return recipe


def with_data(family: Family, calibration: Any, template: str = "", **parameters: Any) -> dict[str, Any]:
    """A recipe whose first expert has other data."""
    recipe = families.recipe(family, experts=[0, 1], **parameters)
    recipe["models"][0]["parameters"] |= {"calibration": str(calibration), "template": template}
    return recipe


# What is sound


@pytest.mark.parametrize("architecture", [*families.ARCHITECTURES])
def test_finds_nothing_wrong_exactly_where_mergekit_can_merge(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture)
    found = problems(families.recipe(family), out_path=tmp_path / "out")
    recipe = families.recipe(family, "task_arithmetic", calibration=False, per_expert={"weight": 0.5})
    if found:
        assert "which mergekit asks for" in found[0] and len(found) == 1
        with pytest.raises(RuntimeError, match="required but not present"):
            families.merge(recipe, tmp_path / "out")
    else:
        families.merge(recipe, tmp_path / "out")


DENSE_FIRST = transformers.DeepseekV3Config(
    vocab_size=families.VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
)


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        (families.config_of("llama", attention_bias=True), "model.layers.0.self_attn.k_proj.bias"),
        (DENSE_FIRST, "model.layers.1.mlp.experts.gate_up_proj"),
    ],
    ids=["biases", "experts of a mixture in some layers"],
)
def test_what_mergekit_would_leave_out_is_said(
    config: transformers.PretrainedConfig, tensor: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(config, experts=1)
    problem = only(families.recipe(family, "sftm", calibration=False))
    assert problem.startswith("mergekit leaves ") and tensor in problem
    recipe = families.recipe(family, "task_arithmetic", calibration=False, per_expert={"weight": 0.5})
    merged = families.merge(recipe, tmp_path / "out")
    opened: Any = transformers.AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert tensor in opened[1]["missing_keys"]


@pytest.mark.parametrize("method", ["slta", "featcal"])
def test_layers_that_cannot_be_run_one_at_a_time(method: str, make_family: MakeFamily) -> None:
    family = make_family(
        transformers.RwkvConfig(vocab_size=families.VOCABULARY, hidden_size=32, num_hidden_layers=3), experts=2
    )
    problem = only(families.recipe(family, method))
    assert problem.startswith("The layers of RwkvForCausalLM cannot be run one at a time (ValueError: ")
    assert problem.endswith("it can be merged with 'merge_method: sftm'.")


def test_a_recipe_without_data_is_sound_for_a_method_that_needs_none(family: Family) -> None:
    assert problems(families.recipe(family, "sftm", calibration=False)) == []


def test_a_method_that_needs_no_decoder_takes_other_models(tmp_path: Path) -> None:
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    folders = [save_random(config, tmp_path / name, "CLIPVisionModel") for name in ("base", "expert")]
    recipe = {"merge_method": "sftm", "base_model": str(folders[0]), "models": [{"model": str(folders[1])}]}
    assert problems(recipe) == []


def test_names_with_and_without_the_prefix_are_the_same(family: Family) -> None:
    def bare(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(family.experts[0], bare)
    assert problems(families.recipe(family), merging=False) == []
    assert "the checkpoint lacks model.embed_tokens.weight" in only(families.recipe(family))


def test_looks_at_headers_and_not_at_weights(family: Family) -> None:
    """A checkpoint whose weights are a hole in a file larger than any memory is examined like any other."""
    for folder in family.folders:
        grow(folder, 2**41)
    assert problems(families.recipe(family)) == []


def grow(folder: Path, nbytes: int) -> None:
    """Add a tensor of ``nbytes`` to a checkpoint; the file system stores none of them."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = len(content) - 8 - length
    header["model.layers.0.huge"] = {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [end, end + nbytes]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + content[8 + length :])
        out.truncate(8 + len(text) + end + nbytes)


# The recipe's text


def test_the_recipe_text_and_keys_without_effect(family: Family) -> None:
    recipe = families.recipe(family, sampels=3)
    recipe["models"][0]["template"] = "{text}"
    dropped, unknown = problems(recipe)
    assert dropped.startswith("'template' in the entry of") and "put it under 'parameters'" in dropped
    assert unknown.endswith("did you mean 'samples'?")


@pytest.mark.parametrize("method", ["slta", "sftm"])
def test_no_base_model(family: Family, method: str) -> None:
    recipe = families.recipe(family, method, calibration=method == "slta")
    del recipe["base_model"]
    assert only(recipe).startswith("The recipe has no base_model")


def test_types_that_mergekit_does_not_know(family: Family) -> None:
    first, second = problems(families.recipe(family, dtype="fp32", out_dtype="int8"))
    assert first.startswith("'dtype: fp32' is no type for a merge: write bfloat16,")
    assert second.startswith("'out_dtype: int8'")
    assert problems(families.recipe(family, dtype="fp32"), merging=False) == []


def test_a_slice_that_is_not_the_whole_depth(family: Family) -> None:
    recipe = families.recipe(family)
    models = [{"model": recipe["base_model"]}, *recipe.pop("models")]
    recipe["slices"] = [{"sources": [entry | {"layer_range": [0, families.LAYERS]} for entry in models]}]
    assert problems(recipe) == []
    recipe["slices"][0]["sources"][1]["layer_range"] = [0, 2]
    assert "takes layers 0-2 of 3" in only(recipe)


# The models


def test_models_that_are_not_there(family: Family) -> None:
    recipe = with_expert(family, family.base / "none")
    assert only(recipe) == f"{family.base}/none cannot be used: there is no such folder here."
    recipe["base_model"] = "org/none"
    assert [problem.split(" cannot")[0] for problem in problems(recipe)] == ["org/none", f"{family.base}/none"]


def test_a_damaged_checkpoint(family: Family) -> None:
    os.truncate(family.experts[2] / "model.safetensors", 5000)
    assert only(families.recipe(family)).startswith(f"{family.experts[2]}/model.safetensors cannot be read")


@pytest.mark.parametrize("method", ["slta", "sftm"])
def test_an_expert_of_another_architecture(family: Family, tmp_path: Path, method: str) -> None:
    other = save_random(families.config_of("mistral"), tmp_path / "other")
    problem = only(with_expert(family, other, method))
    assert problem == (
        f"The expert {other} is a MistralForCausalLM (mistral), the base model {family.base} a LlamaForCausalLM "
        "(llama): only models of one architecture can be merged."
    )


def test_mixed_architectures_are_allowed_where_nothing_is_run(family: Family, tmp_path: Path) -> None:
    config = families.config_of("mistral", head_dim=8)
    other = save_random(config, tmp_path / "other")
    crimes = {"allow_crimes": True}
    assert problems(with_expert(family, other, "sftm"), options=crimes) == []
    assert "only models of one architecture" in only(with_expert(family, other), options=crimes)


@pytest.mark.parametrize("method", ["slta", "sftm"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 4}, "num_hidden_layers 4 instead of 3"),
        (
            {"hidden_size": 16, "num_attention_heads": 2},
            "hidden_size 16 instead of 32, num_attention_heads 2 instead of 4",
        ),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 instead of 2"),
    ],
)
def test_an_expert_of_another_size(
    family: Family, tmp_path: Path, method: str, change: dict[str, int], words: str
) -> None:
    other = save_random(families.config_of("llama", **change), tmp_path / "other")
    assert only(with_expert(family, other, method)) == (
        f"The expert {other} has {words}: it was not fine-tuned from the base model {family.base}, leave it out."
    )


def test_a_tensor_of_another_shape(family: Family) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
            tensors[name] = tensors[name][:-1]

    edit_tensors(family.experts[0], shorten)
    problem = only(families.recipe(family))
    assert problem.startswith(f"The tensor model.layers.1.mlp.up_proj.weight of the expert {family.experts[0]} has")
    assert "the shape [47, 32] instead of [48, 32], and so do 1 more: " in problem


def test_tensors_missing_from_an_expert(family: Family) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(family.experts[0], lambda tensors: tensors.pop(name))
    problem = only(families.recipe(family))
    assert problem.startswith(f"{family.experts[0]}: the checkpoint lacks {name}, which mergekit asks for")


@pytest.fixture
def inferred(make_family: MakeFamily) -> dict[str, Any]:
    """A recipe for models of which mergekit has no definition; they tie their heads and do not store them."""
    family = make_family(transformers.OlmoConfig(**families.config_of("llama").to_diff_dict() | OLMO))
    return families.recipe(family, level="layer")


OLMO = {"model_type": "olmo", "architectures": None, "tie_word_embeddings": True}


def folders(recipe: dict[str, Any]) -> list[Path]:
    return [Path(recipe["base_model"]), *(Path(entry["model"]) for entry in recipe["models"])]


def test_tensors_missing_where_mergekit_infers_the_architecture(inferred: dict[str, Any]) -> None:
    assert problems(inferred) == []
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folders(inferred)[1], lambda tensors: tensors.pop(name))
    assert only(inferred).startswith(f"{folders(inferred)[1]}: the checkpoint lacks {name}")


def test_a_head_that_only_some_store(inferred: dict[str, Any], tmp_path: Path) -> None:
    """mergekit then plans it for all, and fails in the middle of the merge."""
    embedding = "model.embed_tokens.weight"
    edit_tensors(folders(inferred)[1], lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert "the checkpoint lacks lm_head.weight" in only(inferred)
    models = [{"model": str(folder), "parameters": {"weight": 0.5}} for folder in folders(inferred)[1:]]
    with pytest.raises(ValueError, match="Base input is not present"):
        families.merge(inferred | {"merge_method": "task_arithmetic", "models": models}, tmp_path / "out")


def test_buffers_of_old_checkpoints_need_not_be_in_all(inferred: dict[str, Any]) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_tensors(folders(inferred)[0], lambda tensors: tensors.update(buffer))
    assert problems(inferred) == []


def test_a_wrong_value_does_not_hide_what_else_is_wrong(family: Family, tmp_path: Path) -> None:
    wrong, missing = problems(with_data(family, tmp_path / "none.txt", samples="many"))
    assert wrong.startswith("'samples'") and "does not exist" in missing


@pytest.mark.parametrize("method", ["slta", "sftm"])
@pytest.mark.parametrize("tied_base", [True, False])
def test_a_tied_head_beside_an_untied_one(
    make_family: MakeFamily, tmp_path: Path, method: str, tied_base: bool
) -> None:
    family = make_family(families.config_of("llama", tie_word_embeddings=tied_base), experts=1)
    other = save_random(families.config_of("llama", tie_word_embeddings=not tied_base), tmp_path / "other")
    recipe = families.recipe(family, method, calibration=method == "slta")
    assert problems(recipe) == []
    recipe["models"][0]["model"] = str(other)
    tied, untied = (family.base, other) if tied_base else (other, family.base)
    assert only(recipe).startswith(f"{tied} ties its output head to its embedding and {untied} does not")


@pytest.mark.parametrize("method", ["slta", "sftm"])
def test_a_quantized_checkpoint(family: Family, method: str) -> None:
    edit_config(family.experts[0], quantization_config={"quant_method": "gptq", "bits": 4})
    problem = only(families.recipe(family, method, calibration=method == "slta"))
    assert problem == f"{family.experts[0]} is quantized (gptq): name the original checkpoint, or dequantize it first."


# Vocabularies


def larger_vocabulary(folder: Path) -> Path:
    return save_random(families.config_of("llama", vocab_size=families.VOCABULARY + 2), folder)


@pytest.mark.parametrize("method", ["slta", "sftm"])
def test_vocabularies_of_different_sizes(family: Family, tmp_path: Path, method: str) -> None:
    other = larger_vocabulary(tmp_path / "other")
    recipe = with_expert(family, other, method)
    assert only(recipe) == (
        f"The expert {other} has a vocabulary of 66 tokens, the base model {family.base} one of 64: add "
        "'tokenizer: {source: base}' to the recipe, so that mergekit aligns them."
    )
    assert problems(recipe | {"tokenizer": {"source": "base"}}) == []
    assert problems(recipe | {"tokenizer_source": "union"}) == []
    assert problems(recipe, merging=False) == []


def test_logits_of_different_sizes(family: Family, tmp_path: Path) -> None:
    recipe = with_expert(family, larger_vocabulary(tmp_path / "other")) | {"tokenizer": {"source": "base"}}
    recipe["parameters"]["level"] = "model"
    assert only(recipe).startswith("'level: model' compares logits, but the expert")


def test_vocabularies_with_other_ids(family: Family) -> None:
    file = family.experts[0] / "tokenizer.json"
    content = json.loads(file.read_text())
    tokens = content["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    file.write_text(json.dumps(content))
    recipe = families.recipe(family)
    problem = only(recipe)
    assert problem.startswith(f"The tokenizer of the expert {family.experts[0]} has other ids than that of the base")
    assert "for 2 tokens (such as 'a'): add 'tokenizer: {source: base}'" in problem
    assert problems(recipe | {"tokenizer": {"source": "base"}}) == []


def test_other_ids_in_a_list_of_tokens_with_scores(family: Family) -> None:
    recipe = families.recipe(family, "sftm", experts=[0], calibration=False)
    for folder, tokens in zip(family.folders, ("abc", "acb"), strict=False):
        vocabulary = [[token, -1.0] for token in tokens]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert "for 2 tokens (such as 'b')" in only(recipe)


def test_a_token_added_in_a_free_place_is_no_difference(family: Family) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(family.experts[0])
    tokenizer.add_tokens(["<turn>"])
    tokenizer.save_pretrained(family.experts[0])
    assert problems(families.recipe(family)) == []


# Adapters


@pytest.fixture
def adapter(family: Family, tmp_path: Path) -> Path:
    """A LoRA adapter for the family's base model."""
    return save_adapter(family.base, tmp_path / "adapter", "q_proj", "down_proj")


def save_adapter(base: Path, folder: Path, *targets: str) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=list(targets))).save_pretrained(str(folder))
    return folder


def adapted(family: Family, adapter: Path) -> dict[str, Any]:
    return with_expert(family, f"{family.base}+{adapter}")


def test_an_adapter_needs_a_folder_to_be_merged_in(family: Family, adapter: Path, tmp_path: Path) -> None:
    recipe = adapted(family, adapter)
    assert only(recipe) == (
        f"{family.base}+{adapter} is a LoRA adapter: give mergekit a folder to merge it in with "
        "--lora-merge-cache FOLDER."
    )
    cache = {"lora_merge_cache": str(tmp_path / "cache")}
    assert problems(recipe, options=cache, out_path=tmp_path / "out") == []
    assert not (tmp_path / "cache").exists()


def test_an_incomplete_adapter(family: Family, adapter: Path, tmp_path: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    problem = only(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path)})
    assert problem == f"{adapter} is no LoRA adapter: it lacks adapter_model.safetensors."


def test_an_adapter_of_a_wider_model(family: Family, tmp_path: Path) -> None:
    config = families.config_of("llama", hidden_size=64)
    other = save_adapter(save_random(config, tmp_path / "wide"), tmp_path / "other", "q_proj")
    problem = only(adapted(family, other), options={"lora_merge_cache": str(tmp_path)})
    assert problem.startswith(f"The adapter {other} was not trained on {family.base} (its matrices for")


def test_an_adapter_of_another_architecture(family: Family, tmp_path: Path) -> None:
    gpt2 = save_random(families.config_of("gpt2"), tmp_path / "gpt2")
    other = save_adapter(gpt2, tmp_path / "other", "c_attn")
    problem = only(adapted(family, other), options={"lora_merge_cache": str(tmp_path)})
    assert f"was not trained on {family.base} (it adapts transformer.h." in problem


def test_an_adapter_of_transposed_maps_fits(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("gpt2")
    adapter = save_adapter(family.base, tmp_path / "adapter", "c_attn")
    assert problems(adapted(family, adapter), options={"lora_merge_cache": str(tmp_path)}) == []


def test_an_adapter_that_changed_after_it_was_merged(family: Family, adapter: Path, tmp_path: Path) -> None:
    recipe, cache = adapted(family, adapter), {"lora_merge_cache": str(tmp_path / "cache")}
    reference = MergeConfiguration.model_validate(recipe).models[1].model
    merged = Path(reference.merged(cache_dir=cache["lora_merge_cache"]).model.path)
    assert problems(recipe, options=cache) == []
    time = (merged / "model.safetensors").stat().st_mtime + 10
    os.utime(adapter / "adapter_model.safetensors", (time, time))
    assert only(recipe, options=cache) == f"{merged} holds {reference} as it was before its adapter changed: delete it."
    (merged / "model.safetensors").unlink()
    assert only(recipe, options=cache) == (
        f"An earlier merge of {reference} was interrupted and left {merged} without weights: delete it."
    )


# What can be calibrated


def t5(folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
    }
    config = transformers.T5Config(vocab_size=64, feed_forward_proj="gated-gelu", **sizes)
    config.tie_word_embeddings = False
    return save_random(config, folder, "T5ForConditionalGeneration")


def bert(folder: Path) -> Path:
    config = transformers.RobertaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return save_random(config, folder, "RobertaForMaskedLM")


def clip(folder: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=sizes | {"vocab_size": 64},
        vision_config=sizes | {"image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    return save_random(config, folder, "CLIPModel")


@pytest.mark.parametrize(
    ("save", "words"),
    [
        (t5, "T5ForConditionalGeneration is an encoder-decoder"),
        (bert, "RobertaForMaskedLM is no decoder-only language model"),
        (clip, "CLIPModel has several modules"),
    ],
)
def test_models_that_are_no_decoder(family: Family, tmp_path: Path, save: Callable[[Path], Path], words: str) -> None:
    recipe = with_expert(family, save(tmp_path / "expert")) | {"base_model": str(save(tmp_path / "base"))}
    del recipe["models"][0]
    assert only(recipe, merging=False) == (
        f"{words}, which calibration does not cover: use 'merge_method: sftm' instead."
    )


def test_a_level_that_the_layers_do_not_have(make_family: MakeFamily) -> None:
    family = make_family("lfm2")
    assert problems(families.recipe(family)) == []
    problem = only(families.recipe(family, level="head_mlp"))
    assert problem == "Layer 0 mixes tokens by Lfm2ShortConv, which has no heads: use attn_mlp."


# Calibration data


def test_an_expert_without_calibration(family: Family) -> None:
    recipe = families.recipe(family, experts=[0, 1])
    del recipe["models"][1]["parameters"]
    assert only(recipe).startswith(f"The expert {family.experts[1]} has no 'calibration'")


def test_two_experts_with_the_same_source(family: Family) -> None:
    problem = only(with_data(family, f"{family.data[1].parent}/./{family.data[1].name}"))
    assert problem.startswith(
        f"The experts {family.experts[0]} and {family.experts[1]} have the same calibration source"
    )


@pytest.mark.parametrize("method", ["slta", "featcal"])
def test_two_sources_with_the_same_samples(method: str, family: Family, tmp_path: Path) -> None:
    copy = shutil.copy(family.data[1], tmp_path / "copy.jsonl")
    recipe = with_data(family, copy)
    recipe["merge_method"] = method
    assert only(recipe) == (
        f"'{copy}' of {family.experts[0]} and '{family.data[1]}' of {family.experts[1]} give the same tokens: "
        "give each expert the data of its own task."
    )


def test_calibration_as_a_list_is_the_only_problem(family: Family) -> None:
    recipe = families.recipe(family)
    recipe["models"][0]["parameters"]["calibration"] = [str(file) for file in family.data]
    assert only(recipe).endswith("must be one value for the whole merge, not a list or a filter.")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, "does not exist"),
        ("data.xml", "x", "has an unknown extension"),
        ("empty.jsonl", "", "has no records"),
        ("blank.jsonl", '{"text": " "}\n', "has no usable record: all 1 are empty"),
        ("broken.jsonl", '{"text": \n', "Line 1 of calibration file"),
        ("latin.txt", b"caf\xe9", "is not UTF-8 text"),
        ("shape.jsonl", '{"q": 1, "a": 2}', "has no known shape: its fields are q, a."),
        ("mixed.jsonl", '{"text": "x"}\n{"q": 1}\n', "Record 2 of calibration source"),
    ],
)
def test_data_that_cannot_be_used(
    family: Family, tmp_path: Path, name: str, content: str | bytes | None, words: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    problem = only(with_data(family, file))
    assert words in problem and str(file) in problem


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{question}", "has no field 'question', which the template '{question}' names: its fields are text."),
        ("{text", "is no format string"),
        ("no field", "must name fields of a record"),
    ],
)
def test_a_template_that_does_not_fit(family: Family, template: str, words: str) -> None:
    assert words in only(with_data(family, family.data[0], template))


def test_conversations_need_a_chat_template(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "abc"}]}))
    assert "neither the base model's tokenizer nor the expert's has a chat template" in only(with_data(family, file))
    families.write_tokenizer(family.experts[0], CHAT)
    assert problems(with_data(family, file)) == []


def test_a_base_model_without_tokenizer_is_named_once(family: Family) -> None:
    for file in family.base.glob("tokenizer*"):
        file.unlink()
    assert only(families.recipe(family)).startswith(f"{family.base} has no usable tokenizer, which calibration needs")


def test_data_is_read_even_if_the_base_model_is_missing(family: Family, tmp_path: Path) -> None:
    recipe = with_data(family, tmp_path / "none.txt") | {"base_model": str(tmp_path / "none")}
    assert ["no such folder" in problem or "does not exist" in problem for problem in problems(recipe)] == [True, True]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf:", "names no dataset"),
        ("hf:org/data?splt=train", "cannot use 'splt=train'"),
        ("hf:./nowhere", "there is no folder './nowhere'"),
    ],
)
def test_a_dataset_is_checked_for_its_spelling(family: Family, source: str, words: str) -> None:
    assert words in only(with_data(family, source))
    assert "is no format string" in only(with_data(family, "hf:org/data", "{question"))


@pytest.mark.parametrize("source", ["hf:org/data", "hf:org/data?config=main&split=train[:5]"])
def test_a_dataset_on_the_hub_is_not_asked_for(family: Family, source: str) -> None:
    assert problems(with_data(family, source)) == []


def test_samples_longer_than_the_table_of_positions(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("gpt2")
    (tmp_path / "long.txt").write_text("a" * 200)
    problem = only(with_data(family, tmp_path / "long.txt"))
    assert "has samples of 202 tokens" in problem and problem.endswith("128 positions: set 'max_tokens: 128' or less.")
    assert problems(with_data(family, tmp_path / "long.txt", max_tokens=128)) == []


def test_rotary_positions_have_no_end(family: Family, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("a" * 200)
    assert problems(with_data(family, tmp_path / "long.txt")) == []


def test_a_tokenizer_with_more_tokens_than_embeddings(family: Family, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(family.base)
    tokenizer.add_tokens([f"<{number}>" for number in range(families.VOCABULARY)])
    tokenizer.save_pretrained(family.base)
    (tmp_path / "task.txt").write_text("a<60>")
    problem = only(with_data(family, tmp_path / "task.txt"))
    assert problem.startswith(f"The tokenizer of {family.base} gives the token id")
    assert "has only 64 embeddings" in problem


def test_the_data_is_looked_at_without_a_word_in_the_log(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = look(families.recipe(family, samples=30), running=False)
    assert not caplog.records
    assert found.notes == [
        f"Calibration source '{file}' has 6 usable records, 'samples' asks for 30." for file in family.data
    ]


# Statistics


def measured(family: Family, file: Path, level: str = "layer") -> Path:
    """A statistics file of the family, written by a merge."""
    families.merge(families.recipe(family, level=level, statistics=str(file)), file.parent / "merged")
    return file


def test_statistics_stand_for_calibration(family: Family, tmp_path: Path) -> None:
    file = measured(family, tmp_path / "stats.safetensors")
    recipe = families.recipe(family, calibration=False, level="layer", statistics=str(file))
    assert problems(recipe) == []
    recipe["parameters"]["level"] = "attn_mlp"
    assert only(recipe).startswith(f"{file} holds layer but not 'level: attn_mlp'")
    file.unlink()
    assert len(problems(recipe)) == len(family.experts)
    assert all("has no 'calibration'" in problem for problem in problems(recipe))


def test_statistics_that_cannot_be_read(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "stats.safetensors"
    file.write_text("nothing")
    assert only(families.recipe(family, statistics=str(file))).startswith(f"{file} is truncated or no safetensors file")
    assert "There is no statistics file" in only(families.recipe(family, statistics=str(tmp_path)))


@pytest.mark.parametrize(
    ("source", "words"),
    [("hf:org", "write hf:ORG/REPO/FILE"), ("hf:org/repo/file.safetensors", "the Hub cannot be reached")],
)
def test_published_statistics(family: Family, source: str, words: str) -> None:
    assert words in only(families.recipe(family, calibration=False, statistics=source))


def test_statistics_may_be_written_into_a_new_folder_but_not_into_a_file(family: Family, tmp_path: Path) -> None:
    assert problems(families.recipe(family, statistics=str(tmp_path / "new" / "stats.safetensors"))) == []
    (tmp_path / "file").write_text("")
    problem = only(families.recipe(family, statistics=str(tmp_path / "file" / "stats.safetensors")))
    assert f"{tmp_path}/file is no folder to write to" in problem


# Space


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with 50 GB free."""
    usage = shutil.disk_usage("/")._replace(free=50 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)


@pytest.mark.usefixtures("disk")
def test_a_disk_that_is_too_small_for_the_output(family: Family, tmp_path: Path) -> None:
    grow(family.base, 100 * 10**9)
    recipe = families.recipe(family, experts=[0], dtype="float32")
    assert problems(recipe) == []
    assert only(recipe, out_path=tmp_path / "a" / "b").startswith(f"The disk with {tmp_path}/a/b has ")
    assert "too little for the merged model (about" in only(recipe, out_path=tmp_path)
    assert problems(recipe, out_path=tmp_path, merging=False) == []


@pytest.mark.usefixtures("disk")
def test_output_and_merged_adapters_share_a_disk(family: Family, adapter: Path, tmp_path: Path) -> None:
    grow(family.base, 40 * 10**9)
    recipe = adapted(family, adapter) | {"out_dtype": "float32"}
    cache = {"lora_merge_cache": str(tmp_path / "cache")}
    (problem,) = [
        problem for problem in problems(recipe, options=cache, out_path=tmp_path / "out") if "disk" in problem
    ]
    assert "the merged model" in problem and f"the merged adapter {family.base}+{adapter}" in problem
    halved = problems(
        recipe | {"out_dtype": "bfloat16"},
        options=cache | {"lora_merge_dtype": "bfloat16"},
        out_path=tmp_path / "out",
    )
    assert not any("disk" in problem for problem in halved)


# What is worth knowing


def test_half_precision_is_advised_against(make_family: MakeFamily) -> None:
    family = make_family(dtype=torch.bfloat16)
    recipe = families.recipe(family, samples=6)
    assert look(recipe).notes == []
    for dtype in ("bfloat16", None):
        (note,) = look(recipe | {"dtype": dtype}).notes
        assert "with 'dtype: float32' and 'out_dtype: bfloat16'" in note
    assert look(recipe | {"dtype": None}, merging=False).notes == []


def test_a_feature_merge_rounds_once_in_any_type(make_family: MakeFamily) -> None:
    recipe = families.recipe(make_family(dtype=torch.bfloat16), "featcal", samples=6)
    notes = [look(recipe | {"dtype": dtype}).notes for dtype in ("float32", "bfloat16")]
    assert notes[0] == notes[1]


def test_an_expert_that_computes_something_else_from_the_same_weights(make_family: MakeFamily) -> None:
    family = make_family()
    recipe = families.recipe(family, samples=6)
    edit_config(family.experts[1], max_position_embeddings=4096, use_cache=False, eos_token_id=0, attention_dropout=0.5)
    assert look(recipe).notes == []
    edit_config(family.experts[1], rope_parameters={"rope_type": "default", "rope_theta": 7e5}, rms_norm_eps=1e-3)
    (note,) = look(recipe).notes
    assert note.startswith(f"The configuration of the expert {family.experts[1]} differs from that of the base model")
    assert (
        "in rms_norm_eps, rope_parameters: the merged model gets the base model's, and the expert is measured" in note
    )
    (note,) = look(families.recipe(family, "sftm", calibration=False)).notes
    assert note.endswith("the merged model gets the base model's.")


def test_what_hardly_takes_space_is_not_worth_a_word(family: Family, tmp_path: Path) -> None:
    left = tmp_path / "featcal-0123" / "state.json"
    left.parent.mkdir()
    left.write_text("{}")
    recipe = families.recipe(family, "featcal", samples=6, scratch=str(tmp_path))
    assert len(look(recipe).notes) == 1
    left.write_bytes(bytes(1_000_000))
    assert "holds 1.0 MB of merges that did not finish" in look(recipe).notes[-1]


def test_relative_paths_that_look_like_names_on_the_hub(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = families.recipe(family, samples=6) | {"base_model": "models/base"}
    (note,) = look(recipe).notes
    assert "write ./models/base, or merge with --no-write-model-card" in note
    assert look(recipe, options={"write_model_card": False}).notes == []
    assert look(recipe | {"base_model": "./models/base"}).notes == []


EXAMINE = """
import json, sys
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from mergekit_slta.methods import SltaMethod
from mergekit_slta.preflight import examine
found = examine(MergeConfiguration.model_validate(json.loads(sys.argv[1])), MergeOptions(), SltaMethod.spec)
print(json.dumps([found.problems, found.notes]))
"""


def test_models_on_the_hub_are_examined_without_a_download(family: Family, tmp_path: Path) -> None:
    recipe = families.recipe(family, experts=[0, 1], samples=6)
    recipe["base_model"] = "org/base"
    for entry, name in zip(recipe["models"], ("pickled", "other"), strict=True):
        entry["model"] = f"org/{name}"
    organization = tmp_path / "hub" / "org"
    shutil.copytree(family.base, organization / "base")
    shutil.copytree(family.experts[0], organization / "pickled")
    save_random(families.config_of("llama", num_hidden_layers=4), organization / "other")
    weights = organization / "pickled" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    with serve(tmp_path / "hub", tmp_path / "cache") as hub:
        found, notes = json.loads(hub.run(EXAMINE, json.dumps(recipe)).splitlines()[-1])
    (problem,) = found
    assert "The expert org/other has num_hidden_layers 4 instead of 3" in problem
    assert notes == ["The weights of org/pickled are pickled on the Hub: whether they fit shows after their download."]
    assert not {"model.safetensors", "pytorch_model.bin"} & set(hub.fetched)


def test_a_base_model_without_tokenizer_to_copy(family: Family) -> None:
    for file in family.base.glob("tokenizer*"):
        file.unlink()
    recipe = families.recipe(family, "sftm", calibration=False)
    assert problems(recipe) == []
    (note,) = look(recipe).notes
    assert note.startswith(f"{family.base} has no tokenizer, so the merged model gets none")
    assert look(recipe, options={"copy_tokenizer": False}).notes == []


# Feature merges


def feature_recipe(family: Family, **parameters: Any) -> dict[str, Any]:
    return families.recipe(family, "featcal", **{"samples": 6} | parameters)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "opt", "lfm2"])
def test_a_feature_merge_is_sound(architecture: str, make_family: MakeFamily, tmp_path: Path) -> None:
    assert problems(feature_recipe(make_family(architecture)), out_path=tmp_path / "out") == []


def test_a_feature_merge_of_what_is_no_decoder(family: Family, tmp_path: Path) -> None:
    recipe = feature_recipe(family, experts=[0]) | {"base_model": str(t5(tmp_path / "base"))}
    recipe["models"][0]["model"] = str(t5(tmp_path / "expert"))
    assert "T5ForConditionalGeneration is an encoder-decoder" in only(recipe, merging=False)


def test_a_feature_merge_needs_calibration_data(family: Family) -> None:
    recipe = feature_recipe(family, experts=[0, 1])
    del recipe["models"][1]["parameters"]
    problem = only(recipe)
    assert problem.startswith(f"The expert {family.experts[1]} has no 'calibration'")
    assert "statistics" not in problem  # which this method does not read


def test_a_feature_merge_of_two_experts_with_the_same_source(family: Family) -> None:
    recipe = feature_recipe(family, experts=[0, 1])
    recipe["models"][1]["parameters"]["calibration"] = str(family.data[0])
    assert only(recipe).startswith(
        f"The experts {family.experts[0]} and {family.experts[1]} have the same calibration source"
    )


def test_wrong_values_of_a_feature_merge(family: Family) -> None:
    found = problems(feature_recipe(family, teacher=1.5, anchor="foo", ridge=-1, head="perhaps"))
    assert [problem.split("'")[1] for problem in found] == ["teacher", "anchor", "ridge", "head"]


def other_vocabulary(family: Family, tmp_path: Path, **parameters: Any) -> list[str]:
    """What is wrong with an expert of a larger vocabulary that mergekit is to align."""
    recipe = feature_recipe(family, experts=[0, 1], **parameters) | {"tokenizer": {"source": "base"}}
    recipe["models"][1]["model"] = str(larger_vocabulary(tmp_path / "other"))
    return problems(recipe)


def test_a_head_of_another_vocabulary_cannot_be_solved(family: Family, tmp_path: Path) -> None:
    found = other_vocabulary(family, tmp_path)
    assert found[0] == (
        f"The expert {tmp_path}/other has a vocabulary of 66 tokens and the base model one of 64: set 'head: false'."
    )


def test_embeddings_of_another_vocabulary_cannot_be_averaged(family: Family, tmp_path: Path) -> None:
    for head in (True, False):
        found = other_vocabulary(family, tmp_path, head=head, anchor="average")
        assert "and the base model one of 64: choose another 'anchor'." in found[0]


def test_another_vocabulary_is_no_problem_without_the_head(family: Family, tmp_path: Path) -> None:
    assert other_vocabulary(family, tmp_path, head=False) == []


def test_a_tied_head_may_have_another_vocabulary(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("gemma", experts=2)
    recipe = feature_recipe(family) | {"tokenizer": {"source": "base"}}
    larger = families.config_of("gemma", vocab_size=families.VOCABULARY + 2)
    recipe["models"][1]["model"] = str(save_random(larger, tmp_path / "other"))
    assert problems(recipe) == []


@pytest.mark.parametrize("source", ["base", "union"])
def test_a_head_that_mergekit_gives_other_rows_cannot_be_solved(source: str, family: Family, tmp_path: Path) -> None:
    """It has a row for each token of the new tokenizer, without those that pad the models' own to a round number."""
    recipe = feature_recipe(family) | {"tokenizer": {"source": source}}
    assert "'head: false'" in only(recipe)
    recipe["parameters"]["head"] = False
    assert problems(recipe) == []
    methods.register()
    methods.watch_planner()
    merged = load_file(next(families.merge(recipe, tmp_path / "out").glob("*.safetensors")))
    assert merged["lm_head.weight"].shape == merged["model.embed_tokens.weight"].shape


def test_a_head_may_be_solved_if_the_base_models_tokenizer_changes_no_row(make_family: MakeFamily) -> None:
    tokens = len(transformers.AutoTokenizer.from_pretrained(make_family().base))
    recipe = feature_recipe(make_family(families.config_of("llama", vocab_size=tokens)))
    base: dict[str, Any] = {"source": "base"}
    assert problems(recipe | {"tokenizer_source": "base"}) == problems(recipe | {"tokenizer": base}) == []
    assert "'head: false'" in only(recipe | {"tokenizer_source": "union"})
    assert "'head: false'" in only(recipe | {"tokenizer": base | {"pad_to_multiple_of": 64}})


def test_what_unfinished_merges_left_is_said(family: Family, tmp_path: Path) -> None:
    left = tmp_path / "scratch" / "featcal-0123" / "layer-0000.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(2 * 10**6))
    notes = look(feature_recipe(family, scratch=str(tmp_path / "scratch"))).notes
    assert notes[1].startswith(f"{tmp_path}/scratch holds 2.0 MB of merges that did not finish")


def test_a_report_needs_a_folder(family: Family, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for recipe in (feature_recipe, families.recipe):
        assert f"'report: {tmp_path}/file'" in only(recipe(family, samples=6, report=str(tmp_path / "file")))


@pytest.mark.parametrize("head", [True, False])
def test_an_expert_with_other_ids_cannot_run_on_the_base_models(head: bool, family: Family) -> None:
    """Its own stream would read the base model's token ids; mergekit aligns its tensors, not its samples."""
    file = family.experts[0] / "tokenizer.json"
    content = json.loads(file.read_text())
    tokens = content["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    file.write_text(json.dumps(content))
    found = problems(feature_recipe(family, head=head) | {"tokenizer": {"source": "base"}})
    assert any("has other ids than that of the base model" in problem for problem in found)


def test_an_expert_needs_embeddings_for_the_base_models_ids(family: Family, tmp_path: Path) -> None:
    recipe = feature_recipe(family, experts=[0, 1], head=False) | {"tokenizer": {"source": "base"}}
    recipe["models"][1]["model"] = str(save_random(families.config_of("llama", vocab_size=12), tmp_path / "other"))
    assert f"{tmp_path}/other" in only(recipe)


def test_an_slta_anchor_needs_layers_with_branches(make_family: MakeFamily) -> None:
    family = make_family("opt")
    problem = only(feature_recipe(family, anchor="slta"))
    assert "does not split into an attention and an MLP branch" in problem
    assert "'anchor'" in problem and "'level" not in problem  # which this method does not have
    for anchor in ("base", "average"):
        assert problems(feature_recipe(family, anchor=anchor)) == []


@pytest.fixture
def large_needs(disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feature merges take much memory and disk space, on a disk that has 50 GB free."""
    monkeypatch.setattr(preflight_module, "needs", lambda *arguments: Needs(memory=12 * 10**9, disk=34 * 10**9))


@pytest.mark.usefixtures("large_needs")
def test_what_a_feature_merge_takes_is_said(family: Family, tmp_path: Path) -> None:
    default = Path(os.environ["XDG_CACHE_HOME"]) / "mergekit-slta"
    for folder, parameters in ((default, {}), (tmp_path / "scratch", {"scratch": str(tmp_path / "scratch")})):
        (note,) = look(feature_recipe(family, **parameters)).notes
        assert note == (
            f"'featcal' takes about 12.0 GB of memory while it solves, and 34.0 GB on the disk with {folder} until the "
            "output is written."
        )
        assert not folder.exists()
    assert look(feature_recipe(family), merging=False).notes == []


@pytest.mark.usefixtures("large_needs")
def test_a_disk_that_is_too_small_for_the_layers(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = feature_recipe(family, scratch=str(tmp_path / "scratch"))
    assert problems(recipe) == []
    monkeypatch.setattr(preflight_module, "needs", lambda *arguments: Needs(memory=0, disk=60 * 10**9))
    assert only(recipe) == (
        f"The disk with {tmp_path}/scratch has 50.0 GB free, too little for the layers as they are solved "
        "(about 60.0 GB): make room or choose another."
    )


@pytest.mark.usefixtures("large_needs")
def test_the_layers_and_the_output_share_a_disk(family: Family, tmp_path: Path) -> None:
    grow(family.base, 20 * 10**9)
    recipe = feature_recipe(family, experts=[0], scratch=str(tmp_path / "scratch"))
    problem = only(recipe, out_path=tmp_path / "out")
    assert "the merged model (about 20.0 GB) and the layers as they are solved (about 34.0 GB)" in problem
    assert problems(recipe) == []


def test_layers_may_be_solved_into_a_new_folder_but_not_into_a_file(family: Family, tmp_path: Path) -> None:
    assert problems(feature_recipe(family, scratch=str(tmp_path / "new" / "scratch"))) == []
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file" in only(feature_recipe(family, scratch=str(tmp_path / "file")))
    assert f"{tmp_path}/file" in only(feature_recipe(family, scratch=str(tmp_path / "file" / "scratch")))


def test_mergekit_yaml_refuses_a_feature_merge_before_it_solves(family: Family, tmp_path: Path) -> None:
    methods.register()
    methods.watch_planner()
    recipe = feature_recipe(family, teacher=1.5)
    del recipe["models"][0]["parameters"]["calibration"]
    file = families.write_recipe(tmp_path / "recipe.yml", recipe)
    done = CliRunner().invoke(mergekit_yaml, [str(file), str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert "'teacher' in the recipe's parameters should be less than or equal to 1" in done.output
    assert "has no 'calibration'" in done.output
    assert not (tmp_path / "out").exists()
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).iterdir())


# All at once, and through mergekit's own command


def broken_recipe(family: Family, tmp_path: Path) -> dict[str, Any]:
    """A recipe that mergekit itself starts to plan, with five problems."""
    recipe = families.recipe(family, sampels=3, ridge=-1)
    recipe["models"][0]["parameters"]["calibration"] = str(tmp_path / "none.jsonl")
    del recipe["models"][1]["parameters"]["calibration"]
    edit_tensors(family.experts[2], lambda tensors: tensors.pop("model.norm.weight"))
    return recipe


def test_all_problems_at_once(family: Family, tmp_path: Path) -> None:
    recipe = broken_recipe(family, tmp_path)
    config = MergeConfiguration.model_validate(recipe)
    found = preflight(config, MergeOptions(), SltaMethod.spec)
    assert len(found) == 5
    for words in ("'sampels'", "'ridge'", "none.jsonl", "has no 'calibration'", "lacks model.norm.weight"):
        assert sum(words in problem for problem in found) == 1


def test_mergekit_yaml_says_it_all_and_writes_nothing(family: Family, tmp_path: Path) -> None:
    recipe = families.write_recipe(tmp_path / "recipe.yml", broken_recipe(family, tmp_path))
    code = (
        "from mergekit_slta import methods; methods.register(); methods.watch_planner();"
        "from mergekit.scripts.run_yaml import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe), str(tmp_path / "out"), "--quiet"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    said = done.stderr[done.stderr.index("Error: ") :].splitlines()
    assert len(said) == 5
    assert not (tmp_path / "out").exists()
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).iterdir())


def take_base(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    del recipe["base_model"]
    return "The recipe has no base_model"


def take_experts(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    recipe["models"] = [{"model": recipe["base_model"]}]
    return "The recipe has no expert"


def take_calibration(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    del recipe["models"][0]["parameters"]["calibration"]
    return "has no 'calibration'"


def share_source(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    recipe["models"][0]["parameters"]["calibration"] = str(family.data[1])
    return "have the same calibration source"


def list_sources(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    recipe["models"][0]["parameters"]["calibration"] = [str(file) for file in family.data]
    return "must be one value for the whole merge"


def empty_source(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    family.data[0].write_text("")
    return "has no records"


def shapeless_record(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    family.data[0].write_text('{"q": "a", "a": "b"}\n')
    return "its fields are q, a."


def misspell(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    recipe["parameters"]["levl"] = "layer"
    return "did you mean 'level'?"


def deeper_expert(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    recipe["models"][0]["model"] = str(save_random(families.config_of("llama", num_hidden_layers=4), tmp_path / "x"))
    return "num_hidden_layers 4 instead of 3"


def larger_expert(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    recipe["models"][0]["model"] = str(larger_vocabulary(tmp_path / "x"))
    return "has a vocabulary of 66 tokens"


def two_slices(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    models = [{"model": recipe["base_model"]}, *recipe.pop("models")]
    recipe["slices"] = [{"sources": [model | {"layer_range": part} for model in models]} for part in ([0, 1], [1, 3])]
    return "merges whole models, not 2 slices"


def encoder_decoder(recipe: dict[str, Any], family: Family, tmp_path: Path) -> str:
    recipe["base_model"] = str(t5(tmp_path / "t5"))
    recipe["models"] = [{"model": str(t5(tmp_path / "t5x")), "parameters": {"calibration": str(family.data[0])}}]
    return "is an encoder-decoder, which calibration does not cover: use 'merge_method: sftm' instead."


@pytest.mark.parametrize(
    "spoil",
    [
        take_base, take_experts, take_calibration, share_source, list_sources, empty_source, shapeless_record, misspell,
        deeper_expert, larger_expert, two_slices, encoder_decoder,
    ],
)  # fmt: skip
def test_mergekit_yaml_refuses_in_one_sentence(
    spoil: Callable[[dict[str, Any], Family, Path], str], family: Family, tmp_path: Path
) -> None:
    methods.register()
    methods.watch_planner()
    recipe = families.recipe(family)
    words = spoil(recipe, family, tmp_path)
    file = families.write_recipe(tmp_path / "recipe.yml", recipe)
    done = CliRunner().invoke(mergekit_yaml, [str(file), str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    (said,) = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    assert words in said
    assert not (tmp_path / "out").exists()
