"""Plain recipes: mergekit must give every tensor its weights, and run to the same model without this package."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mergekit.config import MergeConfiguration, evaluate_setting
from safetensors.torch import load_file
from support import families, synthetic
from support.families import Family
from support.processes import linked_packages
from support.rounding import rounding
from transformers import AutoModelForCausalLM

from mergekit_slta.errors import SltaError
from mergekit_slta.slta import plain_recipe
from mergekit_slta.slta.measure import measure, statistics_of
from mergekit_slta.slta.plain_recipe import DIGITS, PlannedTensor, planned_tensors, weight_settings
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.slta.weights import TensorWeights

# Runs merges where mergekit-slta cannot be imported: arguments are recipe, output, recipe, output ...
STOCK = """
import importlib.util, sys
assert importlib.util.find_spec("mergekit_slta") is None
from mergekit import merge_methods
assert "slta" not in [method.spec.name for method in merge_methods.registered_methods()]
from mergekit.scripts.run_yaml import main
for recipe, out in zip(sys.argv[1::2], sys.argv[2::2]):
    main([recipe, out, "--quiet", "--no-write-model-card"], standalone_mode=False)
"""


# Families with their levels: twelve layers, so that `layers.1` also names 10 and 11; four norms per layer and tied
# embeddings; a norm that feeds both branches; one layer only.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({"num_hidden_layers": 12}, ("model", "layer", "linear")),
    "gemma2": ({}, ("attn_mlp",)),
    "phi": ({}, ("attn_mlp",)),
    "gpt2": ({"n_layer": 1}, ("attn_mlp",)),
}


def merged(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Each level's model from ``merge_method: slta``, and from the plain recipe in an environment without it."""
    outputs, arguments = {}, []
    for architecture, (changes, levels) in FAMILIES.items():
        config = families.config_of(architecture, **changes)
        family = families.make_family(folder / architecture, config, experts=3, records=3)
        file = folder / architecture / "stats.safetensors"
        statistics = statistics_of(families.experiment(families.recipe(family, samples=2)), levels, file)
        for level in levels:
            experts = (2, 0) if level == "layer" else (0, 1, 2)
            content = families.recipe(family, experts=experts, calibration=False, statistics=str(file), level=level)
            ours, stock = (folder / f"{architecture}-{level}-{way}" for way in ("slta", "plain"))
            paths = {own.name: str(own) for own in (family.base, *(family.experts[index] for index in experts))}
            statistics.take(experts).solve(level).save_recipe(stock.with_suffix(".yml"), models=paths)
            outputs[f"{architecture} {level}"] = (families.merge(content, ours), stock)
            arguments += [str(stock.with_suffix(".yml")), str(stock)]
    packages = linked_packages(folder / "packages")  # everything that is installed except this one
    command = [sys.executable, "-S", "-c", STOCK, *arguments]  # -S: no site-packages, and no start-up file
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(packages)
    result = subprocess.run(command, cwd=packages, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return outputs


def test_stock_mergekit_without_this_package_runs_to_the_same_model(tmp_path: Path) -> None:
    """One test for all cases, because one process without the package merges them all."""
    models = merged(tmp_path)
    for case, (ours, plain) in models.items():
        expected, found = load_file(ours / "model.safetensors"), load_file(plain / "model.safetensors")
        assert expected.keys() == found.keys(), case
        for name, tensor in expected.items():
            assert tensor.dtype == found[name].dtype == torch.float32
            assert (found[name] - tensor).abs().max() <= rounding(2, terms=3) * tensor.abs().max(), (case, name)
    _, tied = models["gemma2 attn_mlp"]
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tied, output_loading_info=True)
    assert not loaded[1]["missing_keys"] and not loaded[1]["unexpected_keys"]


# What mergekit makes of the filters


skeleton = functools.cache(families.skeleton)


