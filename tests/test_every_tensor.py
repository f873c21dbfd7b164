"""Every tensor of this year's checkpoints: merged by all methods, as the base model stores it, and loaded again.

Checkpoints hold heads for multi-token prediction, which transformers does not know, and the experts of a mixture one
by one or as one tensor.
"""

import functools
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import families
from support.adapters import write_adapter
from support.architecture_scan import small_configs
from support.copies import edit_tensors, edited
from support.examining import edit_config, look, only, problems
from support.families import Family
from support.merging import State, by_reference, fuse_experts, load, merged, solved, stored, weighted, wrong_tensors
from support.slow import slow_but
from transformers import PretrainedConfig, Qwen3VLMoeConfig

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.maps import Role
from mergekit_slta.models.layout import meta_model
from mergekit_slta.slta.statistics import Statistics

METHODS = ("slta", "featcal", "actmat", "sftm")
# Model type -> its class, where it is no entry of ``families.MULTIMODAL``.
TYPES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "jamba": "JambaForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "inkling2_text": "Inkling2ForCausalLM",
}
MORE = ("qwen3_5", "qwen3_5_moe")
QUICK = ("qwen3_5", "deepseek_v3", "afmoe")


def prediction_head(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a head for multi-token prediction, as Qwen3.5 and DeepSeek V3 store it."""
    if config.model_type.startswith("qwen"):
        return {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), "mtp.layers.0.mlp.up_proj.weight": (48, 32)}
    extra = f"model.layers.{config.num_hidden_layers}."
    return {
        f"{extra}embed_tokens.weight": (64, 32),
        f"{extra}enorm.weight": (32,),
        f"{extra}mlp.experts.0.up_proj.weight": (16, 32),
        f"{extra}mlp.experts.1.up_proj.weight": (16, 32),
        f"{extra}shared_head.head.weight": (64, 32),
    }


def add_prediction_head(family: Family) -> None:
    shapes, generator = prediction_head(family.config), torch.Generator().manual_seed(1)

    def add(tensors: State) -> None:
        tensors |= {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    for folder in family.folders:
        edit_tensors(folder, add)


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """A family with prediction heads, made once: not to be changed."""

    @functools.cache
    def make(name: str) -> Family:
        config = name if name in MORE else next(small_configs(name, TYPES[name]))
        made = families.make_family(tmp_path_factory.mktemp(name), config, records=2, longest=12)
        add_prediction_head(made)
        return made

    return make


def layer_of(name: str) -> int | None:
    """The number of the decoder layer in a stored tensor's name."""
    match = re.search(r"^(?!mtp|model\.visual).*layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def expected(states: list[State], method: str, statistics: Path) -> Callable[[str], torch.Tensor]:
    """Each tensor of a merge that solves nothing, as it should be."""
    if method != "slta":
        return functools.partial(by_reference, states, method)
    solution = Statistics.load(statistics).solve("layer")
    alpha = {name: own.alpha for name, own in solution.submodules.items()}
    none = torch.zeros(len(states) - 1)

    def tensor(name: str) -> torch.Tensor:
        return weighted(states, alpha.get(f"layer.{layer_of(name)}", none), name)

    return tensor


@pytest.mark.parametrize("name", slow_but(QUICK, [*TYPES, *MORE]))
@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_is_merged_as_the_base_model_stores_it(
    name: str, method: str, family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    family, statistics = family_of(name), tmp_path / "statistics.safetensors"
    settings: dict[str, Any] = {"slta": {"level": "layer", "statistics": str(statistics)}, "featcal": {"ridge": 0.1}}
    out = merged(family, method, tmp_path / "out", **settings.get(method, {}))
    loaded = [load(folder) for folder in (*family.folders, out)]
    said = [{kind: sorted(names) for kind, names in info.items()} for _, info in loaded]
    assert said[-1] == said[0]
    *states, state = [own for own, _ in loaded]
    *stores, store = [stored(folder) for folder in (*family.folders, out)]
    assert store.keys() == stores[0].keys()
    if method == "featcal":
        assert wrong_tensors(state, solved(family, tmp_path / "solved", states), states[0]) == []
        head = {own: store[own] for own in prediction_head(family.config) if own in store}
        assert wrong_tensors(head, stores[0].__getitem__, head) == []
    elif name == "inkling2_text":  # which stores its layers under names that do not tell their numbers
        assert wrong_tensors(state, expected(states, method, statistics), states[0]) == []
    else:
        assert wrong_tensors(store, expected(stores, method, statistics), stores[0]) == []


def bare(tensors: State) -> None:
    """Name tensors as the model without its head does."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def test_a_checkpoint_of_the_bare_body_is_that_of_the_model(tmp_path: Path) -> None:
    """An expert's, all experts', and the base model's too."""
    family = families.make_family(tmp_path, "gpt2", records=2)
    expected = load(merged(family, "slta", tmp_path / "out"))[0]
    for folder in reversed(family.folders):
        edit_tensors(folder, bare)
        found = load(merged(family, "slta", tmp_path / f"out-{folder.name}"))[0]
        assert wrong_tensors(found, expected.__getitem__, expected) == []


@pytest.mark.parametrize(("method", "fuse_base"), [("slta", False), ("actmat", True)])
def test_experts_may_store_a_mixture_otherwise_than_the_base_model(
    method: str, fuse_base: bool, tmp_path: Path
) -> None:
    family = families.make_family(tmp_path, "mixtral", experts=1, records=2)
    base, one = (Path(shutil.copytree(folder, tmp_path / f"fused-{folder.name}")) for folder in family.folders)
    for folder in (base, one):
        fuse_experts(folder)
    alike = replace(family, base=base, experts=(one,)) if fuse_base else family
    mixed = replace(family, base=base) if fuse_base else replace(family, experts=(one,))
    more = {"level": "linear"} if method == "slta" else {}
    wanted = stored(merged(alike, method, tmp_path / "alike", **more))
    written = stored(merged(mixed, method, tmp_path / "mixed", **more))
    assert wrong_tensors(written, wanted.__getitem__, stored(mixed.base)) == []


def test_what_mergekits_own_definitions_do_not_fit_is_merged(tmp_path: Path) -> None:
    """They leave the biases of a Llama out."""
    config = families.config_of("llama", attention_bias=True, mlp_bias=True)
    family = families.make_family(tmp_path, config, experts=1, records=2)
    assert problems(families.recipe(family)) == []
    written = stored(merged(family, "slta", tmp_path / "out", level="model"))
    assert written.keys() == stored(family.base).keys()
    assert not any(load(tmp_path / "out")[1].values())


def test_a_plain_recipe_says_what_mergekit_alone_leaves_out(family_of: Callable[[str], Family], tmp_path: Path) -> None:
    for name, count in (("qwen3_5", 3), ("deepseek_v3", 5)):
        family, file = family_of(name), tmp_path / f"{name}.safetensors"
        merged(family, "slta", tmp_path / name, level="layer", statistics=str(file))
        paths = {folder.name: str(folder) for folder in family.folders}
        Statistics.load(file).solve("layer").save_recipe(tmp_path / "plain.yml", models=paths)
        content = yaml.safe_load((tmp_path / "plain.yml").read_text())
        lost = stored(family.base).keys() - stored(families.merge(content, tmp_path / f"{name}-plain")).keys()
        lost -= {key for key in lost if ".experts." in key and layer_of(key) != families.LAYERS + 1}
        assert len(prediction_head(family.config)) == count and prediction_head(family.config).keys() <= lost
        assert "heads for multi-token prediction" in (tmp_path / "plain.yml").read_text()


def one_by_hand(folder: Path, edit: Callable[[State], object], config: Any = "llama") -> Family:
    """A family whose checkpoints are all edited in the same way."""
    made = families.make_family(folder, config, experts=1, records=2)
    for own in made.folders:
        edit_tensors(own, edit)
    return made


def test_a_head_that_is_stored_beside_its_tied_embedding_is_written_too(tmp_path: Path) -> None:
    """Even if the two differ: transformers then runs them as two. Where the base model has one, they must not."""
    config, head = families.config_of("llama", tie_word_embeddings=True), "lm_head.weight"
    family = one_by_hand(tmp_path, lambda own: own.update({head: own["model.embed_tokens.weight"] + 1}), config)
    states = [stored(own) for own in family.folders]
    written = stored(merged(family, "actmat", tmp_path / "out"))
    assert wrong_tensors(written, functools.partial(weighted, states, torch.ones(1)), states[0]) == []
    edit_tensors(family.base, lambda own: own.pop(head))
    with pytest.raises(SltaError, match="^model.embed_tokens.weight and lm_head.weight differ in the expert /"):
        merged(family, "actmat", tmp_path / "refused")
    edit_tensors(family.experts[0], lambda own: own.update({head: own["model.embed_tokens.weight"].clone()}))
    assert head not in stored(merged(family, "actmat", tmp_path / "tied"))


def test_a_name_that_is_nearly_the_models_stands_for_no_tensor_that_has_its_own(tmp_path: Path) -> None:
    near, name = "layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"
    family = one_by_hand(tmp_path, lambda own: own.update({near: torch.zeros_like(own[name])}))
    written, expert = stored(merged(family, "actmat", tmp_path / "out")), stored(family.experts[0])
    assert written.keys() == expert.keys() and not written[near].any()
    assert wrong_tensors({name: written[name]}, expert.__getitem__, [name]) == []


def test_integers_stay_integers(tmp_path: Path) -> None:
    numbers = torch.arange(1000, 1010)
    family = one_by_hand(tmp_path, lambda own: own.update({"table.ids": numbers}))
    written = stored(merged(family, "actmat", tmp_path / "out", out_dtype="bfloat16"))
    assert torch.equal(written["table.ids"], numbers) and written["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_what_is_stored_wide_is_written_unrounded(tensor: str, tmp_path: Path) -> None:
    family = families.make_family(tmp_path, families.config_of("llama"), experts=2, dtype=torch.bfloat16)
    for folder in family.folders:
        edit_tensors(folder, lambda own: own.update({tensor: own[tensor].float() * 1.0001}))
    wide, narrow = (
        stored(merged(family, "featcal", tmp_path / name, out_dtype=name)) for name in ("float32", "bfloat16")
    )
    assert torch.equal(wide[tensor], narrow[tensor]) and narrow["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("method", ["slta", "actmat"])
def test_experts_that_are_stored_turned_are_merged_by_the_same_weights(method: str, tmp_path: Path) -> None:
    """transformers tells by the shapes alone how a Qwen3-VL mixture stores its experts."""
    settings = {"level": "linear"} if method == "slta" else {}
    family, turned = (
        families.make_family(tmp_path / name, qwen3_vl_moe(), experts=2, records=2, longest=10) for name in ("1", "2")
    )
    for folder in turned.folders:
        edit_tensors(folder, turn_experts)
    wanted, written = (stored(merged(own, method, own.base.parent / "out", **settings)) for own in (family, turned))
    turn_experts(written)
    assert wrong_tensors(written, wanted.__getitem__, stored(family.base)) == []
    with pytest.raises(SltaError, match="gate_up_proj.* turned, unlike .*: load both with transformers, save them"):
        merged(replace(turned, base=family.base), method, tmp_path / "out")
    for own in (family, turned):  # one of many experts is in memory at a time
        (base, *_), model = families.checkpoints(own.folders), meta_model(own.config)
        assert base.model.layout(model).in_parts("model.language_model.layers.0.mlp.experts.gate_up_proj")
    if method == "actmat":
        names = [name for name in wanted if ".experts." in name]
        by_hand = functools.partial(by_reference, [stored(own) for own in family.folders], "actmat", role=Role.LINEAR)
        assert names and wrong_tensors({name: wanted[name] for name in names}, by_hand, names) == []


def qwen3_vl_moe() -> PretrainedConfig:
    config = families.config_of("qwen3_vl")
    text = config.text_config.to_dict() | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    text |= {"model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1, "mlp_only_layers": []}
    vision = config.vision_config.to_dict() | {"model_type": "qwen3_vl_moe_vision"}
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision)


def turn_experts(tensors: State) -> None:
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        tensors[name] = tensors[name].mT.contiguous()


def test_what_merging_an_adapter_loses_is_said(family_of: Callable[[str], Family], tmp_path: Path) -> None:
    family = family_of("qwen3_5")
    recipe = families.recipe(family, "sftm", calibration=False)
    adapter = write_adapter(family.base, tmp_path / "adapter")
    recipe["models"][0]["model"] += f"+{adapter}"
    options = {"lora_merge_cache": str(tmp_path / "cache")}
    other, note = look(recipe, options=options).notes
    assert "was trained on" in other
    assert all(words in note for words in (*prediction_head(family.config), "as if it had those of the base model"))
    recipe["base_model"] += f"+{adapter}"
    notes = look(recipe, options=options).notes
    assert any("will be left out: merging its adapter loses them" in note for note in notes)


def test_a_prediction_head_that_an_expert_lacks_is_the_base_models(
    family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    family = family_of("qwen3_5")
    head = prediction_head(family.config)
    without = edited(family.experts[1], tmp_path / "without", lambda own: [own.pop(key) for key in head])
    trained = replace(family, experts=(family.experts[0], without))
    recipe = families.recipe(trained, "actmat", calibration=False)
    (note,) = look(recipe).notes
    assert note.startswith(f"mtp.fc.weight, mtp.layers.0.mlp.up_proj.weight, mtp.norm.weight, which {without} lacks, ")
    assert note.endswith(f"lacks, will be merged as if it had those of the base model {family.base}.")
    written, states = stored(merged(trained, "actmat", tmp_path / "out")), [stored(own) for own in family.folders]
    name = "mtp.norm.weight"
    wanted = functools.partial(weighted, [*states[:2], states[0]], torch.full((2,), 0.5))
    assert wrong_tensors({name: written[name]}, wanted, [name]) == []
    recipe["base_model"] = str(without)
    (note,) = look(recipe).notes
    assert note.startswith("mtp.fc.weight, mtp.layers.0.mlp.up_proj.weight, mtp.norm.weight of ")
    assert note.endswith(f"will be left out, because the base model {without} has none.")


def test_an_expert_of_a_mixture_that_a_checkpoint_lacks_is_said(
    family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    family = family_of("deepseek_v3")
    name = next(key for key in stored(family.base) if ".experts.3.down_proj" in key)
    for index in (0, 1):
        folders = list(family.folders)
        folders[index] = edited(folders[index], tmp_path / f"broken{index}", lambda tensors: tensors.pop(name))
        broken = replace(family, base=folders[0], experts=tuple(folders[1:]))
        said = problems(families.recipe(broken, "sftm", calibration=False))
        assert any(f"{folders[index]}: the checkpoint lacks " in own and "down_proj" in own for own in said), said


def test_rows_that_an_expert_lacks_cannot_follow_another_tokenizer(
    family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    family = family_of("deepseek_v3")
    name = "model.layers.4.embed_tokens.weight"
    without = edited(family.experts[1], tmp_path / "without", lambda own: own.pop(name))
    trained = replace(family, experts=(family.experts[0], without))
    recipe = families.recipe(trained, "actmat", calibration=False)
    assert problems(recipe) == []
    said = only(recipe | {"tokenizer_source": "base"})
    assert said.startswith(f"{without} lacks {name} of the base model")


def test_a_model_that_transformers_cannot_build_has_its_rows_by_mergekits_definition(tmp_path: Path) -> None:
    family = families.make_family(tmp_path, "llama", experts=1)
    for own in family.folders:
        edit_config(own, pad_token_id=1000)
    recipe = families.recipe(family, "actmat", calibration=False)
    recipe["tokenizer"] = {"source": "base", "pad_to_multiple_of": 128}
    assert len(stored(families.merge(recipe, tmp_path / "out"))["lm_head.weight"]) == 128
