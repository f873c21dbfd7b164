"""Comparisons: every number by an independent forward pass, the answers by greedy decoding, no model run twice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from conftest import MakeFamily
from support import families
from support.adapters import write_adapter
from support.families import Family
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_slta.cli.commands import main
from mergekit_slta.comparison import compare as module
from mergekit_slta.comparison.compare import Comparison, TaskComparison, TaskScore, compare, evaluate
from mergekit_slta.errors import SltaError
from mergekit_slta.recipe.recipe import Recipe

RECORDS = 8
SAMPLES = 2  # of each task for calibration
CHAT = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def write_pairs(family: Family, record: Callable[[str, str], dict[str, Any]]) -> None:
    """Give each task pairs of a question and an answer of two letters."""
    for task, file in enumerate(family.data):
        letters = families.ALPHABETS[task].strip()
        pairs = [(letters[i % 9] * 3 + letters[i // 9], letters[i % 7] + letters[(i + 1) % 7]) for i in range(RECORDS)]
        file.write_text("".join(json.dumps(record(*pair)) + "\n" for pair in pairs))


def recipe_of(family: Family, **settings: Any) -> Recipe:
    data = dict(zip(map(str, family.experts), family.data, strict=True))
    return Recipe(family.base, data, **{"samples": SAMPLES, "max_tokens": 24} | settings)


def held_out_records(family: Family, task: int) -> list[dict[str, str]]:
    """A task's records after the calibration samples, in the order of seed 0."""
    records = [json.loads(line) for line in family.data[task].read_text().splitlines()]
    return [records[index] for index in random.Random(0).sample(range(len(records)), len(records))[SAMPLES:]]


@pytest.fixture
def paired(make_family: MakeFamily) -> Family:
    family = make_family()
    write_pairs(family, lambda question, answer: {"question": question, "answer": answer})
    return family


def likelihood(model: torch.nn.Module, pairs: list[tuple[list[int], list[int]]]) -> float:
    """The negative log-likelihood per token of the answers to prompts, record by record, without padding."""
    losses = []
    for prompt, answer in pairs:
        with torch.no_grad():
            logs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        losses += [-float(logs[len(prompt) + index - 1, token]) for index, token in enumerate(answer)]
    return sum(losses) / len(losses)


