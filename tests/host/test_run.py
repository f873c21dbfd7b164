"""A merge from the check to the end: everything once, and nothing of another merge."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from conftest import MakeFamily
from mergekit import options as mergekit_options
from mergekit.io.tasks import LoaderCache
from mergekit.scripts import multimerge
from safetensors.torch import save_file
from support import command, families
from support.examining import only, swap_ids
from support.families import Family
from support.hub import serve
from support.merging import State, same_tensors, stored

from mergekit_slta.engine.ranks import joined
from mergekit_slta.errors import SltaError
from mergekit_slta.files import PARTIAL_OF_MERGE, RECIPE_OF_MERGE, STATISTICS_OF_MERGE
from mergekit_slta.host import run
from mergekit_slta.host.merge import MergeOptions, merge
from mergekit_slta.models.headers import WEIGHT_FILES, weight_map
from mergekit_slta.output.verify import verify
from mergekit_slta.recipe import experiment
from mergekit_slta.recipe.recipe import Recipe

ENTRIES = [name + index for name in WEIGHT_FILES for index in ("", ".index.json")]  # that programs look for


def alone(content: dict[str, Any], out: Path) -> State:
    """A merge by a process that has merged nothing before."""
    LoaderCache.loaders.clear()
    return stored(families.merge(content, out))


def test_mergekit_multi_runs_several_merges(llama: Family, tmp_path: Path) -> None:
    """The second merge takes the result of the first as an expert."""
    first = families.recipe(llama, experts=[0, 1], level="layer") | {"name": "first"}
    second = families.recipe(llama, experts=[2])
    own = {"calibration": str(families.write_records(tmp_path / "both.jsonl", task=3))}
    second["models"].append({"model": "first", "parameters": own})
    (tmp_path / "recipes.yml").write_text(yaml.safe_dump_all([first, second]))
    parts = tmp_path / "parts"
    families.write_tokenizer(parts / "first")
    options = ["--intermediate-dir", parts, "--out-path", tmp_path / "out", "--no-write-model-card"]
    command.run(tmp_path / "recipes.yml", *options, program=multimerge.main)
    del first["name"]
    second["models"][1]["model"] = str(parts / "first")
    assert same_tensors(stored(parts / "first"), alone(first, tmp_path / "alone"))
    assert same_tensors(stored(tmp_path / "out"), alone(second, tmp_path / "second"))


def replace(folder: Path) -> None:
    """Save an expert after another training as other programs do: to a new file that gets the old one's name."""
    generator = torch.Generator().manual_seed(7)
    tensors = {name: own + 0.05 * torch.randn(own.shape, generator=generator) for name, own in stored(folder).items()}
    save_file(tensors, folder / "new.safetensors", {"format": "pt"})
    (folder / "new.safetensors").replace(folder / "model.safetensors")


@pytest.mark.parametrize("method", ["slta", "actmat", "task_arithmetic"])
def test_an_expert_that_is_replaced_between_two_merges_is_read_anew(
    method: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family()
    per_expert = {"weight": 0.5} if method == "task_arithmetic" else None
    content = families.recipe(family, method, calibration=method == "slta", per_expert=per_expert)
    before = stored(families.merge(content, tmp_path / "before"))
    replace(family.experts[0])
    found = stored(families.merge(content, tmp_path / "after"))
    assert same_tensors(found, alone(content, tmp_path / "alone"))
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])


def test_a_merge_into_the_same_folder_hides_the_weights_of_the_one_before(llama: Family, tmp_path: Path) -> None:
    """Programs read one of a whole file and an index of several; the time of a file does not say which is new."""
    out = tmp_path / "out"
    several, whole = {"out_shard_size": 60_000}, {"safe_serialization": True}
    for method, options in (("actmat", several), ("sftm", whole), ("actmat", several), ("sftm", whole)):
        families.merge(families.recipe(llama, method, calibration=False), out, **options)
        assert len(weight_map(out)) == (2 if options is several else 1)
        (entry,) = (file for file in out.iterdir() if file.name in ENTRIES)
        os.utime(entry, (2**32, 2**32))
    recipe = families.recipe(llama, "sftm", calibration=False)
    families.merge(recipe, out, safe_serialization=False)
    assert [file.name for file in out.iterdir() if file.name in ENTRIES] == ["pytorch_model.bin"]
    shards = {f"model-0000{number}-of-00002.safetensors.earlier" for number in (1, 2)}
    whole_ones = {"model.safetensors.earlier", "model.safetensors.index.json.earlier"}
    assert {file.name for file in out.glob("*.earlier")} == shards | whole_ones


