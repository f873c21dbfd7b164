"""A merge's result belongs to its plan, and a plan reads its models anew."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mergekit.card
import pytest
import torch
from click.testing import CliRunner
from conftest import MakeFamily
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.scripts import run_yaml
from safetensors.torch import load_file, save_file
from support import families
from support.adapters import write_adapter
from support.families import Family

from mergekit_slta.errors import SltaError
from mergekit_slta.files import cache_folder
from mergekit_slta.host import patches
from mergekit_slta.host.merge import merge
from mergekit_slta.recipe.recipe import Recipe

State = dict[str, torch.Tensor]


def plan(content: dict[str, Any], out: Path, **given: Any) -> list[Task[Any]]:
    config, options = MergeConfiguration.model_validate(content), MergeOptions(quiet=True, **given)
    LoaderCache().setup(options)
    planner = MergePlanner(config, get_architecture_info(config, options), options, config.base_model.config())
    return planner.plan_to_disk(str(out))


def execute(tasks: list[Task[Any]]) -> None:
    for _ in Executor(tasks).run(quiet=True):
        pass


def weights(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def alone(content: dict[str, Any], out: Path, **options: Any) -> State:
    """A merge by a process that has merged nothing before, without what earlier ones have measured."""
    LoaderCache.loaders.clear()
    shutil.rmtree(cache_folder(), ignore_errors=True)
    return weights(families.merge(content, out, **options))


@pytest.mark.parametrize("method", ["slta", "featcal"])
def test_two_plans_made_before_either_is_executed_give_their_own_merges(
    method: str, llama: Family, tmp_path: Path
) -> None:
    contents = [families.recipe(llama, method, ridge=ridge, samples=4) for ridge in (0.0, 5.0)]
    plans = [plan(content, tmp_path / f"planned{index}") for index, content in enumerate(contents)]
    for tasks in plans:
        execute(tasks)
    found = [weights(tmp_path / f"planned{index}") for index in range(2)]
    for index, content in enumerate(contents):
        assert_equal(found[index], alone(content, tmp_path / f"alone{index}"))
    assert not torch.equal(*(state["model.layers.0.mlp.up_proj.weight"] for state in found))


def test_a_plan_of_another_method_in_between_changes_nothing(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, samples=4)
    tasks = plan(content, tmp_path / "planned")
    execute(plan(families.recipe(llama, "actmat", calibration=False), tmp_path / "other"))
    execute(tasks)
    assert_equal(weights(tmp_path / "planned"), alone(content, tmp_path / "alone"))


def test_threads_that_merge_two_recipes_and_stock_methods_in_turn(llama: Family, tmp_path: Path) -> None:
    stock = families.recipe(llama, "task_arithmetic", calibration=False, per_expert={"weight": 0.5})
    own = [families.recipe(llama, samples=2, ridge=0.0), families.recipe(llama, samples=2, ridge=5.0)]
    expected = [alone(content, tmp_path / f"alone{index}") for index, content in enumerate([*own, stock])]
    failed: list[str] = []

    def work(number: int) -> None:
        for turn in range(2):
            for index, content in ((number, own[number]), (2, stock)):
                out = tmp_path / f"{number}-{turn}-{index}"
                try:
                    merge(Recipe.from_config(MergeConfiguration.model_validate(content)), out, quiet=True)
                    assert_equal(weights(out), expected[index])
                except BaseException as error:
                    failed.append(f"{number}, {turn}, {index}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def changed(folder: Path) -> State:
    """An expert's tensors after another training."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


def same_name(folder: Path) -> None:
    """Save the expert again as other programs do: to a new file that gets the old one's name."""
    save_file(changed(folder), folder / "new.safetensors", {"format": "pt"})
    (folder / "new.safetensors").replace(folder / "model.safetensors")


def shards(folder: Path) -> None:
    model: Any = families.load_model(folder)
    model.float().load_state_dict(changed(folder), strict=False)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("replace", [same_name, shards])
@pytest.mark.parametrize("method", ["slta", "actmat", "task_arithmetic"])
def test_an_expert_that_is_replaced_between_two_merges_is_read_anew(
    method: str, replace: Callable[[Path], None], make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family()
    per_expert = {"weight": 0.5} if method == "task_arithmetic" else None
    content = families.recipe(family, method, calibration=method == "slta", per_expert=per_expert)
    before = weights(families.merge(content, tmp_path / "before"))
    replace(family.experts[0])
    found = weights(families.merge(content, tmp_path / "after"))
    assert_equal(found, alone(content, tmp_path / "alone"))
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])


