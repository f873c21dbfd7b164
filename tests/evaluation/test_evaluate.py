"""Evaluations: every number by an independent forward pass, the answers by greedy decoding."""

import json
import os
import random
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import MakeFamily
from evaluation.test_scores import reference
from support import families
from support.calibration_samples import BOS, EOS, spelled, write_jsonl, write_scripted
from support.copies import edit_tensors
from support.examining import swap_ids
from support.families import Family
from support.rounding import IN_FLOAT64, state_rounding
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_slta.errors import SltaError
from mergekit_slta.evaluation import evaluate as module
from mergekit_slta.evaluation.evaluate import Comparison, TaskComparison, TaskScore, evaluate
from mergekit_slta.evaluation.scores import Sample
from mergekit_slta.files import MANIFEST_OF_MERGE, RECIPE_OF_MERGE
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.slta.measure import measure

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
    return families.recipe_of(family.base, data, **{"samples": SAMPLES, "max_tokens": 24} | settings)


@pytest.fixture
def paired(make_family: MakeFamily) -> Family:
    family = make_family()
    write_pairs(family, lambda question, answer: {"question": question, "answer": answer})
    return family


def test_all_models_stand_side_by_side(paired: Family) -> None:
    outs = [paired.experts[1], paired.base]
    found = evaluate(recipe_of(paired), outs, samples=4, quiet=True)
    merged = [str(out) for out in outs]  # beside the expert and the base model of these names
    assert list(found.tasks) == ["expert0", "expert1"]
    models = dict(zip(("base model", "expert expert0", "expert expert1"), paired.models(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(paired.base)
    for index, task in enumerate(found.tasks.values()):
        samples, records = [], [json.loads(line) for line in paired.data[index].read_text().splitlines()]
        for record in random.Random(0).sample(records, len(records))[SAMPLES : SAMPLES + 4]:  # after the calibration's
            prompt = tokenizer(record["question"] + "\n")["input_ids"][:-1]
            answer = tokenizer(record["answer"], add_special_tokens=False)["input_ids"]
            samples.append(Sample((*prompt, *answer), len(prompt), len(prompt) + len(answer)))
        assert (task.model, task.prompts, task.short_answers) == (f"expert{index}", 4, 4)
        assert task.tokens == sum(sample.end - sample.begin for sample in samples)
        assert list(task.scores) == [*models, *merged]
        for name, model in models.items():
            losses, likeliest, exact = zip(*reference(model, samples), strict=True)
            assert task.scores[name].loss == pytest.approx(sum(losses) / task.tokens, abs=state_rounding())
            assert task.scores[name].accuracy == sum(exact) / 4
            assert task.mean(name) == pytest.approx(task.scores[name].token_accuracy, abs=IN_FLOAT64)  # too few
            right = [
                sum(one == sample.token_ids[sample.begin + place] for place, one in enumerate(found[:-1]))
                for sample, found in zip(samples, likeliest, strict=True)
            ]
            assert task.scores[name].token_accuracy == sum(right) / task.tokens
        scores = [task.scores[name] for name in ("expert expert1", "base model")]
        assert [task.scores[name] for name in merged] == scores
        loss = {name: score.loss for name, score in task.scores.items()}
        gain = loss["base model"] - loss[f"expert expert{index}"]
        kept = [
            pytest.approx((loss["base model"] - own) / gain, abs=IN_FLOAT64) if gain > 0 else None
            for own in loss.values()
        ]
        assert [score.gain_kept for score in task.scores.values()] == kept


def test_what_is_kept_of_the_base_model_is_measured_on_its_own_records(paired: Family) -> None:
    sources = {str(paired.experts[0]): paired.data[0], str(paired.base): paired.data[1]}
    content = families.recipe_of(paired.base, sources, samples=SAMPLES, max_tokens=24, level="layer")
    outs = [paired.experts[0], paired.base, paired.experts[1]]
    found = evaluate(content, outs, samples=4, quiet=True)
    whole = evaluate(recipe_of(paired), paired.experts[0], samples=4, quiet=True).tasks["expert1"].scores
    assert list(found.tasks) == ["expert0", "base model"]
    keep = found.tasks["base model"]
    base, expert, *merged = keep.scores.values()
    assert base.loss == pytest.approx(whole["base model"].loss, abs=state_rounding())
    assert expert.loss == merged[0].loss == pytest.approx(whole["expert expert0"].loss, abs=state_rounding())
    lost = expert.loss - base.loss
    kept = [0, 1, pytest.approx((expert.loss - merged[2].loss) / lost, abs=IN_FLOAT64)] if lost > 0 else [None] * 3
    assert [score.gain_kept for score in merged] == kept
    assert base.accuracy in (1.0, None)  # of the answers that the base model gives
    assert "the gain kept is 1 for the base model" in str(found)


ANSWER, OTHER = "a is 1", "b is 3"


def test_answers_that_are_lost_and_gained_are_counted_and_so_are_those_that_end(tmp_path: Path) -> None:
    """Models that say a script after every prompt of one letter."""

    def model(name: str, says: str, ends: bool = True) -> Path:
        return write_scripted(tmp_path / name, [BOS, *spelled(f"x\n{says}"), EOS if ends else spelled(".")[0]], None)

    pairs = [(letter, ANSWER if number % 3 else ANSWER.replace("1", "2")) for number, letter in enumerate("abcdefghi")]
    of_base = [(letter, OTHER if letter < "w" else ANSWER) for letter in string.ascii_lowercase]
    records = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
    sources = (
        write_jsonl(tmp_path / "a.jsonl", records),
        write_jsonl(tmp_path / "b.jsonl", [{"prompt": prompt, "completion": answer} for prompt, answer in of_base]),
    )
    held_out = random.Random(0).sample(pairs, len(pairs))[1:]
    ones, twos = (sum(letter in answer for _, answer in held_out) for letter in "12")
    assert ones > 1 and twos > 1
    others = sum(answer == OTHER for _, answer in random.Random(0).sample(of_base, len(of_base))[1:])
    base, expert = model("base", OTHER), model("expert", ANSWER)
    outs = [
        model("other", ANSWER.replace("1", "2")),
        model("broken", ANSWER.replace("a", "b")),
        model("endless", ANSWER, ends=False),
    ]
    content = families.recipe_of(base, {str(expert): sources[0], str(base): sources[1]}, samples=1, max_tokens=30)
    tasks = evaluate(content, outs, quiet=True).tasks
    task, keep = tasks["expert"], tasks["base model"]
    assert (task.ended_answers, task.short_answers, keep.ended_answers, keep.short_answers) == (8, 8, 25, others)

    def of(task: TaskComparison, name: str) -> tuple[float | None, int, int, float | None]:
        score = task.scores[name]
        return score.accuracy, score.lost, score.gained, score.ended

    assert of(task, "base model") == (0, ones, 0, 1)
    assert of(task, "expert expert") == (ones / 8, 0, 0, 1)
    assert of(task, "other") == (twos / 8, ones, twos, 1)
    assert of(task, "broken") == (0, ones, 0, 1)
    assert of(task, "endless") == (ones / 8, 0, 0, 0)
    assert of(keep, "base model") == (1, 0, 0, 1)
    assert of(keep, "expert expert") == (0, others, 25 - others, 1)
    # Of the base model's prompts, those count that it answers itself.
    assert keep.points == {name: [keep.scores[name].accuracy] * others for name in keep.scores}
    # The last letter of the five others is wrong where the answer has the other number, and "a" is a letter of six.
    letters = {"expert expert": 6 * ones + 5 * twos, "other": 5 * ones + 6 * twos, "broken": 5 * ones + 4 * twos}
    assert all(task.scores[name].token_accuracy == count / 48 for name, count in letters.items())


def test_a_model_ends_with_the_end_token_of_any_model(tmp_path: Path) -> None:
    """Base and fine-tune often have different ones; `ask` writes them into an answer whose tokenizer adds none."""
    base, expert = (
        write_scripted(tmp_path / name, [BOS, *spelled("xx\nyes"), *end, EOS], None)
        for name, end in (("base", []), ("expert", spelled(".")))
    )
    tokenizer = AutoTokenizer.from_pretrained(expert)
    tokenizer.eos_token = "."
    tokenizer.save_pretrained(expert)
    rows = [{"prompt": 2 * letter, "completion": f"yes{'</s>' * (letter < 'd')}"} for letter in "abcdef"]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    task = evaluate(families.recipe_of(base, {str(expert): source}, samples=1), base, quiet=True).tasks["expert"]
    assert task.ended_answers == task.short_answers == task.prompts > 3
    assert {(score.accuracy, score.ended) for score in task.scores.values()} == {(1.0, 1.0)}


def test_an_answer_of_the_second_token_is_known(tmp_path: Path) -> None:
    """A prompt of one token, where the tokenizer adds none at the beginning."""
    base, expert = (write_scripted(tmp_path / name, [BOS, *spelled("abcd"), EOS], None) for name in ("base", "expert"))
    for folder in (base, expert):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        only_ends = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
        tokenizer.backend_tokenizer.post_processor = only_ends
        tokenizer.save_pretrained(folder)
    records = [{"prompt": "a ", "completion": f"b{n}"} for n in range(3)] + [{"prompt": "\n", "completion": "b"}]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    task = evaluate(families.recipe_of(base, {str(expert): source}, samples=1), expert, quiet=True).tasks["expert"]
    assert (task.prompts, task.answers) == (3, 3)
    assert "Without a known answer" not in str(Comparison({"expert": task}))


@pytest.mark.parametrize(("right", "number"), [(0, 20), (15, 20), (50, 50), (77, 100)])
def test_an_interval_holds_the_shares_that_would_give_this_one(right: int, number: int) -> None:
    """Wilson's: at its limits, the share that was found is 1.96 standard deviations away."""
    limits = module.interval(right / number, number)
    for limit in limits:
        variance = limit * (1 - limit) / number
        assert (right / number - limit) ** 2 == pytest.approx(1.96**2 * variance, abs=IN_FLOAT64)
    assert limits[0] <= right / number <= limits[1]


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
    found = evaluate(recipe_of(family, **{"max_tokens": 100} | settings), family.base, quiet=True)
    assert found.tasks["expert0"].short_answers == answers


Row = tuple[str, float | None, float | None, float]


def scores_of(
    *rows: Row, changes: tuple[int, int] = (0, 0), ended: float | None = None, width: float | None = None
) -> dict[str, TaskScore]:
    found = {}
    for name, accuracy, gain_kept, loss in rows:
        low, high = (None, None) if width is None or accuracy is None else (accuracy - width, accuracy + width)
        found[name] = TaskScore(accuracy, low, high, *changes, ended, loss / 10, gain_kept, loss)
    return found


def compared(few: bool) -> Comparison:
    """Two tasks, of which the first has few short answers or enough."""
    return Comparison({
        "<b>math": TaskComparison("x/<b>math", 50, 50, 4 if few else 40, 2, 60, scores_of(
            ("base model", 0.25, 0.0, 4.0), ("expert <b>math", 1.0, 1.0, 2.0), ("expert code", 0.0, -1.0, 6.0),
            ("a", 0.5, 0.5, 3.0), ("b", 0.0, -0.5, 5.0), changes=(2, 1), ended=0.5, width=None if few else 0.1,
        ), {}),
        "code": TaskComparison("x/code", 50, 40, 30, 0, 70, scores_of(
            ("base model", 0.5, None, 2.0), ("expert <b>math", 0.0, None, 6.0), ("expert code", 0.2, None, 3.0),
            ("a", 1.0, None, 1.0), ("b", 1.0, None, 1.0), changes=(10, 0), width=0.0,
        ), {}),
    }, ("words",))  # fmt: skip


def test_the_table_ranks_all_models_by_their_exact_answers_and_shows_likelihoods_apart() -> None:
    found = compared(few=False)
    text = str(found)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    header = "model average <b>math code"
    answers = lines.index("model average lost gained <b>math (n=40) code (n=30)")
    assert lines[answers + 1 : answers + 6] == [
        "a 0.75 12 1 0.50 (0.40–0.60) 1.00 (1.00–1.00)",
        "expert <b>math 0.50 12 1 1.00 (0.90–1.10) 0.00 (0.00–0.00)",
        "b 0.50 12 1 0.00 (−0.10–0.10) 1.00 (1.00–1.00)",
        "base model 0.38 12 1 0.25 (0.15–0.35) 0.50 (0.50–0.50)",
        "expert code 0.10 12 1 0.00 (−0.10–0.10) 0.20 (0.20–0.20)",
    ]
    tokens = lines.index(header, answers)
    ended = lines.index(header, tokens + 1)
    gains = lines.index(header, ended + 1)
    assert lines[tokens + 1] == "a 0.20 0.30 0.10" and lines[ended + 1] == "a 0.50 0.50 –"
    assert lines[gains + 1 : gains + 4] == ["a 0.50 0.50 –", "expert <b>math 1.00 1.00 –", "b −0.50 −0.50 –"]
    assert "a 2.0000 3.0000 1.0000" in lines and "code 50 40 30 0 70" in lines
    joined = " ".join(text.split())
    for said in (
        "because all prompts calibrate: words. Name test data with `evaluation`, set fewer `samples` in",
        "By likelihood, the expert is hardly or no better than the base model, so it has no gain, on: code.",
        "all tokens of a prompt are scored",
        "On their own tasks these experts give under half of the short answers: code.",
    ):
        assert said in joined
    written = json.loads(json.dumps(found.content()))
    of_a: dict[str, Any] = {"accuracy": 0.75, "accuracy_low": None, "accuracy_high": None, "lost": 12, "gained": 1}
    of_a |= {"ended": 0.5, "token_accuracy": (0.3 + 0.1) / 2, "gain_kept": 0.5, "loss": 2.0}
    assert written["ranking"][0] == {"model": "a"} | of_a
    assert written["tasks"]["code"]["scores"]["a"]["gain_kept"] is None


def test_a_task_counts_in_the_mean_gain_by_its_experts_gain() -> None:
    """Of the second task nothing can be kept, of the third little: a thousandth and a tenth of a nat."""
    expert = ("expert a", None, 1.0, 2.0)
    of_a = scores_of(("base model", None, 0.0, 3.0), expert, ("expert b", None, 0.0, 3.0), ("merge", None, 0.5, 2.5))
    of_b = scores_of(("base model", None, 0.0, 2.001), expert, ("expert b", None, 1.0, 2.0), ("merge", None, -9, 2.01))
    others = [(f"expert {name}", None, 1.0, 2.0) for name in "bc"]
    of_c = scores_of(("base model", None, 0.0, 2.1), expert, *others, ("merge", None, -1, 2.2))
    scores = {"a": of_a, "b": of_b, "c": of_c}
    found = Comparison({name: TaskComparison(name, 9, 9, 0, 0, 9, of) for name, of in scores.items()})
    assert found.ranking["merge"].gain_kept == pytest.approx((0.5 - 0.1) / 1.1, abs=IN_FLOAT64)


def test_few_short_answers_rank_no_model_and_are_no_part_of_its_mean() -> None:
    found = compared(few=True)
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    answers = lines.index("model average lost gained <b>math (n=4, too few) code (n=30)")
    assert lines[answers + 1 : answers + 3] == [
        "expert <b>math 0.00 12 1 1.00 0.00 (0.00–0.00)",
        "a 1.00 12 1 0.50 1.00 (1.00–1.00)",
    ]
    assert found.ranking["a"].accuracy == 1.0
    only = Comparison({"<b>math": found.tasks["<b>math"]})
    assert only.ranking["a"].accuracy is None and "a – 2 1 0.50" in [" ".join(s.split()) for s in str(only).split("\n")]


def test_without_answers_the_gain_ranks_and_without_both_the_likelihood() -> None:
    rows: list[Row] = [("base model", None, 0.0, 4.0), ("expert math", None, 1.0, 2.0), ("a", None, 0.5, 3.0)]
    found = Comparison({"math": TaskComparison("math", 5, 5, 0, 5, 60, scores_of(*rows, ended=1.0), {})})
    assert list(found.ranking) == ["expert math", "a", "base model"]
    assert "a 0.50 0.50" in [" ".join(line.split()) for line in str(found).splitlines()]
    assert "No accuracy on math: all answers have more than 32 tokens." in str(found)
    assert "Accuracy:" not in str(found) and "Ended:" not in str(found)
    rows = [("base model", None, None, 2.0), ("expert math", None, None, 4.0), ("a", None, None, 3.0)]
    idle = Comparison({"math": TaskComparison("math", 5, 5, 0, 0, 60, scores_of(*rows), {})})
    assert list(idle.ranking) == ["base model", "a", "expert math"]  # by likelihood


def linked(file: str) -> str:
    link = Path(file).with_suffix(".link.jsonl")
    link.symlink_to(file)
    return str(link)


def copied(file: str) -> str:
    return str(shutil.copy(file, Path(file).with_suffix(".copy.jsonl")))


@pytest.mark.parametrize(
    "spelled_otherwise", [os.path.relpath, linked, lambda file: f"~/{os.path.relpath(file, Path.home())}", copied]
)
def test_no_merge_is_scored_on_prompts_that_it_was_calibrated_on(
    spelled_otherwise: Callable[[str], str], paired: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other numbers of prompts or another seed, merges of one recipe use other prompts of the same files."""
    settings: list[dict[str, Any]] = [{"samples": SAMPLES}, {"samples": SAMPLES + 1}, {"samples": SAMPLES, "seed": 1}]
    contents = [families.recipe(paired, max_tokens=24, **own) for own in settings]
    merged = []
    monkeypatch.setenv("HOME", str(tmp_path))  # a user's may be behind a link
    for number, content in enumerate(contents):
        for entry in content["models"] if number == 1 else ():
            entry["parameters"]["calibration"] = spelled_otherwise(entry["parameters"]["calibration"])
        merged.append(Path(shutil.copytree(paired.experts[0], tmp_path / str(number))))
        families.write_recipe(tmp_path / f"{number}.yml", content)
        families.write_recipe(merged[-1] / RECIPE_OF_MERGE, content)
    tasks = evaluate(tmp_path / "0.yml", merged, samples=RECORDS, quiet=True).tasks
    for index, task in enumerate(families.experiment(contents[0]).recipe.experts):
        used = {
            row for own in contents for row in families.experiment(own).draw(task, own["parameters"]["samples"]).records
        }
        assert len(used) > SAMPLES and tasks[f"expert{index}"].prompts == RECORDS - len(used)


def test_what_another_task_has_calibrated_is_not_held_out(paired: Family) -> None:
    with paired.data[0].open("a") as file:
        file.write("\n" + paired.data[1].read_text())
    experiment = families.experiment(recipe_of(paired).content)
    used = {row for data in experiment.load_data(experiment.recipe.tasks) for row in data.token_ids}
    assert used.isdisjoint(experiment.held_out(experiment.recipe.tasks[0], 2 * RECORDS).token_ids)


def test_prompts_that_have_changed_since_a_merge_are_not_held_out(
    paired: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be drawn in another order than then; test data of their own are as they are."""
    content, data = recipe_of(paired).content, paired.data[0]
    out = families.merge(content, tmp_path / "out", write_model_card=True)
    test_data = shutil.copy(data, tmp_path / "test.jsonl")
    data.write_text(f"{data.read_text()}\n{json.dumps({'question': 'new', 'answer': '1'})}")
    with pytest.raises(SltaError, match=rf"The prompts '{data}' are not those that calibrated .*out: "):
        evaluate(Recipe(content), out, quiet=True)
    content["models"][0]["parameters"]["evaluation"] = str(test_data)
    assert len(evaluate(Recipe(content), out, quiet=True).tasks) == len(paired.experts)
    assert (other := "was merged with other settings than those of the given recipe.") not in caplog.text
    lines = data.rename(tmp_path / "moved.jsonl").read_text().splitlines()
    (tmp_path / "moved.jsonl").write_text("\n".join(lines[::-1]))
    content["models"][0]["parameters"] |= {"calibration": str(tmp_path / "moved.jsonl"), "samples": SAMPLES + 1}
    evaluate(Recipe(content), out, quiet=True)
    assert f"{data} cannot be read: held-out prompts may have calibrated {out}." in caplog.messages
    assert f"{out} {other}" in caplog.messages
    recipe = yaml.safe_load((out / RECIPE_OF_MERGE).read_text())
    for entry in recipe["models"]:
        del entry["parameters"]["calibration"]
    families.write_recipe(out / RECIPE_OF_MERGE, recipe)
    evaluate(Recipe(content), out, quiet=True)
    assert "A source of prompts that its recipe does not name cannot be read: held-out prompts may" in caplog.text
    (out / MANIFEST_OF_MERGE).unlink()
    (out / MANIFEST_OF_MERGE).mkdir()
    evaluate(Recipe(content), out, quiet=True)
    assert f"The scores could not be added to {out / MANIFEST_OF_MERGE} (IsADirectoryError" in caplog.text


def test_tasks_without_a_record_to_hold_out_are_named_and_the_others_scored(paired: Family) -> None:
    lines = paired.data[1].read_text().splitlines()
    paired.data[1].write_text("\n".join(lines[:SAMPLES]))
    found = evaluate(recipe_of(paired), paired.experts[0], quiet=True)
    assert list(found.tasks) == ["expert0"] and found.unscored == ("expert1",)
    assert "because all prompts calibrate: expert1." in " ".join(str(found).split())
    said = "There is no prompt to evaluate on.*`evaluation`.*60 or more: 30 calibrate.*merge again"
    with pytest.raises(SltaError, match=said):
        evaluate(recipe_of(paired, samples=RECORDS), paired.base, quiet=True)


def test_records_come_from_the_test_data_that_an_expert_names_without_those_that_calibrated(
    paired: Family, tmp_path: Path
) -> None:
    records = [json.loads(line) for line in paired.data[0].read_text().splitlines()]
    drawn = random.Random(0).sample(records, RECORDS)[:SAMPLES]
    others = [{"question": f"{number}", "answer": "ab"} for number in range(3)]
    test_data = write_jsonl(tmp_path / "test.jsonl", [*drawn, *others])
    plain = {str(expert): {"calibration": str(data)} for expert, data in zip(paired.experts, paired.data, strict=True)}
    first = str(paired.experts[0])
    tested = {**plain, first: plain[first] | {"evaluation": test_data}}
    settings: dict[str, Any] = {"samples": SAMPLES, "max_tokens": 24}
    content, without = (families.recipe_of(paired.base, experts, **settings) for experts in (tested, plain))
    found = evaluate(content, paired.experts[1], quiet=True)
    assert [task.prompts for task in found.tasks.values()] == [len(others), RECORDS - SAMPLES]
    assert found.tasks["expert1"] == evaluate(without, paired.experts[1], quiet=True).tasks["expert1"]
    info, other = (measure(recipe, quiet=True).info for recipe in (content, without))
    assert info == other  # test data are no part of a measurement


def test_no_folder_no_records_and_models_of_other_tokens_are_refused(paired: Family, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(families.config_of("llama", vocab_size=4)).save_pretrained(tmp_path)
    swap_ids(shutil.copytree(paired.base, tmp_path / "other"))
    edit_tensors(Path(shutil.copytree(paired.base, tmp_path / "part")), lambda own: own.pop("model.norm.weight"))
    for merged, why in (
        ([], "'merged' names no model"),
        ([tmp_path], "has only 4 tokens"),
        ([tmp_path / "part"], "part lacks model.norm.weight, as some mixtures do"),
        ([tmp_path / "other"], "tokenizers of .*other and the base .* different ids for 2 tokens"),
    ):
        with pytest.raises(SltaError, match=why):
            evaluate(recipe_of(paired), merged, quiet=True)
    with pytest.raises(SltaError, match="The expert x has no 'calibration'"):
        evaluate(families.recipe_of(paired.base, {"x": {}}), paired.base, quiet=True)
    with pytest.raises(SltaError, match="knows slta, featcal; name a recipe for one of them, of the same models"):
        evaluate(Recipe(families.recipe(paired, "actmat", calibration=False)), paired.base, quiet=True)
