"""Evaluation: the likelihoods of a dense reference, on records that calibration did not use."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeFamily
from support import families
from support.families import Family
from support.html_elements import Elements
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_slta.errors import SltaError
from mergekit_slta.evaluate import Evaluation, TaskEvaluation, evaluate
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe

SAMPLES = 2


def experiment_of(
    family: Family, adapters: Sequence[Path] = (), options: dict[str, Any] | None = None, **settings: Any
) -> Experiment:
    models = [f"{family.base}+{adapter}" for adapter in adapters] or [str(folder) for folder in family.experts]
    data = dict(zip(models, family.data, strict=True))
    recipe = Recipe(family.base, data, **{"samples": SAMPLES, "max_tokens": 12} | settings)
    return Experiment(recipe, quiet=True, **(options or {}))


def held_out_rows(family: Family, task: int, count: int = 100, max_tokens: int = 12) -> list[list[int]]:
    """A task's records after the calibration samples, in the order of seed 0, as token ids."""
    texts = [json.loads(line)["text"] for line in family.data[task].read_text().splitlines()]
    order = random.Random(0).sample(range(len(texts)), len(texts))
    tokenizer = AutoTokenizer.from_pretrained(family.base)
    return [tokenizer(texts[index])["input_ids"][:max_tokens] for index in order[SAMPLES : SAMPLES + count]]


