"""The model card after a merge by stock mergekit: what it tells, what it keeps, and what it must not tell."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from mergekit.config import MergeConfiguration
from safetensors.torch import load_file
from support import families
from support.adapters import write_adapter
from support.families import Family
from support.processes import run_afresh

from mergekit_slta import __version__
from mergekit_slta.output import card as module
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.statistics import Statistics

OPTIONS = {"write_model_card": True}


@pytest.fixture(scope="module")
def merged(llama: Family, forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge by mergekit-yaml in a process of its own, whose recipe names everything by absolute paths."""
    folder = tmp_path_factory.mktemp("card")
    content = families.recipe(llama, samples=3, statistics=str(folder / "own.safetensors"))
    recipe = families.write_recipe(folder / "recipe.yml", content)
    recipe.write_text(f"# in {Path.home()}/recipes\n{recipe.read_text()}")
    command = (
        "from _mergekit_slta_startup import install; install(); from mergekit.scripts.run_yaml import main; main()"
    )
    assert "model card" not in run_afresh(forks, command, recipe, folder / "out", "--quiet")
    return folder / "out"


def test_the_card_tells_how_the_model_was_made(merged: Path) -> None:
    card = ModelCard.load(merged / "README.md")
    tags = ["mergekit", "merge", "mergekit-slta", "slta"]
    assert card.data.to_dict() == {"library_name": "transformers", "tags": tags}
    text = card.text
    assert "This is a merge of pre-trained language models" in text  # mergekit's own part
    assert "By [SLTA](https://arxiv.org/abs/2504.10902) (`merge_method: slta`): every submodule gets one" in text
    statistics = Statistics.load(merged / "mergekit-slta" / "statistics.safetensors")
    solution = statistics.solve()
    for index, line in enumerate(line for line in text.splitlines() if line.startswith("| Expert")):
        _, _, model, data, kept, _ = map(str.strip, line.split("|"))
        assert (model, data) == (f"`expert{index}`", f"`task{index}.jsonl`")
        shares = [float(retained[index]) for retained in solution.retained.values()]
        assert min(shares) - 0.001 <= float(kept.rstrip("%")) / 100 <= max(shares) + 0.001
    assert "(mergekit-slta/alpha.png)" in text
    assert (merged / "mergekit-slta" / "alpha.png").read_bytes().startswith(b"\x89PNG")
    assert f"pip install mergekit-slta=={__version__}" in text and "transformers" in text.splitlines()[-3]


def test_no_path_of_this_machine_gets_out(merged: Path, llama: Family) -> None:
    for file in ("README.md", "mergekit-slta/plain.yml"):
        text = (merged / file).read_text()
        for private in (str(merged.parent), str(llama.base.parent), f"{Path.home()}/", "/tmp"):
            assert private not in text
    assert "base_model: base" in (merged / "README.md").read_text()


def test_the_plain_recipe_gives_the_same_merge(merged: Path, llama: Family, tmp_path: Path) -> None:
    content = yaml.safe_load((merged / "mergekit-slta" / "plain.yml").read_text())
    where = {folder.name: str(folder) for folder in llama.folders}
    content["base_model"] = where[content["base_model"]]
    for model in content["models"]:
        model["model"] = where[model["model"]]
    again = families.merge(content, tmp_path / "again")
    ours, theirs = (load_file(next(iter(out.glob("*.safetensors")))) for out in (merged, again))
    for name, tensor in ours.items():
        assert (tensor.float() - theirs[name].float()).abs().max() < 1e-6


def test_the_plain_recipe_makes_the_same_tokenizer(llama: Family, tmp_path: Path) -> None:
    """Without the recipe's own, mergekit would not align vocabularies, and refuse experts with more tokens."""
    output = {"out_dtype": "float16", "tokenizer": {"source": "base"}, "chat_template": "chatml"}
    content = families.recipe(llama, samples=2) | output
    out = families.merge(content, tmp_path / "out", **OPTIONS)
    plain = yaml.safe_load((out / "mergekit-slta" / "plain.yml").read_text())
    assert {key: plain[key] for key in output} == output


