"""``merge_method: actmat`` in stock mergekit, against the dense formula tensor by tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mergekit.merge_methods import merge_state_dicts
from support.actmat_reference import merged_tensor
from support.small_models import config_of, load, recipe, role_by_hand, run, write_family

from mergekit_slta.host.registry import METHODS
from mergekit_slta.models.roles import Role, tensor_roles
from mergekit_slta.models.skeleton import meta_model


@pytest.mark.parametrize("key", ["llama", "t5", "clip_vision", "mixtral", "gpt2"])
def test_stock_mergekit_solves_every_tensor(key: str, tmp_path: Path) -> None:
    family = write_family(key, tmp_path)
    result = run(recipe("actmat", family, {}, {"weight": 1.5}, ridge=0.2, scale=0.9), tmp_path)
    assert result.exit_code == 0, result.output
    merged = load(key, tmp_path / "merged")
    base, *experts = [load(key, folder) for folder in (family[0], *family[1])]
    assert set(merged) == set(base)
    for name, tensor in merged.items():
        if tensor.is_floating_point():
            inputs = [expert[name] for expert in experts]
            wanted = merged_tensor(role_by_hand(name), base[name], inputs, 0.2, 0.9, [1.0, 1.5])
            torch.testing.assert_close(tensor.double(), wanted, rtol=0, atol=1e-6, msg=name)


def test_an_expert_alone_comes_back_whole(tmp_path: Path) -> None:
    base, experts = write_family("llama", tmp_path, experts=1)
    assert run(recipe("actmat", (base, experts)), tmp_path).exit_code == 0
    torch.testing.assert_close(load("llama", tmp_path / "merged"), load("llama", experts[0]), rtol=0, atol=2e-7)


def test_an_expert_that_did_not_touch_a_tensor_counts_in_the_mean_alone(tmp_path: Path) -> None:
    base, (expert, other) = write_family("llama", tmp_path)
    transformers.LlamaForCausalLM.from_pretrained(base).save_pretrained(other)
    assert run(recipe("actmat", (base, [expert, other])), tmp_path).exit_code == 0
    merged, start, changed = (load("llama", folder) for folder in (tmp_path / "merged", base, expert))
    for name, tensor in merged.items():
        wanted = merged_tensor(role_by_hand(name), start[name], [changed[name], start[name]])
        torch.testing.assert_close(tensor.double(), wanted, rtol=0, atol=1e-6, msg=name)
    norm = "model.norm.weight"
    torch.testing.assert_close(merged[norm], (start[norm] + changed[norm]) / 2)


def test_filters_and_gradients_set_parameters_by_tensor(tmp_path: Path) -> None:
    base, experts = write_family("llama", tmp_path)
    by_tensor = [{"filter": "mlp", "value": 0}, {"value": [1.0, 0.5]}]
    result = run(recipe("actmat", (base, experts), *[{"weight": by_tensor}] * 2, ridge=[0.1, 0.3]), tmp_path)
    assert result.exit_code == 0, result.output
    merged, start = load("llama", tmp_path / "merged"), load("llama", base)
    for name, tensor in merged.items():
        assert torch.equal(tensor, start[name]) == ("mlp" in name), name


@pytest.mark.parametrize(
    ("own", "shared", "words"),
    [
        ({"weight": -1}, {}, r"'weight'.*greater than or equal to 0, not -1"),
        ({"weight": float("inf")}, {}, r"'weight'.*finite number, not inf"),
        ({}, {"ridge": -0.1}, r"'ridge'.*greater than or equal to 0, not -0\.1"),
        ({}, {"scale": "much"}, r"'scale'.*not 'much'"),
        ({}, {"rigde": 0.1}, r"'rigde'.*did you mean 'ridge'"),
    ],
)
def test_refuses_a_wrong_value_in_one_sentence(
    own: dict[str, Any], shared: dict[str, Any], words: str, tmp_path: Path
) -> None:
    result = run(recipe("actmat", write_family("llama", tmp_path), own, **shared), tmp_path)
    assert result.exit_code == 1
    assert re.search(words, result.output), result.output
    assert not list((tmp_path / "merged").glob("*.safetensors"))


def test_tensors_without_a_model_merge_by_their_shapes() -> None:
    torch.manual_seed(0)
    shapes = {"scale": (), "norm": (5,), "map": (6, 4), "row": (1, 7), "kernel": (4, 3, 2, 2)}
    models = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(3)]
    merged = merge_state_dicts(models, METHODS["actmat"], base=0)
    for name, tensor in merged.items():
        role = Role.LINEAR if tensor.ndim == 2 else Role.OTHER
        base, *experts = [model[name] for model in models]
        torch.testing.assert_close(tensor.double(), merged_tensor(role, base, experts), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "transposed"),
    [
        (config_of("mixtral"), False),
        (config_of("gpt2"), True),
        (transformers.GptOssConfig(architectures=["GptOssForCausalLM"], num_hidden_layers=1), True),
        (transformers.Llama4TextConfig(architectures=["Llama4ForCausalLM"], num_hidden_layers=1), True),
        (transformers.Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=1), False),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_knows_which_dimension_is_the_input(config: transformers.PretrainedConfig, transposed: bool) -> None:
    """Only over the inputs do the rows of a task matrix have a covariance."""
    roles = tensor_roles(meta_model(config))
    maps = [
        role
        for name, role in roles.items()
        if re.search(r"experts\.(gate_up|down)_proj$|c_(attn|fc|proj)\.weight", name)
    ]
    assert maps and set(maps) == {Role.TRANSPOSED if transposed else Role.LINEAR}


def test_the_defaults_are_the_documented_ones() -> None:
    assert {parameter.name: parameter.default for parameter in METHODS["actmat"].spec.parameters} == {
        "ridge": 0.1,
        "scale": 1.0,
        "weight": 1.0,
    }