def mergekit_weight(setting: Any, tensor: PlannedTensor, layers: int) -> float:
    """The weight that mergekit takes for a tensor, planned at the depth that it plans it."""
    entry = {"model": "a", "parameters": {"weight": setting}}
    recipe = MergeConfiguration.model_validate({"merge_method": "task_arithmetic", "models": [entry]})
    assert recipe.models is not None and recipe.models[0].parameters is not None
    t = 0.0 if tensor.layer is None else tensor.layer / (layers - 1) if layers > 1 else 1.0
    return float(evaluate_setting(tensor.name, recipe.models[0].parameters["weight"], t, validate=float))


def assert_reproduced(planned: Sequence[PlannedTensor], layers: int) -> list[Any]:
    settings = weight_settings(planned)
    for tensor in planned:
        found = [mergekit_weight(setting, tensor, layers) for setting in settings]
        assert found == pytest.approx(tensor.alpha, rel=10 ** (1 - DIGITS)), tensor.name
    return settings


@pytest.mark.parametrize("level", ["attn_mlp", "linear"])
@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_mergekit_gives_every_tensor_its_weights(architecture: str, level: str) -> None:
    decoder = skeleton(architecture)
    solved = synthetic.solutions(synthetic.random_alpha(decoder, level))
    weights = TensorWeights(decoder, level, solved, families.own_layout(decoder))
    try:
        planned = planned_tensors(decoder.model.config, weights)
    except SltaError as refusal:
        assert_justified(refusal.message, weights)
        return
    assert len({tensor.name for tensor in planned}) == len(planned)
    assert {tensor.layer for tensor in planned} == {None, *range(families.LAYERS)}
    assert_reproduced(planned, families.LAYERS)


def assert_justified(refusal: str, weights: TensorWeights) -> None:
    """The tensor that a refusal names is one that the model lacks, or one that holds several linear maps."""
    (named,) = re.findall(r"(?:the tensor|the parts of) (\S+?),? ", refusal)
    if "mergekit asks for" in refusal:
        assert named not in weights.decoder.model.state_dict()
    else:
        assert "fused experts" in refusal and weights.level == "linear" and weights[named].ndim > 1


def test_tensors_that_no_pattern_tells_apart_get_their_full_names() -> None:
    """And one of layer 1 is not taken for one of layer 11, nor a norm for one whose name holds its own."""
    planned = [PlannedTensor("wte", None, (0.0,)), PlannedTensor("norm.w", None, (0.0,))]
    for layer in range(12):
        planned.append(PlannedTensor(f"h.{layer}.norm.w", layer, (layer,)))
        planned.append(PlannedTensor(f"h.{layer}.attn.norm.w", layer, (20.0 + layer,)))
        planned += [PlannedTensor(f"h.{layer}.conv.w", layer, (3.0,))] * (layer % 2)  # not in every layer
    (setting,) = assert_reproduced(planned, 12)
    names = [entry.get("filter") for entry in setting]
    assert {f"h.{layer}.norm.w" for layer in range(12)} < {*names} and names[-3:] == [".attn.", ".conv.", None]


# What the recipe says


