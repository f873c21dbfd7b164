"""Comparisons: every number by an independent forward pass, the answers by greedy decoding, no model run twice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import MakeFamily
from support import families
from support.families import Family
from transformers import AutoTokenizer

import mergekit_slta
from mergekit_slta.cli.commands import main
from mergekit_slta.comparison.compare import Comparison, TaskComparison, TaskScore, compare
from mergekit_slta.errors import SltaError
from mergekit_slta.evaluate import evaluate
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.reports import comparison
from mergekit_slta.reports.figures import LEGEND_LENGTH, Matrix, Picture, heat_map

RECORDS = 8
CHAT = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def write_pairs(family: Family, record: Callable[[str, str], dict[str, Any]]) -> None:
    """Give each task pairs of a question and an answer of two letters."""
    for task, file in enumerate(family.data):
        letters = families.ALPHABETS[task].strip()
        pairs = [(letters[i % 9] * 3 + letters[i // 9], letters[i % 7] + letters[(i + 1) % 7]) for i in range(RECORDS)]
        file.write_text("".join(json.dumps(record(*pair)) + "\n" for pair in pairs))


def recipe_of(family: Family, **settings: Any) -> Recipe:
    data = dict(zip(map(str, family.experts), family.data, strict=True))
    return Recipe(family.base, data, **{"samples": 2, "max_tokens": 24} | settings)


@pytest.fixture
def paired(make_family: MakeFamily) -> Family:
    family = make_family()
    write_pairs(family, lambda question, answer: {"question": question, "answer": answer})
    return family


def dense(model: torch.nn.Module, row: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([row])).logits[0]
    return logits


def test_all_models_stand_side_by_side(paired: Family, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc jkl\n" * 9)
    outs = [paired.experts[1], paired.base]
    found = compare(recipe_of(paired), outs, samples=4, text=text, quiet=True)
    assert found.merged == tuple(map(str, outs))  # beside the expert and the base model of these names
    models = {"base": paired.model(0), "expert0": paired.model(1), "expert1": paired.model(2)}
    tokenizer = AutoTokenizer.from_pretrained(paired.base)
    experiment = families.Experiment(recipe_of(paired), quiet=True)
    for index, task in enumerate(found.tasks):
        expert = experiment.recipe.experts[index]
        data = experiment.samples.held_out(expert, 4)
        rows = [list(row) for row in data.token_ids]
        records = [json.loads(line) for line in paired.data[index].read_text().splitlines()]
        assert (task.model, task.records, task.answers) == (f"expert{index}", 4, 4)
        assert task.tokens == sum(len(row) - 1 for row in rows)

        used = [records[i] for i in data.records]

        def score(model: torch.nn.Module, rows: Any = rows, used: Any = used) -> TaskScore:
            losses = [-dense(model, row).log_softmax(-1)[range(len(row) - 1), row[1:]] for row in rows]
            exact = []
            for row, record in zip(rows, used, strict=True):
                prompt = tokenizer(record["question"] + "\n")["input_ids"][:-1]
                decoded, answer = list(prompt), tokenizer(record["answer"], add_special_tokens=False)["input_ids"]
                assert row == [*prompt, *answer, families.EOS]
                for _ in answer:
                    decoded.append(int(dense(model, decoded)[-1].argmax()))
                exact.append(decoded[len(prompt) :] == answer)
            return TaskScore(float(torch.cat(losses).mean()), sum(exact) / len(exact))

        pairs = {
            "base": task.base,
            f"expert{index}": task.expert,
            "expert1": task.merged[0],
        }
        for name, got in pairs.items():
            assert got.loss == pytest.approx(score(models[name]).loss, rel=1e-5)
            assert got.exact == score(models[name]).exact
        assert task.merged[1] == task.base
        assert task.kept(1) == 0
    ids = tokenizer(text.read_text())["input_ids"]
    pieces = [ids[begin : begin + 24] for begin in range(0, len(ids), 24)]
    assert [name for name, _ in found.perplexity] == ["base", "expert0", "expert1", *map(str, outs)]
    assert json.loads(found.to_json())["perplexity"] == dict(found.perplexity)
    for name, value in found.perplexity:
        losses = [-dense(models[Path(name).name], row).log_softmax(-1)[range(len(row) - 1), row[1:]] for row in pieces]
        assert value == pytest.approx(math.exp(float(torch.cat(losses).mean())), rel=1e-5)


def test_exact_answers_are_counted_for_a_model_that_knows_them(paired: Family) -> None:
    """An expert that has learned the pairs by heart, beside a base model that has not."""
    model: Any = families.AutoModelForCausalLM.from_pretrained(paired.base)
    tokenizer = AutoTokenizer.from_pretrained(paired.base)
    records = [json.loads(line) for line in paired.data[0].read_text().splitlines()]
    ids = torch.tensor([tokenizer(f"{r['question']}\n{r['answer']}")["input_ids"] for r in records])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(paired.experts[0])
    (task, _) = compare(recipe_of(paired), [paired.experts[0]], quiet=True).tasks
    assert task.expert.exact == task.merged[0].exact == 1.0
    assert task.base.exact is not None and task.base.exact < 0.5


@pytest.mark.parametrize(
    ("record", "settings", "answers"),
    [
        (lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}, {}, 6),
        (lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}, {}, 6),
        (lambda q, a: {"messages": [{"role": "user", "content": q}]}, {}, 0),
        (lambda q, a: {"text": f"{q}\n{a}"}, {}, 0),
        (lambda q, a: {"instruction": q, "input": "", "output": a}, {}, 6),
        (lambda q, a: {"prompt": q, "completion": 9 * "abcd"}, {"max_tokens": 100}, 0),  # too long an answer
        (lambda q, a: {"prompt": q, "completion": a}, {"max_tokens": 6}, 0),  # which is cut off
    ],
)
def test_which_records_have_a_short_answer(
    make_family: MakeFamily, record: Any, settings: dict[str, Any], answers: int
) -> None:
    family = make_family(chat_template=CHAT)
    write_pairs(family, record)
    experiment = families.Experiment(recipe_of(family, **{"max_tokens": 100} | settings), quiet=True)
    (task, _) = compare(experiment, [family.base]).tasks
    assert task.answers == answers
    expert = experiment.recipe.experts[0]
    data = experiment.samples.held_out(expert, 10)
    tokenizer = AutoTokenizer.from_pretrained(family.base)
    for row, span in zip(data.token_ids, data.answers, strict=True):
        if answers and span:
            assert len(str(tokenizer.decode(list(row[slice(*span)]))).replace(" ", "")) == 2


def test_a_template_ends_with_its_answer(paired: Family) -> None:
    template = "{question}={answer}"
    pairs = zip(map(str, paired.experts), paired.data, strict=True)
    experts = {expert: {"calibration": data, "template": template} for expert, data in pairs}
    recipe = Recipe(paired.base, experts, samples=2)
    assert [task.answers for task in compare(recipe, [paired.base], quiet=True).tasks] == [6, 6]


def test_a_model_that_is_done_is_not_run_again(paired: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    score = mergekit_slta.comparison.compare.score_model

    def watched(checkpoint: Any, *arguments: Any, **more: Any) -> Any:
        if len(runs) == 2 and not (tmp_path / "again").exists():
            (tmp_path / "again").touch()
            raise KeyboardInterrupt
        runs.append(Path(checkpoint.folder).name)
        return score(checkpoint, *arguments, **more)

    monkeypatch.setattr("mergekit_slta.comparison.compare.score_model", watched)
    with pytest.raises(KeyboardInterrupt):
        compare(recipe_of(paired), [paired.experts[1]], quiet=True)
    assert runs == ["base", "expert0"]
    found = compare(recipe_of(paired), [paired.experts[1]], quiet=True)
    assert runs == ["base", "expert0", "expert1", "expert1"]  # alone, then on both tasks
    assert compare(recipe_of(paired), [paired.experts[1]], quiet=True) == found and len(runs) == 4
    single = evaluate(recipe_of(paired), paired.experts[1], quiet=True)
    assert len(runs) == 4 and [task.merged for task in single.tasks] == [t.merged[0].loss for t in found.tasks]
    compare(recipe_of(paired), [paired.experts[1]], samples=1, quiet=True)
    assert len(runs) == 8  # other records


def test_a_merge_that_is_written_anew_is_run_again(paired: Family, tmp_path: Path) -> None:
    out = tmp_path / "out"
    content = families.recipe(paired, "actmat", calibration=False)
    first = compare(recipe_of(paired), [families.merge(content, out)], quiet=True)
    families.merge(content | {"parameters": {"scale": 0.5}}, out)
    second = compare(recipe_of(paired), [out], quiet=True)
    assert first.tasks[0].base == second.tasks[0].base
    assert first.tasks[0].merged != second.tasks[0].merged


def test_a_comparison_shows_itself(tmp_path: Path) -> None:
    score = TaskScore(4.0, 0.25), TaskScore(2.0, 1.0), (TaskScore(3.0, 0.5), TaskScore(5.0, 0.0))
    tasks = (
        TaskComparison("org/math", 5, 60, 4, *score),
        TaskComparison("org/code", 5, 70, 0, TaskScore(2.0, None), TaskScore(3.0, None), (TaskScore(1.0, None),) * 2),
    )
    found = Comparison(("a", "b"), tasks, (("base", 3.0),))
    text = str(found)
    header, row = [" ".join(line.split()) for line in text.splitlines()[2:4]]
    assert header == "task of records tokens base expert a gain kept b gain kept"
    assert row == "org/math 5 60 4.0000 2.0000 3.0000 50.0% 5.0000 -50.0%"
    assert "org/math        4  25.0%  100.0%  50.0%  0.0%" in text
    assert "3.0000" in text and "no gain to keep: org/code." in text
    written = json.loads(found.to_json())
    assert written["tasks"][0]["merged"]["b"] == {"loss": 5.0, "exact": 0.0, "kept": -0.5}
    assert written["tasks"][1]["merged"]["a"]["kept"] is None and written["perplexity"] == {"base": 3.0}
    assert "<table>" in found._repr_html_() and "no separate short answer" not in text
    assert str(Comparison(("a", "b"), tasks[1:])).endswith("would be scored by exact matches too.")
    assert mergekit_slta.write_comparison(found, tmp_path / "figure.png") == tmp_path / "figure.png"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_leaves_out_what_no_model_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def titles(matrices: Sequence[Matrix], **options: Any) -> Picture:
        drawn[:] = [matrix.title for matrix in matrices]
        return heat_map(matrices, **options)

    monkeypatch.setattr(comparison, "heat_map", titles)
    gain, none = (TaskScore(3.0, 0.5), TaskScore(2.0, 1.0)), (TaskScore(2.0, 0.5), TaskScore(3.0, 1.0))
    for scores, answers, expected in (
        (gain, 4, ["The expert's gain that is kept", "Short answers given exactly"]),
        (gain, 0, ["The expert's gain that is kept"]),
        (none, 4, ["Short answers given exactly"]),
        (none, 0, ["The expert's gain that is kept"]),
    ):
        task = TaskComparison("org/math", 5, 60, answers, *scores, (TaskScore(2.5, 0.5),))
        comparison.write_comparison(Comparison(("a",), (task,)), tmp_path / "figure.png")
        assert drawn == expected
        assert all(len(title) <= LEGEND_LENGTH for title in drawn)  # longer ones lose their middle


def test_the_command_writes_table_json_and_figure(paired: Family, tmp_path: Path) -> None:
    content = families.recipe(paired, samples=2, max_tokens=24)
    recipe = families.write_recipe(tmp_path / "recipe.yml", content)
    text = tmp_path / "text.txt"
    text.write_text("abc")
    more = ["--samples", "3", "--text", text, "--json", tmp_path / "c.json", "--figure", tmp_path / "c.png", "--quiet"]
    arguments = ["compare", recipe, *paired.experts, *more]
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert "expert1" in done.stdout and "Perplexity" in done.stdout and "Short answers" in done.stdout
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["tasks"][1]["merged"][str(paired.experts[1])]["kept"] in (1.0, None)
    assert (tmp_path / "c.png").stat().st_size > 1000


@pytest.mark.parametrize("text", [b"", b"\xff\xff"])
def test_a_text_without_tokens_is_refused(paired: Family, tmp_path: Path, text: bytes) -> None:
    (tmp_path / "text.txt").write_bytes(text)
    for file in paired.base.glob("tokenizer.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    with pytest.raises(SltaError, match=r"text\.txt (cannot be read|has fewer than two tokens)"):
        compare(recipe_of(paired), [paired.base], text=tmp_path / "text.txt", quiet=True)


def test_nothing_to_compare_is_refused(paired: Family) -> None:
    with pytest.raises(SltaError, match="nothing to compare"):
        compare(recipe_of(paired), [], quiet=True)


def test_a_merged_model_that_is_named_twice_is_refused(paired: Family) -> None:
    again = paired.base.parent / "expert0" / ".." / "base"
    with pytest.raises(SltaError, match=f"The merged model {paired.base} is named twice: name each once"):
        compare(recipe_of(paired), [paired.base, paired.experts[0], again], quiet=True)
