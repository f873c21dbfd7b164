"""The model card after a merge by stock mergekit: what it tells, what it keeps, and what it must not tell."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from mergekit.common import ModelReference
from mergekit.scripts.run_yaml import main as mergekit_yaml
from support import families
from support.command import run
from support.families import Family

from mergekit_slta.data.sources import source_name
from mergekit_slta.evaluation.evaluate import evaluate
from mergekit_slta.output import card as module
from mergekit_slta.output import manifest
from mergekit_slta.output.card import INSTALL, SCORES
from mergekit_slta.output.manifest import Manifest, MergedModel, MergedTask
from mergekit_slta.recipe.recipe import Recipe, published_name
from mergekit_slta.slta.statistics import Statistics
from mergekit_slta.words import as_score

HOME = "/home/somebody"


@pytest.fixture(scope="module")
def merged(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge by mergekit-yaml, whose recipe names everything by absolute paths."""
    folder = tmp_path_factory.mktemp("card")
    content = families.recipe(llama, samples=3, statistics=str(folder / "own.safetensors"))
    recipe = families.write_recipe(folder / "recipe.yml", content)
    recipe.write_text(f"# in {HOME}/recipes\n#   mergekit-slta ask base \\\n#     -o a.jsonl\n{recipe.read_text()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", HOME)
        run(recipe, folder / "out", "--quiet", program=mergekit_yaml)
    return folder / "out"


def test_the_card_tells_how_the_model_was_made(merged: Path) -> None:
    card = ModelCard.load(merged / "README.md")
    tags = ["mergekit", "merge", "mergekit-slta", "slta"]
    assert card.data.to_dict() == {"library_name": "transformers", "tags": tags}
    text = card.text
    assert "This is a merge of pre-trained language models" in text  # mergekit's own part
    method = "`merge_method: slta`, after [SLTA](https://arxiv.org/abs/2504.10902)"
    assert f"Merged with {method}: every submodule gets one" in text
    statistics = Statistics.load(merged / "mergekit-slta" / "statistics.safetensors")
    solution = statistics.solve()
    for index, line in enumerate(line for line in text.splitlines() if line.startswith("| Expert")):
        _, _, model, data, kept, _ = map(str.strip, line.split("|"))
        assert (model, data) == (f"`expert{index}`", f"3 of `task{index}.jsonl`")
        shares = [float(retained[index]) for retained in solution.retained.values()]
        assert min(shares) - 0.005 <= float(kept.replace("−", "-")) <= max(shares) + 0.005
    assert "and the files of prompts `task0.jsonl`, `task1.jsonl`, `task2.jsonl`, which are not in this" in text
    made = manifest.read(merged)
    assert made is not None and "transformers" in text.splitlines()[-1]
    assert "\nmergekit-yaml merged/mergekit_config.yml merged\n" in text and f"\n{INSTALL}" in text
    assert "```yaml\n#   mergekit-slta ask base -o a.jsonl\nmerge_method: slta\n" in text
    made = made.model_copy(update={"versions": made.versions | {"commit": "abc"}})
    assert f"\n{INSTALL}@abc\n" in module._section(Recipe.load(merged / "mergekit_config.yml"), made, None)


def test_no_path_of_this_machine_gets_out(merged: Path, llama: Family) -> None:
    text = (merged / "README.md").read_text()
    for private in (str(merged.parent), str(llama.base.parent), f"{HOME}/", "/tmp"):
        assert private not in text
    assert "base_model: base" in (merged / "README.md").read_text()


def test_scores_stand_with_the_number_of_answers_behind_them(merged: Path, tmp_path: Path) -> None:
    """``evaluate`` adds them to the manifest, and ``publish`` renews the card."""
    out = Path(shutil.copytree(merged, tmp_path / "out"))
    recipe = Recipe.load(out / "mergekit_config.yml")
    assert SCORES not in module.merge_card(out, recipe)
    tasks = evaluate(out / "mergekit_config.yml", out, quiet=True).tasks
    made = manifest.read(out)
    assert made is not None and list(made.scores) == list(tasks)
    for name, task in tasks.items():
        counts = {of: getattr(task, of) for of in ("source", "sha256", "prompts", "short_answers")}
        assert made.scores[name] == counts | asdict(task.scores["out"]) and task.prompts > 0
    text = module.merge_card(out, recipe)
    accuracy, gain = (as_score(made.scores["expert0"][of]) for of in ("accuracy", "gain_kept"))
    assert f"| `expert0` | {tasks['expert0'].prompts} | {accuracy} (0) | {gain} |" in text
    (out / "README.md").write_text(text)
    assert module.merge_card(out, recipe) == text
    (out / "README.md").write_text(text.replace(f"{accuracy} (0)", "0.99 (0)") + "\nMine.\n")  # since scored again
    renewed = module.merge_card(out, recipe)
    assert renewed.count(SCORES) == 1 and "0.99 (0)" not in renewed and f"{accuracy} (0)" in renewed
    assert "\nMine.\n" in renewed
    made.scores["expert0"] |= {"accuracy": 1.0, "accuracy_low": None, "short_answers": 2}  # too few to count
    assert f" | {as_score(None)} (2) | " in module._score_table(made)
    made.scores["base"] = made.scores["expert0"]
    assert "| `base` (of its own answers; in likelihood, 0 is the experts' mean) |" in module._score_table(made)