def decodes(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding gives the answer."""
    decoded = list(prompt)
    for _ in answer:
        with torch.no_grad():
            decoded.append(int(model(torch.tensor([decoded])).logits[0, -1].argmax()))
    return decoded[len(prompt) :] == answer


def test_all_models_stand_side_by_side(paired: Family) -> None:
    outs = [paired.experts[1], paired.base]
    found = compare(recipe_of(paired), outs, samples=4, quiet=True)
    assert found.merged == tuple(map(str, outs))  # beside the expert and the base model of these names
    models = {"base": paired.model(0), "expert0": paired.model(1), "expert1": paired.model(2)}
    tokenizer = AutoTokenizer.from_pretrained(paired.base)
    for index, task in enumerate(found.tasks):
        answers = []
        for record in held_out_records(paired, index)[:4]:
            prompt = tokenizer(record["question"] + "\n")["input_ids"][:-1]
            answer = tokenizer(record["answer"], add_special_tokens=False)["input_ids"]
            answers.append((prompt, answer))
        assert (task.model, task.records, task.answers) == (f"expert{index}", 4, 4)
        assert task.tokens == sum(len(answer) for _, answer in answers)
        for name, got in {"base": task.base, f"expert{index}": task.expert, "expert1": task.merged[0]}.items():
            assert got.loss == pytest.approx(likelihood(models[name], answers), rel=1e-5)
            assert got.exact == sum(decodes(models[name], *pair) for pair in answers) / 4
        assert task.merged[1] == task.base
        assert task.experts[index] == task.expert and task.experts[1] == task.merged[0]
        assert task.kept(task.base) in (0, None)
        gain = task.base.loss - task.expert.loss
        kept = pytest.approx((task.base.loss - task.merged[0].loss) / gain) if gain > 0 else None
        assert task.kept(task.merged[0]) == kept


def test_what_is_kept_of_the_base_model_is_measured_on_its_own_records(paired: Family) -> None:
    experts = dict(zip(map(str, paired.experts[:1]), paired.data[:1], strict=True))
    content = Recipe(
        paired.base, {**experts, str(paired.base): paired.data[1]}, samples=SAMPLES, max_tokens=24, level="layer"
    )
    found = compare(content, [paired.experts[0], paired.base, paired.experts[1]], samples=4, quiet=True)
    whole = compare(recipe_of(paired), [paired.experts[0]], samples=4, quiet=True).tasks[1]
    keep = found.keep
    assert keep is not None and len(found.tasks) == 1
    assert keep.base.loss == pytest.approx(whole.base.loss)
    assert keep.expert.loss == keep.merged[0].loss == pytest.approx(whole.merged[0].loss)
    lost = keep.expert.loss - keep.base.loss
    kept = [0, 1, pytest.approx((keep.expert.loss - keep.merged[2].loss) / lost)] if lost > 0 else [None] * 3
    assert [keep.kept(score) for score in keep.merged] == kept
    assert keep.base.exact in (1.0, None)  # of the answers that the base model gives
    assert "The base model's own task: 100%" in str(found)
    assert json.loads(found.to_json())["keep"]["records"] == 4


@pytest.mark.parametrize(
    ("record", "settings", "answers"),
    [
        (lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}, {}, 6),
        (lambda q, a: {"messages": [{"role": "user", "content": q}]}, {}, 0),
        (lambda q, a: {"prompt": q, "completion": 9 * "abcd"}, {"max_tokens": 100}, 0),  # too long an answer
        (lambda q, a: {"prompt": q, "completion": a}, {"max_tokens": 6}, 0),  # which is cut off
    ],
)
def test_records_with_a_short_answer_that_is_not_cut_off_are_scored_by_it(
    make_family: MakeFamily, record: Any, settings: dict[str, Any], answers: int
) -> None:
    family = make_family(chat_template=CHAT)
    write_pairs(family, record)
    (task, _) = compare(recipe_of(family, **{"max_tokens": 100} | settings), [family.base], quiet=True).tasks
    assert task.answers == answers


def test_a_model_that_is_done_is_not_run_again(paired: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    score = module.score_model

    def watched(checkpoint: Any, *arguments: Any, **more: Any) -> Any:
        if len(runs) == 2:
            runs.append("interrupted")
            raise KeyboardInterrupt
        runs.append(Path(checkpoint.folder).name)
        return score(checkpoint, *arguments, **more)

    monkeypatch.setattr(module, "score_model", watched)
    with pytest.raises(KeyboardInterrupt):
        compare(recipe_of(paired), [paired.experts[1]], quiet=True)
    found = compare(recipe_of(paired), [paired.experts[1]], quiet=True)
    assert runs == ["base", "expert0", "interrupted", "expert1"]
    assert evaluate(recipe_of(paired), paired.experts[1], quiet=True) == found and len(runs) == 4
    compare(recipe_of(paired), [paired.experts[1]], samples=1, quiet=True)
    assert len(runs) == 7  # other records


def test_a_merge_that_is_written_anew_is_run_again(paired: Family, tmp_path: Path) -> None:
    out = tmp_path / "out"
    content = families.recipe(paired, "actmat", calibration=False)
    first = compare(recipe_of(paired), [families.merge(content, out)], quiet=True)
    families.merge(content | {"parameters": {"scale": 0.5}}, out)
    second = compare(recipe_of(paired), [out], quiet=True)
    assert first.tasks[0].base == second.tasks[0].base
    assert first.tasks[0].merged != second.tasks[0].merged


def test_a_lora_expert_is_merged_first(paired: Family, tmp_path: Path) -> None:
    adapter, (math, code), (own, other) = write_adapter(paired.base, tmp_path / "adapter"), paired.experts, paired.data
    peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(paired.base), str(adapter)
    ).merge_and_unload().save_pretrained(math)
    whole, lora = (
        evaluate(
            Recipe(paired.base, {name: own, str(code): other}, samples=SAMPLES, max_tokens=24),
            math,
            quiet=True,
            lora_merge_cache=str(tmp_path / "cache"),
        )
        for name in (str(math), f"{paired.base}+{adapter}")
    )
    assert lora.tasks[0].model == "base+adapter"
    assert lora.tasks[0].expert.loss == pytest.approx(whole.tasks[0].expert.loss, rel=1e-5)


def test_a_comparison_ranks_all_models_by_their_exact_answers(tmp_path: Path) -> None:
    worse = TaskScore(6.0, 0.0)
    tasks = (
        TaskComparison(
            "x/<b>math", 5, 60, 4, TaskScore(4.0, 0.25), TaskScore(2.0, 1.0), (TaskScore(2.0, 1.0), worse),
            (TaskScore(3.0, 0.5), TaskScore(5.0, 0.0)), known=5,
        ),
        TaskComparison(
            "x/code", 5, 70, 4, TaskScore(2.0, 0.5), TaskScore(3.0, 0.5), (worse, TaskScore(3.0, 0.5)),
            (TaskScore(1.0, 1.0),) * 2, known=4,
        ),
    )  # fmt: skip
    found = Comparison(("a", "b"), tasks)
    text = str(found)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[lines.index("model average <b>math code") :][1:6] == [
        "a 75% (50%) 50% (50%) 100% (-)",
        "expert <b>math 50% (100%) 100% (100%) 0% (-)",
        "b 50% (-50%) 0% (-50%) 100% (-)",
        "base 38% (0%) 25% (0%) 50% (-)",
        "expert code 25% (-100%) 0% (-100%) 50% (-)",
    ]
    assert "a 3.0000 1.0000" in lines and "code 5 4 4 70" in lines
    assert "no gain to keep: x/code." in text and "show no answer all tokens are scored" in text
    assert max(map(len, text.splitlines())) <= 100
    written = json.loads(found.to_json())
    assert written["ranking"][0] == {"model": "a", "exact": 0.75, "kept": 0.5}
    assert written["tasks"][0]["merged"]["b"] == {"loss": 5.0, "exact": 0.0, "kept": -0.5}
    assert written["tasks"][0]["experts"]["x/code"] == {"loss": 6.0, "exact": 0.0, "kept": -1.0}
    assert written["tasks"][1]["merged"]["a"]["kept"] is None
    found.plot().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    frame = found.to_frame().set_index(["task", "model"])
    assert len(frame) == 10 and repr(found) == text
    assert frame.loc[("<b>math", "b")].tolist() == [0.0, -0.5, 5.0]
    assert frame.loc["code"].isna().all().tolist() == [False, True, False]


def test_without_answers_the_gain_ranks_and_without_both_there_is_no_figure() -> None:
    base, expert, other = TaskScore(4.0, None), TaskScore(2.0, None), TaskScore(3.0, None)
    found = Comparison(("a",), (TaskComparison("math", 5, 60, 0, base, expert, (expert,), (other,)),))
    assert [model.model for model in found.ranking] == ["expert math", "a", "base"]
    assert " ".join(str(found).splitlines()[5].split()) == "a 50% 50%"
    idle = Comparison(("a",), (TaskComparison("math", 5, 60, 0, expert, base, (base,), (other,)),))
    assert [model.model for model in idle.ranking] == ["base", "a", "expert math"]  # by likelihood
    assert str(idle).startswith("Negative log-likelihood")  # nothing to rank by
    with pytest.raises(SltaError, match="nothing to draw"):
        idle.plot()


def test_a_recipe_of_another_method_is_compared_on_the_data_that_it_names(paired: Family, tmp_path: Path) -> None:
    own = families.recipe(paired, "ties", samples=SAMPLES, max_tokens=24, normalize=True, per_expert={"weight": 1.0})
    found = evaluate(Recipe.parse(json.dumps(own), "ties.yml"), families.merge(own, tmp_path / "out"), quiet=True)
    assert found.tasks == evaluate(recipe_of(paired), tmp_path / "out", quiet=True).tasks
    shared = families.recipe(paired, "ties", experts=[0], samples=SAMPLES, max_tokens=24)
    shared["parameters"] |= shared["models"][0].pop("parameters")
    (task,) = evaluate(Recipe.parse(json.dumps(shared), "ties.yml"), tmp_path / "out", quiet=True).tasks
    assert task.merged == found.tasks[0].merged
    del own["base_model"]
    with pytest.raises(SltaError, match="no base_model"):
        evaluate(Recipe.parse(json.dumps(own), "linear.yml"), paired.base, quiet=True)


@pytest.mark.parametrize("command", ["evaluate", "compare"])
def test_the_commands_write_tables_json_and_figure(command: str, paired: Family, tmp_path: Path) -> None:
    recipe = families.write_recipe(tmp_path / "recipe.yml", families.recipe(paired, samples=2, max_tokens=24))
    arguments = [command, recipe, paired.experts[1], "--samples", "3", "--json", tmp_path / "c.json", "--quiet"]
    more = [paired.experts[0], "--figure", tmp_path / "c.png"] if command == "compare" else []
    done = CliRunner().invoke(main, [str(argument) for argument in [*arguments, *more]])
    assert done.exit_code == 0, done.output
    assert "expert expert1" in done.stdout and "0% = base model" in done.stdout
    assert (tmp_path / "c.png").exists() == (command == "compare")
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["tasks"][1]["merged"][str(paired.experts[1])]["kept"] in (1.0, None)


# Refusals


def test_one_folder_is_enough_and_none_is_refused(paired: Family) -> None:
    merged = str(paired.experts[0])
    found = compare(recipe_of(paired), merged, samples=2, quiet=True)
    assert found.to_json() == compare(recipe_of(paired), [merged], samples=2, quiet=True).to_json()
    with pytest.raises(SltaError, match="No merged model is named to compare"):
        compare(recipe_of(paired), [], quiet=True)


def test_experts_without_records_to_hold_out_are_refused(paired: Family) -> None:
    with pytest.raises(SltaError, match="The expert x has no 'calibration'"):
        evaluate(Recipe(paired.base, ["x"]), paired.base, quiet=True)
    opened = families.experiment(families.recipe(paired, calibration=False, statistics="stats.safetensors"))
    with pytest.raises(SltaError) as caught:
        evaluate(opened, paired.base)
    assert "statistics" not in caught.value.message
    with pytest.raises(SltaError, match="no record to hold out"):
        evaluate(recipe_of(paired, samples=RECORDS), paired.base, quiet=True)


def test_a_model_that_lacks_tokens_is_refused(paired: Family, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(families.config_of("llama", vocab_size=4)).save_pretrained(tmp_path)
    with pytest.raises(SltaError, match="knows only 4 tokens"):
        evaluate(recipe_of(paired), tmp_path, quiet=True)