def test_the_card_of_an_earlier_merge_is_set_aside_and_one_of_a_user_stays(llama: Family, tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", families.recipe(llama, "actmat", calibration=False)
    families.merge(recipe, out, write_model_card=True)
    families.merge(recipe, out, write_model_card=False)
    assert {file.name for file in out.glob("*.earlier")} == {"README.md.earlier", "mergekit_config.yml.earlier"}
    (out / "README.md").write_text("My notes.")
    families.merge(recipe, out, write_model_card=False)
    assert (out / "README.md").read_text() == "My notes."


def test_the_token_ids_of_a_model_that_is_downloaded_are_compared_before_it_is_merged(
    make_family: MakeFamily, tmp_path: Path
) -> None:
    """The check reads its tokenizer, not its weights."""
    family, repository = make_family(experts=1), tmp_path / "hub" / "org" / "model"
    swap_ids(family.experts[0])
    shutil.copytree(family.experts[0], repository)
    content = families.recipe(family, "actmat", calibration=False)
    content["models"][0]["model"] = "org/model"
    with serve(tmp_path / "hub", tmp_path / "cache") as hub:
        assert "have different ids for 2 tokens" in only(content)
        assert not any(name.endswith(".safetensors") for name in hub.fetched)
        with pytest.raises(SltaError, match="have different ids for 2 tokens"):
            families.merge(content, tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*")]


def test_a_downloaded_model_is_merged_without_a_network(llama: Family, tmp_path: Path) -> None:
    """Without a download, the sentence says what is missing."""
    content = families.recipe(llama, "actmat", calibration=False)
    for number, (entry, folder) in enumerate(zip(content["models"], llama.experts, strict=True)):
        shutil.copytree(folder, tmp_path / "hub" / "org" / str(number))
        entry["model"] = f"org/{number}"
    with serve(tmp_path / "hub", tmp_path / "cache"):
        online = families.merge(content, tmp_path / "online")
        with mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):
            assert same_tensors(stored(online), stored(families.merge(content, tmp_path / "offline")))
            shutil.rmtree(tmp_path / "cache" / "models--org--1")
            with pytest.raises(SltaError, match="org/1 cannot be used: .* the Hub cannot be reached"):
                families.merge(content, tmp_path / "out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_multi_gpu_without_a_gpu_is_refused_before_calibration(llama: Family, tmp_path: Path) -> None:
    with pytest.raises(SltaError, match="leave --device, --cuda and --multi-gpu out"):
        families.merge(families.recipe(llama), tmp_path / "out", multi_gpu=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("slat", ", did you mean 'slta'"), ("tise", ", did you mean 'ties'"), ("merge", ": it knows actmat, .*, ties.*")],
)
def test_an_unknown_merge_method_gets_a_suggestion(name: str, hint: str, llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "linear", calibration=False) | {"merge_method": name}
    with pytest.raises(SltaError, match=f"does not know the merge_method '{name}'{hint}"):
        families.merge(content, tmp_path / "out")


def test_a_merge_by_another_method_joins_no_processes(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training script may have set these variables, and joined its processes itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    content = families.recipe(llama, "task_arithmetic", calibration=False, per_expert={"weight": 0.5})
    assert (families.merge(content, tmp_path / "out") / "model.safetensors").is_file()


def test_a_merge_by_mergekits_own_method_leaves_nothing_of_an_earlier_one(llama: Family, tmp_path: Path) -> None:
    """An unfinished merge's layers and an ``slta`` merge's statistics would be taken for the new one's."""
    out = tmp_path / "out"
    families.merge(families.recipe(llama, samples=2), out)
    (out / PARTIAL_OF_MERGE).mkdir()
    (out / PARTIAL_OF_MERGE / "run.json").write_text('{"method": "featcal"}')
    stock = families.recipe(llama, "task_arithmetic", calibration=False, per_expert={"weight": 0.5})
    (layer := out / PARTIAL_OF_MERGE / "layer-0000.safetensors").touch()
    with pytest.raises(SltaError, match=r"holds 1 finished layer of another run \(different method\): finish that run"):
        families.merge(stock, out)
    layer.unlink()
    families.merge(stock, out)
    assert not (out / "mergekit-slta").exists()


def test_statistics_that_the_recipe_names_stay_as_they_are_in_the_output_too(llama: Family, tmp_path: Path) -> None:
    out = tmp_path / "out"
    families.merge(families.recipe(llama, samples=2), out)
    before = (out / STATISTICS_OF_MERGE).read_bytes()
    named = str(out / STATISTICS_OF_MERGE)
    content = families.recipe(llama, experts=[0, 1], samples=2, statistics=named)
    families.write_recipe(families.merge(content, out) / RECIPE_OF_MERGE, content)
    assert (out / STATISTICS_OF_MERGE).read_bytes() == before
    solved = json.loads(command.run("solve", out, "--json", "-").stdout)["alpha"]  # those that were merged
    assert {len(weights) for weights in solved.values()} == {2}


def test_a_merge_on_known_statistics_that_ends_early_is_unfinished(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = families.recipe(llama, samples=2, statistics=str(tmp_path / "stats.safetensors"))
    families.merge(content, tmp_path / "first")
    monkeypatch.setattr(run, "finish_folder", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        families.merge(content, tmp_path / "out")
    with pytest.raises(SltaError, match="is not finished: run it again"):
        verify(Recipe(content), tmp_path / "out")
    unfinished = tmp_path / "out" / PARTIAL_OF_MERGE
    (unfinished / "run.json").write_text('{"method": "featcal"}')
    (unfinished / "layer-0000.safetensors").touch()
    with pytest.raises(SltaError, match=r"of another run \(different method\)"):
        families.merge(content, tmp_path / "out")


def test_statistics_that_do_not_fit_leave_a_finished_output_finished(llama: Family, tmp_path: Path) -> None:
    out, named = tmp_path / "out", str(tmp_path / "stats.safetensors")
    families.merge(families.recipe(llama, samples=2, statistics=named), out)
    with pytest.raises(SltaError, match="measured on .samples 2"):
        families.merge(families.recipe(llama, samples=3, statistics=named), out)
    assert not (out / PARTIAL_OF_MERGE).exists()


def test_a_merge_in_python_is_mergekits_own(llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    content = families.recipe(llama, samples=3, level="layer")
    recipe = Recipe(content)
    more: dict[str, Any] = {"write_threads": np.int64(1), "random_seed": torch.tensor(1), "write_model_card": False}
    assert merge(recipe, "~/ours", device=torch.device("cpu"), quiet=True, **more) == tmp_path / "ours"
    assert verify(recipe, tmp_path / "ours").problems == ()
    assert same_tensors(stored(tmp_path / "ours"), stored(families.merge(content, tmp_path / "theirs")))


def test_a_process_that_was_silent_in_a_merge_is_not_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    log = logging.getLogger("a trainer's")
    with joined("cpu"):
        assert not log.isEnabledFor(logging.WARNING)
    assert log.isEnabledFor(logging.WARNING)


def test_its_options_are_mergekits() -> None:
    theirs = set(mergekit_options.MergeOptions.model_fields) - {"num_threads", "verbosity"}
    assert set(get_type_hints(MergeOptions)) == theirs
    with pytest.raises(TypeError, match="no option devise"):
        merge("recipe.yml", "out", devise="cuda")  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["slta", "featcal"])
def test_each_file_of_prompts_is_read_once_by_the_check_and_the_merge_together(
    method: str, family: Family, tmp_path: Path
) -> None:
    with mock.patch.object(experiment, "read_records", wraps=experiment.read_records) as read:
        merge(Recipe(families.recipe(family, method, samples=2)), tmp_path / "out", quiet=True)
    assert sorted(call.args[0] for call in read.call_args_list) == sorted(map(str, family.data))