def reference(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> float:
    """Negative log-likelihood per predicted token, record by record, without padding."""
    losses: list[float] = []
    for row in rows:
        with torch.no_grad():
            logs = model(torch.tensor([row])).logits[0].log_softmax(-1)
        losses += [-float(logs[position, row[position + 1]]) for position in range(len(row) - 1)]
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Two experts that have learned their task a little."""
    made = families.make_family(tmp_path_factory.mktemp("evaluate"), records=10)
    tokenizer = AutoTokenizer.from_pretrained(made.base)
    for folder, data in zip(made.experts, made.data, strict=True):
        model = AutoModelForCausalLM.from_pretrained(made.base)
        rows = [tokenizer(json.loads(line)["text"])["input_ids"] for line in data.read_text().splitlines()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for row in rows:
            ids = torch.tensor([row])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(folder)
    return made


def test_every_model_is_measured_on_the_held_out_records(family: Family) -> None:
    merged = family.experts[1]  # as good as any merge
    results = evaluate(experiment_of(family), merged, samples=5).tasks
    base, *experts = family.models()
    for task, result in enumerate(results):
        rows = held_out_rows(family, task, count=5)
        assert result.records == 5
        assert result.tokens == sum(len(row) - 1 for row in rows)
        assert result.model == f"expert{task}"
        assert result.base == pytest.approx(reference(base, rows), rel=1e-5)
        assert result.expert == pytest.approx(reference(experts[task], rows), rel=1e-5)
        assert result.merged == pytest.approx(reference(experts[1], rows), rel=1e-5)
        assert result.kept == pytest.approx((result.base - result.merged) / (result.base - result.expert))
    assert results[1].kept == 1


def test_a_recipe_is_opened_with_the_options(family: Family) -> None:
    opened = experiment_of(family)
    found = evaluate(opened.recipe, str(family.experts[1]), 2, device="cpu", quiet=True)
    assert found == evaluate(opened, family.experts[1], 2)


def test_an_evaluation_shows_itself_as_text_html_and_json() -> None:
    tasks = TaskEvaluation("<b>math", 5, 60, 4.0, 2.0, 3.0), TaskEvaluation("code", 5, 70, 2.0, 3.0, 1.0)
    found = Evaluation(tasks)
    title, table, note = str(found).split("\n\n")
    assert "lower is better" in title
    assert table == str(found.table())
    assert table.splitlines()[1].split() == ["<b>math", "5", "60", "4.0000", "2.0000", "3.0000", "50.0%"]
    assert "no gain to keep: code. The likelihood counts every token" in note
    elements = Elements(found._repr_html_())
    assert [tag for tag, _ in elements.found].count("tr") == 3
    assert "<b>math" in elements.text and note in elements.text
    assert [task["kept"] for task in json.loads(found.to_json())["tasks"]] == [0.5, None]


def test_no_calibration_sample_is_used(family: Family) -> None:
    experiment = experiment_of(family)
    for task, expert in enumerate(experiment.recipe.experts):
        data = experiment.samples.held_out(expert, 100)
        assert not set(data.token_ids) & {tuple(row) for row in family.token_ids(SAMPLES, 12)[task]}
        assert len(data.token_ids) == 10 - SAMPLES


def test_the_base_tokenizer_serves_all_models(make_family: MakeFamily) -> None:
    family = make_family(experts=1)
    for file in family.experts[0].glob("tokenizer*"):
        file.unlink()
    (result,) = evaluate(experiment_of(family), family.experts[0]).tasks
    assert result.expert == result.merged


def test_no_model_is_loaded_whole(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    layer_of = Checkpoint.read

    def watched(self: Checkpoint, names: Mapping[str, str], *arguments: Any) -> Any:
        layers = {name.split(".")[2] for name in names.values() if name.startswith("model.layers.")}
        assert len(layers) <= 1
        read.append(Path(self.folder).name)
        return layer_of(self, names, *arguments)

    monkeypatch.setattr(Checkpoint, "read", watched)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    evaluate(experiment_of(family), family.base, samples=2)
    assert list(dict.fromkeys(read)) == ["base", "expert0", "expert1"]


def test_a_lora_expert_is_merged_first(family: Family, tmp_path: Path) -> None:
    import peft

    adapters = []
    for index in range(2):
        torch.manual_seed(index)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(family.base), config)
        model.save_pretrained(str(tmp_path / f"adapter{index}"))
        adapters.append(tmp_path / f"adapter{index}")
        whole = tmp_path / f"whole{index}"
        model.merge_and_unload().save_pretrained(whole)
    experiment = experiment_of(family, adapters, {"lora_merge_cache": str(tmp_path / "cache")})
    results = evaluate(experiment, family.base).tasks
    for task, result in enumerate(results):
        expected = reference(families.load_model(tmp_path / f"whole{task}"), held_out_rows(family, task))
        assert result.expert == pytest.approx(expected, rel=1e-5)
        assert result.model == f"base+adapter{task}"


@pytest.mark.parametrize(
    ("base", "expert", "merged", "kept"),
    [(4.0, 2.0, 3.0, 0.5), (4.0, 2.0, 5.0, -0.5), (4.0, 4.0, 3.0, None), (2, 3, 1, None)],
)
def test_the_kept_share_of_the_gain(base: float, expert: float, merged: float, kept: float | None) -> None:
    assert TaskEvaluation("expert", 1, 1, base, expert, merged).kept == kept


# What is refused


def test_a_folder_without_a_model_is_refused(family: Family, tmp_path: Path) -> None:
    with pytest.raises(SltaError, match=r"no model in .*config\.json"):
        evaluate(experiment_of(family), tmp_path)


def test_a_broken_model_is_refused(family: Family, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((family.base / "config.json").read_text())
    with pytest.raises(SltaError, match="has no weights"):
        evaluate(experiment_of(family), tmp_path)


def test_an_expert_without_data_is_refused(family: Family) -> None:
    recipe = Recipe(family.base, ["x"])
    with pytest.raises(SltaError, match="The expert x has no 'calibration'"):
        evaluate(Experiment(recipe, quiet=True), family.base)


def test_statistics_are_no_data(family: Family) -> None:
    opened = families.experiment(families.recipe(family, calibration=False, statistics="stats.safetensors"))
    with pytest.raises(SltaError) as caught:
        evaluate(opened, family.base)
    assert "statistics" not in caught.value.message


def test_a_source_that_calibration_used_up_is_refused(family: Family) -> None:
    with pytest.raises(SltaError, match="no record to hold out"):
        evaluate(experiment_of(family, samples=10), family.base)


def test_records_of_one_token_are_refused(make_family: MakeFamily) -> None:
    family = make_family(experts=1)
    file = family.base / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))  # no special tokens
    family.data[0].write_text("".join(json.dumps({"text": letter}) + "\n" for letter in "abcd"))
    with pytest.raises(SltaError, match="nothing to predict"):
        evaluate(experiment_of(family), family.base)


def test_a_model_that_lacks_tokens_is_refused(family: Family, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(families.config_of("llama", vocab_size=4)).save_pretrained(tmp_path)
    with pytest.raises(SltaError, match="knows only 4 tokens"):
        evaluate(experiment_of(family), tmp_path)
