"""A merged folder as programs read it: its files beside the weights, by transformers and as plain JSON."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from conftest import MakeFamily
from mergekit.scripts.run_yaml import main as mergekit_yaml
from support import families
from support.adapters import write_adapter
from support.command import run
from support.examining import CHATML, MARKERS, chat_model, chat_tokenizer, edit_config
from support.families import Family
from support.hub import serve

from mergekit_slta.output.companions import restore

TEMPLATES = ("chat_template.jinja", "additional_chat_templates/rag.jinja", "tekken.json")
OTHERS = ("audio_tokenizer_config.json", "preprocessor_config.json", "modeling_own.py", "helper.py")
GENERATION = "generation_config.json"


@pytest.fixture
def recipe(family: Family) -> dict[str, Any]:
    """A recipe whose base model has all kinds of files, and code of its own."""
    (family.base / "additional_chat_templates").mkdir()
    for name in (*TEMPLATES, *OTHERS):
        (family.base / name).write_text("{}")
    (family.base / "modeling_own.py").write_text("from .helper import scale\n")
    (family.base / GENERATION).write_text('{"eos_token_id": [2, 5]}')
    (family.base / "notes.json").write_text("{}")
    edit_config(family.base, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    return families.recipe(family, "sftm", experts=[0], calibration=False)


def copied(recipe: dict[str, Any], out: Path, **options: Any) -> list[str]:
    families.merge(recipe, out, **{"copy_tokenizer": True} | options)
    return [name for name in (*TEMPLATES, *OTHERS, "notes.json") if (out / name).is_file()]


def merged_by(recipe: dict[str, Any], out: Path) -> Path:
    """The output of the stock ``mergekit-yaml`` command."""
    run(families.write_recipe(out.parent / "recipe.yml", recipe), out, "--quiet", program=mergekit_yaml)
    return out


def content(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_all_that_transformers_reads_comes_along(recipe: dict[str, Any], tmp_path: Path) -> None:
    assert copied(recipe, tmp_path / "merged") == [*TEMPLATES, *OTHERS]
    assert content(tmp_path / "merged" / GENERATION)["eos_token_id"] == [2, 5]
    assert "AutoModelForCausalLM" in content(tmp_path / "merged/config.json")["auto_map"]


@pytest.mark.parametrize(
    ("changes", "options", "tokenizer"),
    [
        ({"tokenizer": {"source": "union"}}, {}, False),
        ({"chat_template": "chatml"}, {}, True),
        ({}, {"copy_tokenizer": False}, False),
    ],
    ids=str,
)
def test_what_belongs_to_another_tokenizer_stays(
    changes: dict[str, Any], options: dict[str, Any], tokenizer: bool, recipe: dict[str, Any], tmp_path: Path
) -> None:
    """A union keeps the base model's ids, so the tokens at which it stops are the same."""
    Path(recipe["base_model"], "chat_template.jinja").unlink()
    chat_model(Path(recipe["models"][0]["model"]))  # with more tokens
    assert copied(recipe | changes, tmp_path / "merged", **options)[-len(OTHERS) :] == [*OTHERS]
    assert (tmp_path / "merged" / "tekken.json").exists() == tokenizer
    assert (tmp_path / "merged" / TEMPLATES[1]).exists() == ("tokenizer" in changes)  # mergekit writes it there
    assert content(tmp_path / "merged" / GENERATION)["eos_token_id"] == [2, 5]


