"""Publishing, to a stand-in for the Hub: what is uploaded, what never is, what is refused."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from support import families
from support.command import run
from support.copies import edit_tensors
from support.examining import edit_config
from support.families import Family
from support.hub import Hub, serve

from mergekit_slta.errors import SltaError
from mergekit_slta.output.publish import publish
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.tables import as_size

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def merged(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("publish")
    content = families.recipe(llama, samples=3)
    return families.merge(content, folder / "out", write_model_card=True, copy_tokenizer=True)


@pytest.fixture
def out(merged: Path, tmp_path: Path) -> Path:
    """A merge with all kinds of files beside it, which a test may change."""
    folder = Path(shutil.copytree(merged, tmp_path / "merged"))
    (folder / "calibration.jsonl").write_text("{}")
    (folder / "stats.safetensors.partial").mkdir()
    (folder / "stats.safetensors.partial" / "layer-0.safetensors").write_bytes(b"1")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "config.json").write_text("{}")
    (folder / "old.safetensors").write_bytes(b"1")
    (folder / f".model.safetensors.host.{os.getpid()}").write_bytes(b"1")
    return folder


STRANGERS = {
    "calibration.jsonl",
    "old.safetensors",
    ".cache/config.json",
    "stats.safetensors.partial/layer-0.safetensors",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with serve(tmp_path / "repositories", tmp_path / "hub") as found:
        yield found


def test_the_model_is_uploaded_and_nothing_else(out: Path, llama: Family, hub: Hub, tmp_path: Path) -> None:
    said = run("publish", out, "org/model", "--private", "--quiet").stdout
    assert "Published as" in said and "org/model" in said
    (made,) = hub.created
    assert (made["name"], made["organization"], made["visibility"]) == ("model", "org", "private")
    assert set(hub.committed) == {
        *("README.md", "mergekit_config.yml", "config.json", "generation_config.json"),
        *(WEIGHTS, "tokenizer.json", "tokenizer_config.json"),
        *("mergekit-slta/statistics.safetensors", "mergekit-slta/merge.json"),
    }
    assert hub.committed[WEIGHTS] == (out / WEIGHTS).read_bytes()
    for stranger in STRANGERS:
        assert stranger in said  # among what is not uploaded
    private = str(llama.base.parent).encode()
    for name, content in hub.committed.items():
        assert private not in content, name
    path = tmp_path / "statistics.safetensors"
    path.write_bytes(hub.committed["mergekit-slta/statistics.safetensors"])
    assert Statistics.load(path).info.models == ("expert0", "expert1", "expert2")
    for stale in ("chat_template.jinja", "model-00001-of-00002.safetensors"):
        file = hub.root / "org/model" / stale
        file.write_text("of an earlier model")
        assert f"has {stale}, which programs" in run("publish", out, "org/model", code=1).stderr
        file.unlink()
    (hub.root / "org/model/original").mkdir()
    (hub.root / "org/model/original/tokenizer.model").write_text("which no program looks for")
    assert "Published as" in run("publish", out, "org/model", "--quiet").stdout
    published: Any = ModelCard(hub.committed["README.md"].decode())
    assert "Feature change kept" in published.text and "slta" in published.data.tags
    assert hub.committed["README.md"] == (out / "README.md").read_bytes()


def test_a_dry_run_writes_and_uploads_nothing(out: Path) -> None:
    """There is no Hub to be asked: a request would fail."""
    (out / "README.md").unlink()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    said = run("publish", out, "org/model", "--dry-run", "--quiet").output
    assert "Would be uploaded to org/model" in said and "README.md" in said
    assert f"config.json ({as_size((out / 'config.json').stat().st_size)})" in said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_only_files_of_the_model_are_uploaded(out: Path) -> None:
    edit_config(out, auto_map={"AutoModel": "modeling_own.Own", "AutoTokenizer": [None, "org/x--tokens.Own"]})
    (out / "modeling_own.py").write_text("from .parts import Part\n")
    kept = {"modeling_own.py", "parts.py", "tokens.py", "LICENSE", "NOTICE.txt"}
    strangers = {"modeling_stray.py", "processing.py", "LICENSE-KEY.pem", "NOTICE.db", "chat_template.orig"}
    for name in (kept | strangers) - {"modeling_own.py"}:
        (out / name).write_text("")
    found = publish(out, "org/model", dry_run=True, quiet=True)
    assert kept <= dict(found.files).keys() and strangers <= set(found.left_out)


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "model.safetensors"])
def test_a_link_that_leads_out_of_the_folder_is_refused(name: str, out: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((out / name).read_bytes() if (out / name).exists() else b"secret")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(elsewhere)
    with pytest.raises(SltaError, match=rf"{name} is a link to a file outside"):
        publish(out, "org/model", dry_run=True, quiet=True)


def test_the_organization_decides_on_the_visibility(out: Path, hub: Hub) -> None:
    assert "Visibility: private;" in str(publish(out, "org/model", private=True, dry_run=True, quiet=True))
    assert "by the organization's setting" in str(publish(out, "org/model", dry_run=True, quiet=True))
    run("publish", out, "org/model", "--quiet")
    assert not {"private", "visibility"} & hub.created[0].keys()


def test_a_recipe_is_published_as_it_was_understood(out: Path, hub: Hub) -> None:
    """mergekit alone writes the recipe into its card word for word, with its comments."""
    recipe, card = out / "mergekit_config.yml", out / "README.md"
    commented = f"# my token is hf_secret\n{recipe.read_text()}"
    recipe.write_text(commented)
    card.write_text(f"---\ntags: []\n---\n# out\n\n```yaml\n{commented}\n```\n")
    run("publish", out, "org/model", "--quiet")
    assert b"hf_secret" not in hub.committed["README.md"] + hub.committed["mergekit_config.yml"]
    assert b"merge_method: slta" in hub.committed["README.md"]


def test_statistics_of_an_earlier_merge_stay_here(out: Path) -> None:
    """mergekit without this package writes into the same folder, and leaves them there."""
    recipe = out / "mergekit_config.yml"
    recipe.write_text(recipe.read_text().replace("merge_method: slta", "merge_method: linear"))
    found = publish(out, "org/model", dry_run=True, quiet=True)
    assert "mergekit-slta/statistics.safetensors" in found.left_out


def test_a_chat_template_that_is_missing_comes_with_the_tokenizer_that_knows_its_tokens(out: Path) -> None:
    (note,) = (note for note in publish(out, "org/model", dry_run=True, quiet=True).notes if "chat template" in note)
    assert "merge again with 'tokenizer: {source: EXPERT}'" in note and "chat_template.jinja" not in note
    (out / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    found = publish(out, "org/model", dry_run=True, quiet=True)
    assert not [note for note in found.notes if "chat template" in note]
    assert "chat_template.jinja" in dict(found.files)


def test_what_a_user_wrote_is_published(out: Path) -> None:
    path = out / "README.md"
    path.write_text(path.read_text().replace("tags:", "license: mit\ntags:", 1) + "\nMy own words.\n")
    found = publish(out, "org/model", dry_run=True, quiet=True)
    text = path.read_text()
    assert dict(found.files)["README.md"] == len(text.encode())  # which is up to date already
    (local,) = (note for note in found.notes if "folders of this machine" in note)
    assert local.endswith("write their Hub ids in mergekit_config.yml and in the card, README.md.")


def test_the_hubs_refusal_is_a_sentence(out: Path, hub: Hub) -> None:
    hub.refusal = 403
    assert "Error: org/model cannot be published:" in run("publish", out, "org/model", "--quiet", code=1).stderr


NORM = "model.norm.weight"


def pickle(out: Path) -> None:
    torch.save(load_file(out / WEIGHTS), out / "pytorch_model.bin")
    (out / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: edit_tensors(out, lambda own: own[NORM][:1].fill_(torch.nan)), rf"are not finite: {NORM} \(1\)"),
        (lambda out: edit_tensors(out, lambda own: own.pop(NORM)), f"lacks {NORM}"),
        (lambda out: os.truncate(out / WEIGHTS, (out / WEIGHTS).stat().st_size - 5), "truncated"),
        (pickle, r"pickled weights \(pytorch_model.bin\): .* without --no-safe-serialization"),
        (lambda out: (out / WEIGHTS).unlink(), "has no tensors"),
        (lambda out: (out / "config.json").write_text("{"), "config.json"),
        (lambda out: [file.unlink() for file in out.glob("tokenizer*")], "The tokenizer in .* cannot be read"),
        (lambda out: (out / "mergekit_config.yml").unlink(), "no mergekit_config.yml"),
        (lambda out: (out / "README.md").write_bytes("Für alle".encode("latin-1")), "README.md .*UTF-8"),
        (lambda out: (out / "README.md").write_text("---\ntags: [x\n---\n"), "README.md .*YAML"),
    ],
)
def test_a_model_that_is_not_complete_is_refused(out: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(out)
    with pytest.raises(SltaError, match=said):
        publish(out, "org/model", dry_run=True, quiet=True)


def test_a_name_that_is_no_repository_is_refused(out: Path) -> None:
    with pytest.raises(SltaError, match="write ORG/NAME"):
        publish(out, "org/name/more", dry_run=True)