def test_adapters_have_their_option_in_the_commands(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, samples=2)
    content["models"][0]["model"] = f"{llama.base}+{write_adapter(llama.base, tmp_path / 'adapter')}"
    out = families.merge(content, tmp_path / "out", lora_merge_cache=str(tmp_path / "cache"), **OPTIONS)
    text = (out / "README.md").read_text()
    for recipe in ("mergekit_config.yml", "mergekit-slta/plain.yml"):
        assert f"\nmergekit-yaml {recipe} ./merged --lora-merge-cache ./adapters\n" in text


def test_a_second_merge_replaces_its_own_parts_alone(llama: Family, tmp_path: Path) -> None:
    out = tmp_path / "out"
    families.merge(families.recipe(llama, samples=2), out, **OPTIONS)
    path = out / "README.md"
    text = path.read_text()
    text = text.replace("tags:", "license: mit\ntags:\n- mine", 1) + "\nMy own words.\n"
    path.write_text(text.replace("<!-- mergekit: begin -->", "Before all.\n\n<!-- mergekit: begin -->"))
    assert (out / "mergekit-slta" / "statistics.safetensors").is_file()
    families.merge(families.recipe(llama, experts=[0, 1], samples=3), out, **OPTIONS)
    card: Any = ModelCard.load(path)
    assert card.data.license == "mit" and "mine" in card.data.tags
    assert card.text.count("My own words.") == card.text.count("Before all.") == 1
    assert card.text.count("## How this model was made") == card.text.count("### Merge Method") == 1
    assert "expert2" not in card.text and "samples: 3" in card.text and "samples: 2" not in card.text
    families.merge(families.recipe(llama, "actmat", calibration=False), out, **OPTIONS)
    card = ModelCard.load(path)
    assert "actmat" in card.data.tags and "slta" not in card.data.tags and "mine" in card.data.tags
    assert "alpha.png" not in card.text and not list((out / "mergekit-slta").iterdir())


@pytest.mark.parametrize("card", ["Für alle".encode("latin-1"), b"---\ntags: [x\n---\nFor all\n"])
def test_an_earlier_card_that_cannot_be_read_is_kept(
    card: bytes, llama: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_bytes(card)
    families.merge(families.recipe(llama, "actmat", calibration=False), out, write_model_card=True)
    assert (out / "README.old.md").read_bytes() == card
    assert "mergekit-slta" in (out / "README.md").read_text()
    assert f"it is kept as {out / 'README.old.md'}" in caplog.text


def test_an_earlier_card_does_not_replace_the_one_before_it(tmp_path: Path) -> None:
    cards = {"README.old.md": b"\xff1", "README.old2.md": b"\xff2", "README.old3.md": b"\xff3"}
    for content in cards.values():
        (tmp_path / "README.md").write_bytes(content)
        assert module._earlier_card(tmp_path) is None
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == cards


@pytest.mark.parametrize("method", ["featcal", "actmat", "sftm"])
def test_every_method_has_its_card(llama: Family, tmp_path: Path, method: str) -> None:
    content = families.recipe(llama, method, calibration=method == "featcal")
    out = families.merge(content, tmp_path / "out", **OPTIONS)
    text = (out / "README.md").read_text()
    assert f"`merge_method: {method}`): {module._IN_WORDS[method]}" in text
    assert "Feature change kept" not in text and "mergekit alone cannot do this merge" in text
    assert not (out / "mergekit-slta").exists()


def test_mergekits_own_methods_keep_mergekits_card(llama: Family, tmp_path: Path) -> None:
    families.merge(families.recipe(llama, samples=2), tmp_path / "first", **OPTIONS)
    content = families.recipe(llama, "linear", calibration=False, weight=1.0)
    out = families.merge(content, tmp_path / "out", **OPTIONS)
    assert "mergekit-slta" not in (out / "README.md").read_text()


def test_without_a_card_nothing_is_written(llama: Family, tmp_path: Path) -> None:
    out = families.merge(families.recipe(llama, samples=2), tmp_path / "out")
    assert not (out / "README.md").exists() and not (out / "mergekit-slta").exists()


def test_statistics_of_an_earlier_merge_do_not_stay_beside_another(llama: Family, tmp_path: Path) -> None:
    out = families.merge(families.recipe(llama, samples=2), tmp_path / "out", **OPTIONS)
    assert (out / module.STATISTICS_OF_MERGE).is_file()
    families.merge(families.recipe(llama, "actmat", calibration=False), out)
    assert not any((out / name).exists() for name in module.BESIDE)


def test_a_card_that_cannot_be_told_more_is_mergekits(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "merge_card", broken)
    out = families.merge(families.recipe(llama, samples=2), tmp_path / "out", **OPTIONS)
    assert (out / "README.md").read_text().startswith("---") and "says only what mergekit knows" in caplog.text


def test_models_and_datasets_of_the_hub_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "local").mkdir()
    experts = {
        "org/math": {"calibration": "hf:openai/gsm8k?config=main"},
        "org/local": {"calibration": "/home/somebody/private data.jsonl"},
        "org/base+org/adapter@v1": {"calibration": "a.jsonl"},
    }
    recipe = Recipe("org/base", experts)
    written = "---\ntags: [x]\n---\n# out\n"
    found: Any = ModelCard(module.merge_card(written, tmp_path / "out", recipe, None))
    assert found.data.base_model == ["org/base", "org/math", "org/adapter"]
    assert found.data.base_model_relation == "merge" and found.data.datasets == ["openai/gsm8k"]
    assert "| [org/math](https://huggingface.co/org/math) | `hf:openai/gsm8k?config=main` |" in found.text
    assert "| `org/local` | `private data.jsonl` |" in found.text
    assert "[org/adapter@v1](https://huggingface.co/org/adapter)" in found.text
    assert "somebody" not in str(found)


