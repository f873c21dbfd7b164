"""The manifest of a merge: the same for every method, public, and compared by the next merge into the folder."""

import hashlib
import platform
import shutil
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mergekit.common import ModelReference
from support import families
from support.copies import edit_tensors
from support.families import Family

from mergekit_slta.data import sources
from mergekit_slta.errors import SltaError
from mergekit_slta.files import MANIFEST_OF_MERGE, STATISTICS_OF_MERGE, commit, write
from mergekit_slta.models.fingerprint import fingerprint_of
from mergekit_slta.output import manifest
from mergekit_slta.output.manifest import Manifest, read
from mergekit_slta.recipe.settings import SETTINGS


def content_of(family: Family, method: str, **changes: Any) -> dict[str, Any]:
    runs = SETTINGS[method].runs_models
    return families.recipe(family, method, **({"samples": 4} if runs else {"calibration": False}) | changes)


def merged(content: dict[str, Any], out: Path, **options: Any) -> Manifest:
    found = read(families.merge(content, out, **options))
    assert found is not None
    return found


def sha256(rows: list[list[int]]) -> str:
    return hashlib.sha256(b"".join(array("q", [len(row), *row]).tobytes() for row in rows)).hexdigest()


@pytest.mark.parametrize("method", SETTINGS)
def test_it_says_what_was_merged_and_how_and_names_no_path(method: str, llama: Family, tmp_path: Path) -> None:
    out, kind = tmp_path / "out", SETTINGS[method]
    found = merged(content_of(llama, method), out)
    assert found.method == method
    fields = {field.alias or name: field.default for name, field in kind.model_fields.items() if name != "report"}
    assert fields.items() <= found.settings.items() and found.settings["dtype"] == "float32"
    names = [folder.name for folder in llama.folders]
    models = [found.base_model, *found.models]
    assert [model.name for model in models] == names and len({model.sha256 for model in models}) == len(names)
    tasks = [(task.model, task.source, task.prompts, task.sha256) for task in found.tasks]
    if kind.runs_models:
        rows = zip(names[1:], llama.data, llama.token_ids(samples=4), strict=True)
        assert tasks == [(name, file.name, 4, sha256(ids)) for name, file, ids in rows]
        of_base = {"samples": 0, "weight": 0.0}
        assert [model.parameters for model in models] == [of_base, *[{"samples": 4}] * len(llama.experts)]
    else:
        assert tasks == [] and all(model.parameters["weight"] == 1.0 for model in found.models)
    assert found.versions.keys() == {"mergekit-slta", "commit", "mergekit", "python", "torch", "transformers"}
    assert found.machine == f"{platform.system()} {platform.machine()}, CPU"
    assert found.sha256 == fingerprint_of(out)
    assert "/" not in (out / MANIFEST_OF_MERGE).read_text()


def test_the_prompts_that_a_statistics_file_stands_for_are_the_measured_ones(llama: Family, tmp_path: Path) -> None:
    keep = {"samples": 3, "weight": 0.5}
    templates = {"template": "{text}"}
    first = merged(content_of(llama, "slta", experts=[0, 1], keep=keep, per_expert=templates), tmp_path / "first")
    named = str(tmp_path / "first" / STATISTICS_OF_MERGE)
    content = content_of(llama, "slta", experts=[1, 0], keep=keep, calibration=False, statistics=named)
    content["models"][2]["parameters"] = {"weight": 0.5}
    again = merged(content, tmp_path / "again")
    assert [(task.prompts, task.template) for task in again.tasks] == [(4, "{text}"), (4, "{text}"), (3, "")]
    assert list(again.tasks) == [first.tasks[1], first.tasks[0], first.tasks[2]]
    assert again.settings["statistics"] == "statistics.safetensors" and not {"seed", "samples"} & {*again.settings}
    assert first.base_model.parameters == keep and first.settings["statistics"] == ""


def other_weights(content: dict[str, Any], family: Family) -> None:
    edit_tensors(family.experts[2], lambda tensors: [tensor.mul_(1.1) for tensor in tensors.values()])


def copied_expert(content: dict[str, Any], family: Family) -> None:
    content["models"][0]["model"] = str(shutil.copytree(family.experts[0], family.base.parent / "new"))