def test_an_adapter_that_is_trained_again_between_two_merges_is_merged_anew(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", experts=[0, 1], calibration=False)
    adapter = write_adapter(llama.base, tmp_path / "adapter", seed=0)
    content["models"][0]["model"] = f"{llama.base}+{adapter}"
    options = {"lora_merge_cache": str(tmp_path / "merged")}
    before = weights(families.merge(content, tmp_path / "before", **options))
    shutil.rmtree(adapter)
    write_adapter(llama.base, adapter, seed=1)
    found = weights(families.merge(content, tmp_path / "after", **options))
    assert_equal(found, alone(content, tmp_path / "alone", **options))
    assert any(not torch.equal(found[name], tensor) for name, tensor in before.items())


def test_a_plan_merges_adapters_by_its_own_options(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", experts=[0, 1], calibration=False)
    content["models"][0]["model"] = f"{llama.base}+{write_adapter(llama.base, tmp_path / 'adapter', seed=0)}"
    options = {"lora_merge_cache": str(tmp_path / "merged")}
    expected = alone(content, tmp_path / "alone", **options)
    tasks = plan(content, tmp_path / "first", **options)
    plan(content, tmp_path / "second", **options, lora_merge_dtype="bfloat16")
    execute(tasks)
    assert_equal(weights(tmp_path / "first"), expected)


@pytest.mark.parametrize("method", ["actmat", "task_arithmetic"])
def test_a_folder_named_without_a_dot_is_a_folder(
    method: str, llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network, mergekit would fail when it writes the card, after the weights and before the tokenizer."""

    def refuse(*arguments: Any, **more: Any) -> bool:
        raise OSError("no network")

    monkeypatch.setattr(mergekit.card.huggingface_hub, "repo_exists", refuse)
    monkeypatch.chdir(tmp_path)
    names = ["base", "models/math", "code", "models/law"]
    for source, name in zip(llama.folders, names, strict=True):
        shutil.copytree(source, name)
    families.write_tokenizer(Path("base"))
    per_expert = {"weight": 0.5} if method == "task_arithmetic" else None
    content = families.recipe(llama, method, calibration=False, per_expert=per_expert)
    content["base_model"] = names[0]
    for entry, name in zip(content["models"], names[1:], strict=True):
        entry["model"] = name
    recipe = families.write_recipe(Path("recipe.yml"), content)
    done = CliRunner().invoke(run_yaml.main, [str(recipe), "out", "--quiet"])
    assert done.exit_code == 0, done.output
    assert Path("out/tokenizer.json").is_file()
    assert "huggingface.co/models" not in Path("out/README.md").read_text()


@pytest.mark.parametrize("method", ["actmat", "task_arithmetic"])
def test_unfinished_files_of_others_in_the_output_folder_are_kept(method: str, llama: Family, tmp_path: Path) -> None:
    per_expert = {"weight": 0.5} if method == "task_arithmetic" else None
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".tmpab12cd").write_text("somebody's")
    families.merge(families.recipe(llama, method, calibration=False, per_expert=per_expert), tmp_path / "out")
    assert (tmp_path / "out" / ".tmpab12cd").is_file()


def test_models_are_listed_in_the_recipes_order() -> None:
    names = [f"org/expert{number}" for number in range(12)]
    content = {"merge_method": "linear", "base_model": "org/base", "models": [{"model": name} for name in names]}
    config = MergeConfiguration.model_validate(content)
    assert list(map(str, config.referenced_models())) == ["org/base", *names]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_multi_gpu_without_a_gpu_is_refused_before_calibration(llama: Family, tmp_path: Path) -> None:
    with pytest.raises(SltaError, match="leave --device, --cuda and --multi-gpu out"):
        families.merge(families.recipe(llama), tmp_path / "out", multi_gpu=True)
    assert not cache_folder().exists()


def test_a_changed_mergekit_is_refused_in_a_sentence() -> None:
    with pytest.raises(ImportError, match=r"has changed MergePlanner\.plan_to_disk, .* in mergekit 0\.1\.5: install"):
        patches.replaces(MergePlanner, "plan_to_disk", "self", "folder")
    with pytest.raises(ImportError, match=r"has changed MergePlanner\.plan_to_tape"):
        patches.replaces(MergePlanner, "plan_to_tape", "self")
