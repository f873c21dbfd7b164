"""Statistics and their solutions: parts of them, what they print and write, what they refuse.

Their numbers are tested with the solver, the file with tests/slta/test_statistics_file.py.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import synthetic
from support.calibration_samples import refused
from support.rounding import SOLVED_IN_FLOAT64
from support.synthetic import same

from mergekit_slta.slta import solver
from mergekit_slta.slta.statistics import Statistics

MODELS = ["org/math", "org/code", "org/<b>chat"]
SAMPLES = 4


@pytest.fixture
def statistics() -> Statistics:
    return synthetic.statistics(MODELS, ["layer", "attn_mlp"], layers=2, samples=SAMPLES)


# Parts of them


def test_experts_are_selected_by_name_and_parts_are_sound_files(statistics: Statistics, tmp_path: Path) -> None:
    part = statistics.take([2, 0])
    measured = replace(statistics, paths={"org/math": "/models/zero"})
    for names in (["org/<b>chat", "org/math"], ["<b>chat", "math"], ["<b>chat", "/models/zero"]):  # also as in tables
        assert same(measured.select(*names), part)
    assert same(Statistics.load(part.save(tmp_path / "part.safetensors")), part)


def test_the_first_samples_of_each_task(statistics: Statistics) -> None:
    rows = torch.arange(len(statistics.task)) != 2 * SAMPLES - 1  # the second task has a sample less
    grams = {name: gram[rows] for name, gram in statistics.grams.items()}
    uneven = replace(statistics, grams=grams, task=statistics.task[rows], tokens=statistics.tokens[rows])
    part = uneven.first_samples(SAMPLES)
    assert same(part, uneven)
    part = uneven.first_samples(2)
    assert part.task.tolist() == [0, 0, 1, 1, 2, 2]
    assert all(torch.equal(part.grams[name], gram[[0, 1, 4, 5, 7, 8]]) for name, gram in grams.items())
    one = uneven.take([0]).first_samples(1)
    assert one.summary.startswith("1 prompt of 1 task (7 tokens), submodules: ")
    assert repr(one).splitlines()[1].split() == ["org/math", "1", "7", "task0.jsonl"]


# Solutions


def test_each_submodule_is_solved_alone(statistics: Statistics) -> None:
    settings: dict[str, Any] = {"ridge": 0.1, "balance": False}
    solution = statistics.solve("layer", task_weights={"org/code": 0, "org/<b>chat": 2}, **settings)
    settings["task_weights"] = (1.0, 0.0, 2.0)
    assert list(solution.alpha) == statistics.submodules("layer")
    assert solution.models == tuple(MODELS)
    with_errors = solution.bootstrap(20, seed=3)
    for name in solution.alpha:
        alone = solver.solve(statistics.grams[name], statistics.task, **settings)
        assert torch.equal(solution.alpha[name], alone.alpha)
        assert torch.equal(solution.retained[name], alone.retained)
        assert solution.condition[name] == alone.condition
        draws = solver.bootstrap(statistics.grams[name], statistics.task, 20, seed=3, **settings)
        assert torch.equal(with_errors.alpha_std[name], draws.std(0))
        interval = draws.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64), 0)
        assert torch.allclose(with_errors.intervals(0.8)[name], interval, rtol=0, atol=SOLVED_IN_FLOAT64)


@pytest.mark.parametrize(
    ("levels", "level"), [(["layer", "attn_mlp"], "attn_mlp"), (["layer", "linear"], "layer"), (["model"], "model")]
)
def test_the_level_is_that_of_branches_if_it_was_measured(levels: list[str], level: str) -> None:
    assert synthetic.statistics(MODELS, levels, layers=1).solve().level == level


EACH_ONCE = "one or more of org/math, org/code, org/<b>chat, each once"
REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda it: it.select("org/math", "code3"), "no expert 'code3', only org/math, org/code, org/<b>chat"),
    (lambda it: it.select(["org/code"]), "only org/math, org/code, org/<b>chat. Give each name as an argument of its"),
    (lambda it: it.select("org/code", "code"), EACH_ONCE),
    (lambda it: it.select(), EACH_ONCE),
    (lambda it: it.solve("linear"), "no level 'linear', only layer, attn_mlp"),
    (lambda it: it.solve(ridge=-1.0), "'ridge' is -1.0"),
    (lambda it: it.solve(samples=0), "hold 4 prompts per task"),
    (lambda it: it.solve(task_weights={"org/maths": 1}), "no expert 'org/maths', only org/math, org/code"),
    (lambda it: it.solve(task_weights={"org/code": -3}), "task weight of org/code is -3: give a number"),
    (lambda it: it.solve(task_weights=dict.fromkeys(MODELS, 0)), "at least one task must count"),
    (lambda it: it.solve().bootstrap(1), "from 2 on"),
    (lambda it: it.solve().save_recipe("plain.yml", models={"org/maths": "."}), "no model 'org/maths', only org/llama"),
    (lambda it: it.solve().bootstrap(5).intervals(1.0), "give a number between 0 and 1"),
    (lambda it: it.solve().intervals(0.9), "call bootstrap before intervals"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_nobody_meant_is_refused(call: Callable[[Any], object], words: str, statistics: Statistics) -> None:
    assert words in refused(call, statistics)


def test_it_prints_and_gives_and_draws_the_same_numbers(statistics: Statistics) -> None:
    statistics.grams["layer.1.mlp"].zero_()
    solution = statistics.solve()
    table, legend, note = str(solution).split("\n\n")
    assert table == str(solution.table())
    assert table.splitlines()[0].split() == [
        *("submodule", "alpha", "math", "alpha", "code", "alpha", "<b>chat"),
        *("retained", "math", "retained", "code", "retained", "<b>chat", "condition"),
    ]
    first, *_, last, whole = table.splitlines()[1:]
    assert first.split()[1:4] == [f"{weight:.3f}" for weight in solution.alpha["layer.0.attn"].tolist()]
    assert last.split() == ["layer.1.mlp", *["0.000"] * 3, *["–"] * 4]
    assert whole.split() == ["all", *["–"] * 3, *(f"{share:.2f}" for share in solution.retained_overall.tolist()), "–"]
    assert legend.startswith("math is org/math; code is org/code; <b>chat is org/<b>chat; ")
    assert note.startswith("In 1 of 4 submodules (layer.1.mlp)") and [note] == solution.notes()
    attention, mlp, _ = solution.plot().axes
    for axes, branch in ((attention, "attn"), (mlp, "mlp")):
        drawn = torch.tensor(axes.images[0].get_array()).T  # [layers, T]
        assert torch.equal(drawn, torch.stack([solution.alpha[f"layer.{layer}.{branch}"] for layer in range(2)]))
    statistics.grams["layer.0.mlp"][:, 0] = statistics.grams["layer.0.mlp"][:, :, 0] = 0
    assert "In 2 of 4 submodules" in statistics.solve(ridge=0.1).notes()[-1]  # though a ridge makes them solvable


def test_standard_errors_stand_with_the_weights(statistics: Statistics) -> None:
    solution = statistics.solve()
    with_errors = solution.bootstrap(5)
    shown = [f"{of['layer.0.attn'][0]:.3f}" for of in (solution.alpha, with_errors.alpha_std)]
    assert f"  {' ±'.join(shown)}  " in repr(with_errors).splitlines()[1] and "±" not in repr(solution)


def test_a_solution_is_read_only(statistics: Statistics) -> None:
    """A weight that is set would stand in the table and not in the recipe."""
    solution: Any = statistics.solve("layer").bootstrap(5)
    for mapping in (solution.alpha, solution.retained, solution.alpha_std):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["layer.0"] = torch.zeros(3)


def test_nearly_dependent_experts_are_named(statistics: Statistics) -> None:
    gram = statistics.grams["layer.1.mlp"]
    mixed = torch.eye(3, dtype=torch.float64)
    mixed[2] = torch.tensor([0.0, 1.0, 1e-4])  # the third expert is the second and very little of its own
    statistics.grams["layer.1.mlp"] = mixed @ gram @ mixed.T
    solution = statistics.solve()
    assert 1e6 < solution.condition["layer.1.mlp"] < 1e10
    (note,) = solution.notes()
    assert note.startswith("In 1 of 4 submodules (layer.1.mlp) the experts are nearly linearly dependent")


def test_undefined_numbers_are_null_in_json(statistics: Statistics) -> None:
    statistics.grams["layer.1"].zero_()
    solution = statistics.first_samples(1).solve("layer")
    content = json.loads(solution.bootstrap(5).to_json())
    assert list(content) == ["level", "models", "alpha", "retained", "condition", "alpha_std"]
    assert content["retained"]["layer.1"] == content["alpha_std"]["layer.0"] == [None] * 3
    assert content["condition"]["layer.1"] is None
    assert "alpha_std" not in json.loads(solution.to_json())