def other_expert(content: dict[str, Any], family: Family) -> None:
    copied_expert(content, family)
    edit_tensors(family.base.parent / "new", lambda tensors: [tensor.mul_(1.1) for tensor in tensors.values()])


CHANGES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda content, family: None, ""),
    "prompts": (lambda content, family: families.write_records(family.data[1], task=4), "other prompts of expert1"),
    "a setting": (lambda content, family: content["parameters"].update(ridge=0.5), "ridge 0.0 instead of 0.5"),
    "an expert's parameter": (
        lambda content, family: content["models"][1]["parameters"].update(samples=3),
        "samples of expert1 4 instead of 3, other prompts of expert1",
    ),
    "prompts for the base model": (
        lambda content, family: content.update(content_of(family, "slta", keep={"samples": 3, "weight": 0.5})),
        "samples of base 0 instead of 3, weight of base 0.0 instead of 0.5",
    ),
    "weights": (other_weights, "other weights of expert2"),
    "a model in another place": (copied_expert, ""),
    "a model": (other_expert, "the model expert0, no model new"),
    "the method": (
        lambda content, family: content.update(content_of(family, "sftm")),
        "the method slta instead of sftm",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_next_merge_into_the_folder_says_what_the_earlier_one_had(
    name: str, family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody who repeats a published merge, in a folder with its manifest, learns what he has got otherwise."""
    (change, words), content, out = CHANGES[name], content_of(family, "slta"), tmp_path / "out"
    merged(content, out)
    weights = (out / "model.safetensors").read_bytes()
    change(content, family)
    capsys.readouterr()
    families.merge(content, out, quiet=False)
    said = capsys.readouterr().err.splitlines()
    notes = [line for line in said if line.startswith(f"Note: {out} ")]
    other, same = (
        f"holds another merge, which had {words}; it is replaced.",
        "already holds this merge, which is made again.",
    )
    assert notes == [f"Note: {out} {other if words else same}"]
    alike = "" if (out / "model.safetensors").read_bytes() == weights else "not "
    assert f"A sample of the weights in {out} is {alike}the same as that of the earlier merge." in said


def test_a_merge_with_filters_is_the_same_once_it_is_read_again(llama: Family, tmp_path: Path) -> None:
    filters = [{"filter": "mlp", "value": 0.3}, {"value": [0.1, 0.2]}]
    content = content_of(llama, "sftm", density=filters)
    assert manifest.differences(merged(content, tmp_path), manifest.describe(families.experiment(content))) == []


def test_a_manifest_that_cannot_be_read_is_named(llama: Family, tmp_path: Path) -> None:
    file = tmp_path / MANIFEST_OF_MERGE
    write(file, b"{}")
    with pytest.raises(SltaError, match=r"merge\.json cannot be read .*: get an undamaged copy, or delete it\."):
        read(tmp_path)
    file.unlink()
    assert read(tmp_path) is None


def test_it_has_the_commit_that_pip_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"direct_url.json": '{"vcs_info": {"vcs": "git", "commit_id": "abc"}}'}
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: SimpleNamespace(read_text=files.get))
    assert commit.__wrapped__() == "abc"
    told = []
    for record in ("one", "other"):  # from a folder, without its history
        files |= {"direct_url.json": '{"dir_info": {}, "url": "file:///home/x"}', "RECORD": record}
        told.append(commit.__wrapped__())
    assert told[0] != told[1] and all(state.startswith("clone ") for state in told)


def test_revisions_are_the_commits_of_the_caches() -> None:
    """Of the Hub's for models and adapters, of ``datasets``' for data; else what the recipe names."""
    model: Any = SimpleNamespace(folders=(Path("/hub/models--org--base/snapshots") / ("a" * 40), Path("/runs/adapter")))
    model.reference = ModelReference.parse("org/base@main+org/adapter@v1")
    assert manifest._revision(model) == f"{'a' * 40}+v1"
    model.reference = ModelReference.parse("org/base")
    assert manifest._revision(model) == "a" * 40
    cached: Any = SimpleNamespace(cache_files=[{"filename": f"/c/org___set/default/0.0.0/{'e' * 40}/set-train.arrow"}])
    assert sources._revision(cached) == "e" * 40 and sources._revision([{"text": "a"}]) == ""