def test_what_cannot_be_copied_is_an_error_once_all_else_is_done(recipe: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "merged"
    (out / "helper.py").mkdir(parents=True)
    file = families.write_recipe(tmp_path / "recipe.yml", recipe)
    said = run(file, out, program=mergekit_yaml, code=1).stderr
    assert (
        said.count(f"Copy {recipe['base_model']}/helper.py to {out}/helper.py yourself") == 1
        and "To verify it: " in said
    )
    names = {*TEMPLATES, *OTHERS, "README.md", "model.safetensors"} - {"helper.py"}
    assert all((out / name).is_file() for name in names)


def test_files_that_may_not_be_written_are_replaced(recipe: dict[str, Any], tmp_path: Path) -> None:
    """mergekit copies modes too, so that a second merge into the folder could not write."""
    base, out = Path(recipe["base_model"]), tmp_path / "merged"
    names = ("tokenizer_config.json", "vocab.json", "preprocessor_config.json", GENERATION)
    for turn in ("1", "2"):
        for name in names:
            (base / name).unlink(missing_ok=True)
            (base / name).write_text(json.dumps({"turn": turn}))
            (base / name).chmod(0o444)
        inodes = {name: (out / name).stat().st_ino for name in names if turn == "2"}
        merged_by(recipe, out)
        assert {content(out / name)["turn"] for name in names} == {turn}
        assert all(file.stat().st_mode & 0o200 for file in out.iterdir())
        assert all((out / name).stat().st_ino != inode for name, inode in inodes.items())


def test_what_no_merge_has_written_is_set_aside(
    recipe: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "merged"
    out.mkdir()
    names = ("README.md", "config.json", GENERATION, "merges.txt", "model.safetensors", "preprocessor_config.json")
    for name in names:
        (out / name).write_text("a user's")
    (out / "notes.txt").write_text("stays")
    written: dict[str, Any] = {"copy_tokenizer": True, "write_model_card": True}
    for shards in ({}, {"out_shard_size": 10_000}):  # what a merge has written is replaced
        families.merge(recipe, out, **written, **shards)
        assert {file.name for file in out.glob("*.old")} == {f"{name}.old" for name in names}
        assert all((out / f"{name}.old").read_text() == "a user's" for name in names)
    assert (out / "notes.txt").read_text() == "stays"
    (said,) = (record.getMessage() for record in caplog.records if ".old" in record.getMessage())
    assert said == f"Added .old to the names of files in {out} that the merge replaces: {', '.join(sorted(names))}."
    licensed = (out / "README.md").read_text().replace("---\n", "---\nlicense: mit\n", 1)
    for number, text in ((2, "my own words"), (3, licensed)):
        (out / "README.md").write_text(text)
        families.merge(recipe, out, **written)
        assert (out / f"README.md.old{number}").read_text() == text and f"README.md (.old{number})" in caplog.text


@pytest.mark.parametrize("method", ["slta", "sftm", "linear"])
def test_others_may_read_what_the_umask_lets_them(method: str, llama: Family, tmp_path: Path) -> None:
    own: Any = {"per_expert": {"weight": 1.0}} if method == "linear" else {}
    settings: Any = {"samples": 2} if method == "slta" else {"calibration": False}
    recipe = families.recipe(llama, method, **settings, **own)
    recipe |= {"base_model": None} if method == "linear" else {}
    out = families.merge(recipe, tmp_path / "out", write_model_card=True)
    (tmp_path / "new").touch()
    wanted = (tmp_path / "new").stat().st_mode
    modes = {file.name: oct(file.stat().st_mode) for file in out.rglob("*") if file.is_file()}
    assert modes == dict.fromkeys(modes, oct(wanted))


def test_merges_of_a_tokenizer_stay(family: Family, tmp_path: Path) -> None:
    for folder in family.folders:
        tokenizer = content(folder / "tokenizer.json")
        tokenizer["model"]["vocab"]["ab"] = len(tokenizer["model"]["vocab"])
        tokenizer["model"]["merges"] = ["a b"]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    chat_model(family.experts[0])  # with more tokens
    recipe = families.recipe(family, "sftm", calibration=False) | {"tokenizer_source": "union"}
    out = merged_by(recipe, tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(out).tokenize("cab") == ["c", "ab"]
    assert not {"is_local", "local_files_only"} & content(out / "tokenizer_config.json").keys()


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def older(folder: Path, part: str, entries: dict[str, Any]) -> None:
    """Write a configuration as transformers 4 does."""
    config = content(folder / "config.json")
    inner = config[part] if part else config
    inner.pop("rope_parameters")
    inner |= entries
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "/home/somebody/model"}))