def test_a_recipe_without_private_paths_is_still_the_recipe() -> None:
    template = {"template": "/no_think {question} {answer}"}
    content = {
        "merge_method": "slta",
        "base_model": "/models/my base",
        "models": [
            {"model": "/models/a+/adapters/b", "parameters": {"calibration": "hf:/data/set?split=x", **template}}
        ],
        "parameters": {"statistics": "~/stats.safetensors"},
    }
    recipe = Recipe.from_config(MergeConfiguration.model_validate(content), content)
    cleaned = yaml.safe_load(module.without_private_paths(yaml.safe_dump(content), recipe))
    assert cleaned == {
        "merge_method": "slta",
        "base_model": "my base",
        "models": [{"model": "a+b", "parameters": {"calibration": "hf:set?split=x", **template}}],
        "parameters": {"statistics": "stats.safetensors"},
    }


def test_a_recipes_comments_and_paths_are_not_published(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "actmat", calibration=False)
    content["models"][0]["parameters"] = {"weight": 2.0}
    recipe = Recipe.parse("# token hf_secret of alice\n" + yaml.safe_dump(content), "recipe.yml")
    shown = module.published_recipe(recipe)
    assert "hf_secret" not in shown and str(llama.base.parent) not in shown
    assert yaml.safe_load(shown)["models"][0] == {"model": "expert0", "parameters": {"weight": 2.0}}


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("/home/alice/prompts/{question}", "prompts/{question}"),
        ("see ~/work/secret.txt: {question}", "see secret.txt: {question}"),
        ("{question}/{answer} and/or </think> https://x.org/a/b", None),
        ("/think {question}", None),
    ],
)
def test_a_path_in_a_template_is_published_by_its_last_part(template: str, shown: str | None, llama: Family) -> None:
    content = families.recipe(llama)
    content["models"][0]["parameters"]["template"] = template
    published = yaml.safe_load(module.published_recipe(Recipe.parse(yaml.safe_dump(content), "recipe.yml")))
    assert published["models"][0]["parameters"]["template"] == (template if shown is None else shown)
