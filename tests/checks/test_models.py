"""Models that cannot be used or do not fit each other, and the layers that are run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import MakeFamily
from support import families
from support.copies import edit_tensors
from support.examining import edit_config, look, only, problems, save_random, t5, with_expert
from support.families import Family


def test_models_that_are_not_there(family: Family) -> None:
    recipe = with_expert(family, family.base / "none")
    assert (
        only(recipe)
        == f"{family.base}/none cannot be used: there is no such folder, and it is not the name of a repository."
    )
    recipe["base_model"] = "org/none"
    assert [problem.split(" cannot")[0] for problem in problems(recipe)] == ["org/none", f"{family.base}/none"]


def test_an_expert_of_another_architecture(family: Family, tmp_path: Path) -> None:
    other = save_random(families.config_of("mistral"), tmp_path / "other")
    problem = only(with_expert(family, other))
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


def test_an_expert_of_another_size(family: Family, tmp_path: Path) -> None:
    config = families.config_of("llama", hidden_size=16, num_attention_heads=2)
    other = save_random(config, tmp_path / "other")
    assert only(with_expert(family, other)) == (
        f"The expert {other} has hidden_size 16 instead of 32, num_attention_heads 2 instead of 4: "
        f"it was not fine-tuned from the base model {family.base}, leave it out."
    )


def test_a_tensor_of_another_shape(family: Family) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
            tensors[name] = tensors[name][:-1]

    edit_tensors(family.experts[0], shorten)
    problem = only(families.recipe(family))
    assert problem.startswith(f"The tensor model.layers.1.mlp.up_proj.weight of the expert {family.experts[0]} has")
    assert "the shape [47, 32] instead of [48, 32]: " in problem


@pytest.mark.parametrize("tied_base", [True, False])
def test_a_tied_head_beside_an_untied_one(make_family: MakeFamily, tmp_path: Path, tied_base: bool) -> None:
    family = make_family(families.config_of("llama", tie_word_embeddings=tied_base), experts=1)
    other = save_random(families.config_of("llama", tie_word_embeddings=not tied_base), tmp_path / "other")
    recipe = families.recipe(family)
    assert problems(recipe) == []
    recipe["models"][0]["model"] = str(other)
    tied, untied = (family.base, other) if tied_base else (other, family.base)
    assert only(recipe).startswith(f"{tied} ties its output head to its embedding and {untied} does not")


# What mergekit asks for


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


def before_every_name(prefix: str) -> Callable[[str], str]:
    return lambda name: prefix + name


def in_each_layer(name: str) -> str:
    return re.sub(r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", name)


WRAPPED: dict[str, tuple[Callable[[str], str], str]] = {
    "torch.compile": (before_every_name("_orig_mod."), "_orig_mod."),
    "DDP": (before_every_name("module."), "module."),
    "peft": (before_every_name("base_model.model."), "base_model.model."),
    "both": (before_every_name("module._orig_mod."), "module., _orig_mod."),
    "layers": (in_each_layer, "_checkpoint_wrapped_module."),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("of_base", [False, True])
def test_names_of_a_wrapped_model(wrapper: str, of_base: bool, family: Family) -> None:
    rename, said = WRAPPED[wrapper]
    folder = family.base if of_base else family.experts[1]

    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    edit_tensors(folder, wrap)
    assert only(families.recipe(family)) == (
        f"The names of the tensors of {folder} contain {said}, because the model was saved from inside torch.compile, "
        "FSDP, DDP or peft: save the module that these wrap, or take that out of the names."
    )
    edit_tensors(folder, lambda tensors: tensors.pop(rename("model.norm.weight")))
    assert "lacks" in problems(families.recipe(family))[0]


# What is worth knowing


def test_an_expert_that_computes_something_else_from_the_same_weights(make_family: MakeFamily) -> None:
    family = make_family()
    recipe = families.recipe(family, samples=6)
    edit_config(family.experts[1], use_cache=False, eos_token_id=0, attention_dropout=0.5)
    assert look(recipe).notes == []
    edit_config(family.experts[1], rope_parameters={"rope_type": "default", "rope_theta": 7e5}, rms_norm_eps=1e-3)
    (note,) = look(recipe).notes
    assert note.startswith(f"The configuration of the expert {family.experts[1]} differs from that of the base model")
    assert "in rms_norm_eps, rope_parameters: the merged model gets the base model's configuration, and" in note
    (note,) = look(families.recipe(family, "sftm", calibration=False)).notes
    assert note.endswith("the merged model gets the base model's configuration.")


# The layers that are run


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
        (clip, "CLIPModel is not a decoder-only language model"),
    ],
)
def test_models_that_are_no_decoder(family: Family, tmp_path: Path, save: Callable[[Path], Path], words: str) -> None:
    recipe = with_expert(family, save(tmp_path / "expert")) | {"base_model": str(save(tmp_path / "base"))}
    del recipe["models"][0]
    assert only(recipe, merging=False) == (
        f"{words}, which calibration does not cover: use 'merge_method: actmat' instead."
    )


def test_layers_that_cannot_be_run_one_at_a_time(make_family: MakeFamily) -> None:
    small: dict[str, Any] = {"vocab_size": families.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3}
    family = make_family(transformers.RwkvConfig(**small, rescale_every=2), experts=2)
    problem = only(families.recipe(family))
    assert problem.startswith("RwkvForCausalLM changes the hidden states between its decoder layers")
    assert problem.endswith("it can be merged with 'merge_method: actmat'.")