@pytest.mark.parametrize("method", ["featcal", "sftm"])
def test_every_method_has_its_card(llama: Family, tmp_path: Path, method: str) -> None:
    """Also if the experts' folders have one name, as of a training's checkpoints."""
    content = families.recipe(llama, method, calibration=method == "featcal")
    for number, entry in enumerate(content["models"]):
        entry["model"] = str(shutil.copytree(entry["model"], tmp_path / str(number) / "model"))
    out = families.merge(content, tmp_path / "out", write_model_card=True)
    text, made = (out / "README.md").read_text(), manifest.read(out)
    assert made is not None and [model.name for model in made.models] == ["model", "model (2)", "model (3)"]
    prompts = [line.split("`")[3] for line in text.splitlines() if line.startswith("| Expert | `model` | ")]
    assert prompts == [task.source for task in made.tasks] and len({*prompts}) == len(prompts)
    assert f"Merged with `merge_method: {method}`, after [" in text
    assert "Feature change kept" not in text and "It needs this plugin" in text
    assert [file.name for file in (out / "mergekit-slta").iterdir()] == ["merge.json"]


def test_models_and_datasets_of_the_hub_are_linked(here: None, tmp_path: Path) -> None:
    (tmp_path / "org" / "local").mkdir(parents=True)
    experts = {
        "org/math": {"calibration": "hf:openai/gsm8k?config=main"},
        "org/local": {"calibration": "/home/somebody/private data.jsonl"},
        "org/base+org/adapter@v1": {"calibration": "hf:/home/somebody/set?split=x"},
    }
    recipe = families.recipe_of("org/base", experts)
    revisions = ["+".join(["a" * 40, "b" * 40][: 1 + bool(model.lora)]) for model in recipe.references]
    base, *models = (
        MergedModel(name=published_name(model), sha256="", revision=revision)
        for model, revision in zip(recipe.references, revisions, strict=True)
    )
    tasks = [
        MergedTask(model=model.name, source=source_name(task.calibration), prompts=3, sha256="")
        for model, task in zip(models, recipe.experts, strict=True)
    ]
    made = Manifest(
        method="slta", settings={}, base_model=base, models=tuple(models), tasks=tuple(tasks), versions={"commit": ""}
    )
    manifest.write(made, tmp_path / "out")
    found: Any = ModelCard(module.merge_card(tmp_path / "out", recipe, caveat="In layer 0."))
    assert "head are the base model's. In layer 0.\n" in found.text
    assert found.data.base_model == ["org/base", "org/math", "org/adapter"]
    assert found.data.base_model_relation == "merge" and found.data.datasets == ["openai/gsm8k"]
    assert (
        "| [org/math](https://huggingface.co/org/math) | aaaaaaaaaaaa | 3 of `hf:openai/gsm8k?config=main` |"
        in found.text
    )
    assert "| `org/local` | aaaaaaaaaaaa | 3 of `private data.jsonl` |" in found.text
    assert (
        "[org/adapter@v1](https://huggingface.co/org/adapter) | aaaaaaaaaaaa+bbbbbbbbbbbb | 3 of `hf:set?split=x` |"
        in found.text
    )
    assert "\nmergekit-yaml merged/mergekit_config.yml merged --lora-merge-cache ./adapters\n" in found.text
    assert "somebody" not in str(found)


def test_names_stay_code() -> None:
    assert module._linked(ModelReference.model_validate("/models/a`b|<script>")) == "`a'b|<script>`"


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
    recipe = Recipe(content)
    cleaned = yaml.safe_load(module.without_private_paths(recipe.text, recipe))
    assert cleaned == {
        "merge_method": "slta",
        "base_model": "my base",
        "models": [{"model": "a+b", "parameters": {"calibration": "hf:set?split=x", **template}}],
        "parameters": {"statistics": "stats.safetensors"},
    }