@pytest.mark.parametrize(
    ("architecture", "part", "entries"),
    [
        ("llama", "", {"rope_theta": 500000.0, "rope_scaling": LLAMA_3}),
        ("llama", "", {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("qwen2", "", {"rope_theta": 1000000.0, "rope_scaling": None}),
        ("gpt_neox", "", {"rotary_pct": 0.5, "rotary_emb_base": 50000}),
        ("gemma3", "", {"rope_theta": 1000000.0, "rope_local_base_freq": 5000.0}),
        ("paligemma", "text_config", {"rope_theta": 500000.0}),
    ],
)
def test_a_configuration_in_the_older_form_is_written_in_both(
    architecture: str, part: str, entries: dict[str, Any], make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture, experts=1)
    for folder in family.folders:
        older(folder, part, entries)
    recipe = families.recipe(family, "sftm", calibration=False, out_dtype="bfloat16")
    found = content(merged_by(recipe, tmp_path / "out") / "config.json")
    inner = found[part] if part else found
    assert entries.items() <= inner.items() and "_name_or_path" not in found
    assert found["torch_dtype"] == found["dtype"] == "bfloat16"
    base, merged = (transformers.AutoConfig.from_pretrained(folder) for folder in (family.base, tmp_path / "out"))
    texts = [config.get_text_config().to_dict() for config in (base, merged)]
    assert texts[0]["rope_parameters"] == texts[1]["rope_parameters"] == inner["rope_parameters"]


@pytest.mark.parametrize("architecture", ["t5", "qwen2_5_vl"])
def test_a_flat_configuration_and_an_untied_head_stay_as_they_are(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture, experts=1)
    for folder in family.folders:
        config = content(folder / "config.json")
        flat = config.pop("text_config", {}) | config | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(flat))
    recipe = families.recipe(family, "sftm", calibration=False)
    found = content(merged_by(recipe, tmp_path / "out") / "config.json")
    assert "text_config" not in found and found["tie_word_embeddings"] is False


def test_an_older_entry_follows_what_the_merge_changes() -> None:
    """A flat configuration of transformers 4 has in ``text_config`` what mergekit changes there.

    What transformers has rewritten under the same name is again what other programs know.
    """
    merged = {"dtype": "bfloat16", "hidden_act": "silu", "text_config": {"vocab_size": 49, "hidden_size": 32}}
    base = {"torch_dtype": "float32", "vocab_size": 64, "hidden_size": 32, "rope_theta": 3.0, "hidden_act": "swigluoai"}
    restore(base, merged)
    flat = base | {"torch_dtype": "bfloat16", "vocab_size": 49}
    assert merged == {"dtype": "bfloat16", "text_config": {"vocab_size": 49, "hidden_size": 32}} | flat


@pytest.mark.parametrize(
    "changes",
    [{}, {"chat_template": "chatml"}, {"tokenizer": {"source": "base"}}, {"tokenizer_source": "union"}],
    ids=str,
)
def test_an_unchanged_vocabulary_keeps_all_files_of_its_tokenizer(
    changes: dict[str, Any], family: Family, tmp_path: Path
) -> None:
    """A model of transformers 4, with files for slow tokenizers."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<pad>"]}
    others = {"vocab.json": "{}", "merges.txt": "#", "special_tokens_map.json": "{}", "tokenizer.model": "1"}
    for folder in family.folders:
        older = content(folder / "tokenizer_config.json")
        del older["backend"]
        (folder / "tokenizer_config.json").write_text(json.dumps(older | settings))
    for name, text in others.items():
        (family.base / name).write_text(text)
    out = merged_by(families.recipe(family, "sftm", calibration=False) | changes, tmp_path / "out")
    for name in (*others, "tokenizer.json"):
        assert (out / name).read_bytes() == (family.base / name).read_bytes()
    found = content(out / "tokenizer_config.json")
    template = found.pop("chat_template", None)
    assert found == content(family.base / "tokenizer_config.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == template and bool(template) == ("chat_template" in changes)
    assert tokenizer.get_vocab() == transformers.AutoTokenizer.from_pretrained(family.base).get_vocab()


@pytest.mark.parametrize("source", ["union", "expert"])
def test_a_tokenizer_with_more_tokens_is_written_for_transformers_4_too(
    source: str, family: Family, tmp_path: Path
) -> None:
    chat_model(family.experts[0])
    named = str(family.experts[0]) if source == "expert" else source
    recipe = families.recipe(family, "sftm", calibration=False) | {"tokenizer_source": named}
    out = merged_by(recipe, tmp_path / "out")
    found = content(out / "tokenizer_config.json")
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in found
    assert {*MARKERS} <= transformers.AutoTokenizer.from_pretrained(out).get_vocab().keys()


def test_the_tokenizer_and_the_template_of_an_earlier_merge_are_set_aside(family: Family, tmp_path: Path) -> None:
    (family.base / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    (family.base / "merges.txt").write_text("#")
    (family.base / "chat_template.jinja").write_text(CHATML)
    recipe, out = families.recipe(family, "sftm", calibration=False), tmp_path / "out"
    for _ in range(2):  # the same merge again renames nothing
        first = transformers.AutoTokenizer.from_pretrained(merged_by(recipe, out))
        assert (first.eos_token, first.chat_template) == ("a", CHATML) and not [*out.glob("*.earlier")]
    source = {"tokenizer": {"source": str(family.experts[0])}}
    again = transformers.AutoTokenizer.from_pretrained(merged_by(recipe | source, out))
    assert again.eos_token == transformers.AutoTokenizer.from_pretrained(family.experts[0]).eos_token != "a"
    assert again.chat_template is None
    earlier = {f"{name}.earlier" for name in ("special_tokens_map.json", "merges.txt", "chat_template.jinja")}
    assert {file.name for file in out.glob("*.earlier")} == earlier


def test_an_adapter_that_brings_the_tokenizer_keeps_the_base_models_settings(family: Family, tmp_path: Path) -> None:
    (family.base / GENERATION).write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.6, "do_sample": True}))
    adapter = write_adapter(family.base, tmp_path / "adapter", "q_proj")
    families.write_tokenizer(adapter)
    end = chat_tokenizer(adapter)[1]
    shutil.copy(adapter / "tokenizer.json", family.base)
    recipe = families.recipe(family, "sftm", experts=[0], calibration=False)
    recipe["models"][0]["model"] = f"{family.base}+{adapter}"
    recipe["tokenizer"] = {"source": str(adapter)}
    out = families.merge(recipe, tmp_path / "out", lora_merge_cache=str(tmp_path / "lora"), copy_tokenizer=True)
    found = content(out / GENERATION)
    assert found["eos_token_id"] == [end, 2, 5] and found["temperature"] == 0.6
    assert content(out / "config.json")["eos_token_id"] == [end, 2, 5]


@pytest.mark.parametrize(
    ("given", "changes", "eos"),
    [
        ("base", {"chat_template": CHATML}, [49, families.EOS]),
        ("base", {"chat_template": "auto", "tokenizer": {"source": "base"}}, [49, families.EOS]),
        ("expert", {"tokenizer": {"source": "expert"}}, [49, families.EOS]),
        ("expert", {"tokenizer_source": "expert"}, [49, families.EOS]),
        ("expert", {"tokenizer": {"source": "union"}, "chat_template": "auto"}, [49, families.EOS]),
        ("expert", {"chat_template": CHATML}, families.EOS),  # whose tokens the base model lacks
        ("expert", {}, families.EOS),
    ],
    ids=str,
)
def test_a_merge_stops_where_its_chat_template_ends_a_turn(
    given: str, changes: dict[str, Any], eos: Any, family: Family, tmp_path: Path
) -> None:
    """The markers are the tokens 48 and 49 of the base model too, or of the expert alone."""
    chat_model(family.experts[0])
    if given == "base":
        chat_model(family.base)
        edit_config(family.base, eos_token_id=families.EOS)
        (family.base / GENERATION).write_text(json.dumps({"eos_token_id": families.EOS}))
    recipe = families.recipe(family, "sftm", calibration=False)
    text = json.dumps(recipe | changes).replace('"expert"', json.dumps(str(family.experts[0])))
    out = merged_by(json.loads(text), tmp_path / "out")
    assert content(out / "config.json")["eos_token_id"] == content(out / GENERATION)["eos_token_id"] == eos
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == eos
    assert content(out / GENERATION).get("top_k") == (7 if "expert" in str(changes.values()) else None)


@pytest.mark.parametrize("changes", [{}, {"tokenizer": {"source": "base"}}], ids=str)
def test_what_mergekit_does_not_download_is_fetched(
    changes: dict[str, Any], recipe: dict[str, Any], tmp_path: Path
) -> None:
    base = Path(recipe["base_model"])
    older(base, "", {"rope_theta": 500000.0})
    (base / "tekken.json").unlink()
    (base / "merges.txt").write_text("#")
    (tmp_path / "hub/org").mkdir(parents=True)
    base.rename(tmp_path / "hub/org/base")
    with serve(tmp_path / "hub", tmp_path / "cache"):
        found = copied(recipe | {"base_model": "org/base"} | changes, tmp_path / "merged")
    templates = {"additional_chat_templates/rag.jinja", "tekken.json"}  # the stand-in for the Hub has no folders
    assert set(found) == {*TEMPLATES, *OTHERS} - templates
    assert (tmp_path / "merged/merges.txt").is_file()
    assert content(tmp_path / "merged/config.json")["rope_theta"] == 500000.0