def made_up_statistics(level: str, experts: int = 2) -> Statistics:
    """Statistics of one level of a model like the families' llama."""
    models = [f"org/expert{index}" for index in range(experts)]
    return synthetic.statistics(
        models, [level], layers=families.LAYERS, base_model="org/base", max_tokens=99, seed=7, dtype="bfloat16"
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a base model, of which only the configuration is needed."""
    families.config_of("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_a_recipe_names_models_and_types_and_what_its_weights_come_from(base: Path, tmp_path: Path) -> None:
    statistics = made_up_statistics("layer", experts=3).take([2, 0])
    for gram in statistics.grams.values():
        gram[:, 1, :] = gram[:, :, 1] = 0
    solution = statistics.solve("layer", ridge=0.25)
    models = {"org/base": str(base), "org/expert0": "./mine"}
    text = solution.save_recipe(tmp_path / "plain.yml", models=models, tokenizer_source="base").read_text()
    content = yaml.safe_load(text)
    assert content["merge_method"] == "task_arithmetic"
    assert content["base_model"] == str(base)
    assert [entry["model"] for entry in content["models"]] == ["org/expert2", "./mine"]
    assert (content["dtype"], content["out_dtype"], content["tokenizer_source"]) == ("float32", "bfloat16", "base")
    header = "\n".join(re.findall("^#.*", text, re.MULTILINE))
    assert text.startswith(header)
    for expected in (
        *("level layer", "ridge 0.25", "balance true"),
        f"the merge retains {float(solution.retained_overall[0]):.2f} of expert2's feature change",
        "of expert0's (it has none",
    ):
        assert expected in header
    assert "expert1" not in text


def test_what_was_just_measured_is_written_with_the_paths_of_its_recipe(llama: Family, tmp_path: Path) -> None:
    own = families.recipe_of(llama.base, dict(zip(llama.experts, llama.data, strict=True)), level="layer", samples=2)
    measured = measure(own, path=tmp_path / "stats.safetensors", quiet=True)
    paths = [str(llama.experts[2]), str(llama.experts[0])]
    part = measured.select(*(Path(path).name for path in paths)).first_samples(1).solve()
    content = yaml.safe_load(part.save_recipe(tmp_path / "plain.yml").read_text())
    assert (content["base_model"], [entry["model"] for entry in content["models"]]) == (str(llama.base), paths)
    content = yaml.safe_load(part.save_recipe(tmp_path / "plain.yml", models={"expert0": "org/math"}).read_text())
    assert [entry["model"] for entry in content["models"]] == [paths[0], "org/math"]
    loaded = Statistics.load(tmp_path / "stats.safetensors")  # the file has no path
    with pytest.raises(SltaError, match="The base model 'base' is neither a folder nor of the form ORG/NAME"):
        loaded.solve().save_recipe(tmp_path / "plain.yml")


def test_a_folder_is_written_as_a_path_that_is_no_hub_id(here: None) -> None:
    """mergekit looks ``models/a`` up on the Hub when the weights are written."""
    Path("models/a").mkdir(parents=True)
    solution = synthetic.statistics(["models/a", "org/b"], ["model"]).solve("model")
    content = yaml.safe_load(solution.save_recipe("plain.yml", tokenizer_source="models/a").read_text())
    assert [entry["model"] for entry in content["models"]] == ["./models/a", "org/b"]
    assert content["tokenizer_source"] == "./models/a"


def test_a_name_writes_nothing_into_a_recipe(tmp_path: Path) -> None:
    """A line break in a name would end the comment that names the expert."""
    found = synthetic.statistics(["org/a\nslices: []", "org/b"], ["model"])
    content = yaml.safe_load(found.solve("model").save_recipe(tmp_path / "plain.yml").read_text())
    assert content["merge_method"] == "task_arithmetic" and "slices" not in content


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": ("head_mlp", {}, r"'head_mlp'.*'merge_method: slta'"),
    "no base model": ("layer", {"base": "none"}, r"'none' is neither .* ORG/NAME: .*models={'org/base': 'PATH'}"),
    "no folder": ("layer", {"base": "./none/here/"}, r"here/' is neither a folder nor .*--model org/base=PATH"),
    "another base model": ("layer", {"of": "qwen2"}, r"not the base model.*LlamaForCausalLM: .*--model org/base=PATH"),
    "a shallower one": ("layer", {"num_hidden_layers": 2}, r"has 2 layers and the base model of the statistics 3: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_recipe_can_say_is_refused(name: str, tmp_path: Path) -> None:
    level, changes, words = REFUSED[name]
    changes = dict(changes)
    of, base = changes.pop("of", "llama"), changes.pop("base", str(tmp_path))
    families.config_of(of, **changes).save_pretrained(tmp_path)
    with pytest.raises(SltaError, match=words):
        made_up_statistics(level).solve(level).save_recipe(tmp_path / "plain.yml", models={"org/base": base})
    assert not (tmp_path / "plain.yml").exists()


def test_a_recipe_that_mergekit_would_read_otherwise_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_recipe, "weight_settings", lambda planned: [0.5, 0.5])
    with pytest.raises(SltaError, match="Filters cannot give"):
        made_up_statistics("layer").solve("layer").save_recipe(base / "plain.yml", models={"org/base": str(base)})
