"""A solution: what it prints, writes and refuses; its numbers are tested with the solver and the command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import synthetic

from mergekit_slta.errors import SltaError
from mergekit_slta.slta import solver
from mergekit_slta.slta.statistics import Statistics

MODELS = ["org/math", "org/code", "org/<b>chat"]


@pytest.fixture
def statistics() -> Statistics:
    return synthetic.statistics(MODELS, ["layer", "attn_mlp"], layers=2)


def test_each_submodule_is_solved_alone(statistics: Statistics) -> None:
    solution = statistics.solve("layer", ridge=0.1, balance=False, task_weights=[1, 0, 2])
    assert list(solution.alpha) == statistics.submodules("layer")
    assert solution.models == tuple(MODELS)
    for name, gram in statistics.grams.items():
        if name in solution.alpha:
            alone = solver.solve(gram, statistics.task, ridge=0.1, balance=False, task_weights=[1, 0, 2])
            assert torch.equal(solution.alpha[name], alone.alpha)
            assert torch.equal(solution.retained[name], alone.retained)
            assert (solution.condition[name], solution.rank[name]) == (alone.condition, alone.rank)


@pytest.mark.parametrize(
    ("levels", "level"), [(["layer", "attn_mlp"], "attn_mlp"), (["layer", "linear"], "layer"), (["model"], "model")]
)
def test_the_level_is_that_of_branches_if_it_was_measured(levels: list[str], level: str) -> None:
    assert synthetic.statistics(MODELS, levels, layers=1).solve().level == level


@pytest.mark.parametrize(
    ("weights", "same_as"), [({"org/code": 2.5}, [1, 2.5, 1]), ({}, None), ([1, 1, 1], None), ((0, 0, 1), [0, 0, 7])]
)
def test_task_weights_by_name_or_in_order(
    weights: Mapping[str, float] | Sequence[float], same_as: Sequence[float] | None, statistics: Statistics
) -> None:
    found, expected = (statistics.solve(task_weights=given).alpha for given in (weights, same_as))
    assert all(torch.allclose(alpha, expected[name]) for name, alpha in found.items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"level": "linear"}, "no level 'linear', only layer, attn_mlp"),
        ({"ridge": -1.0}, "'ridge' is -1.0"),
        ({"samples": 0}, "hold 4 samples per task"),
        ({"ridge": "auto"}, "'ridge' is 'auto': give a number."),
        ({"keep_weight": [1]}, "'keep_weight' is [1]: give a number."),
        ({"samples": 1.5}, "'samples' is 1.5: give a whole number."),
        ({"task_weights": {"org/maths": 1}}, "for 'org/maths', but the experts are org/math, org/code"),
        ({"task_weights": [1, 2]}, "2 task weights for 3 experts"),
        ({"task_weights": [1, 2, -3]}, "task weight of org/<b>chat is -3: give a number of at least zero"),
        ({"task_weights": [0, 0, 0]}, "at least one task must count"),
    ],
)
def test_what_cannot_be_solved_is_refused(arguments: dict[str, Any], said: str, statistics: Statistics) -> None:
    with pytest.raises(SltaError) as caught:
        statistics.solve(**arguments)
    assert said in caught.value.message


def test_standard_errors_are_those_of_the_draws(statistics: Statistics) -> None:
    settings: dict[str, Any] = {"ridge": 0.2, "balance": False, "task_weights": (1.0, 2.0, 3.0)}
    solution = statistics.solve(**settings)
    for name, error in solution.bootstrap(20, seed=3).items():
        draws = solver.bootstrap(statistics.grams[name], statistics.task, 20, seed=3, **settings)
        assert torch.equal(error, draws.std(0))
    with pytest.raises(SltaError, match="at least two"):
        solution.bootstrap(1)
    with pytest.raises(SltaError, match="'repeats' is 'x': give a whole number"):
        solution.bootstrap("x")  # type: ignore[arg-type]


def test_standard_errors_stand_in_the_frame_after_the_weights(statistics: Statistics) -> None:
    solution = statistics.solve()
    errors = solution.bootstrap(5)
    frame = solution.to_frame(errors).set_index("submodule")
    assert list(frame.columns[3:6]) == ["error math", "error code", "error <b>chat"]
    assert all(frame.loc[name].iloc[3:6].tolist() == error.tolist() for name, error in errors.items())
    assert frame.drop(columns=frame.columns[3:6]).equals(solution.to_frame().set_index("submodule"))


def test_printed_it_is_a_table_with_notes(statistics: Statistics) -> None:
    statistics.grams["layer.1.mlp"].zero_()
    solution = statistics.solve()
    table, legend, note = str(solution).split("\n\n")
    assert table == str(solution.table())
    assert table.splitlines()[0].split() == [
        *("submodule", "alpha", "math", "alpha", "code", "alpha", "<b>chat"),
        *("keeps", "math", "keeps", "code", "keeps", "<b>chat", "condition"),
    ]
    *_, last, whole = table.splitlines()
    assert last.split() == ["layer.1.mlp", *["0.000"] * 3, *["-"] * 4]
    assert whole.split() == ["all", *["-"] * 3, *(f"{share:.1%}" for share in solution.kept.tolist()), "-"]
    assert legend.startswith("math is org/math; code is org/code; <b>chat is org/<b>chat; ")
    assert "±" in solution.text(solution.bootstrap(2)) and "±" not in legend
    assert note.startswith("In 1 of 4 submodules (layer.1.mlp ...)")
    assert [note] == solution.notes()


def test_nearly_dependent_experts_are_named(statistics: Statistics) -> None:
    gram = statistics.grams["layer.1.mlp"]
    mixed = torch.eye(3, dtype=torch.float64)
    mixed[2] = torch.tensor([0.0, 1.0, 1e-4])  # the third expert is the second and very little of its own
    statistics.grams["layer.1.mlp"] = mixed @ gram @ mixed.T
    solution = statistics.solve()
    assert 1e6 < solution.condition["layer.1.mlp"] < 1e10
    (note,) = solution.notes()
    assert note.startswith("In 1 of 4 submodules (layer.1.mlp) the experts are nearly linearly dependent")


def test_its_numbers_and_its_figure_are_the_weights(statistics: Statistics) -> None:
    statistics.grams["layer.1.mlp"].zero_()
    solution = statistics.solve()
    frame = solution.to_frame().set_index("submodule")
    assert list(frame.columns) == solution.table().header[1:]
    for name, alpha in solution.alpha.items():
        assert frame.loc[name].iloc[:3].tolist() == alpha.tolist()
    assert frame.loc["layer.1.mlp"].iloc[3:].isna().all()
    attention, mlp, _ = solution.plot().axes
    for axes, branch in ((attention, "attn"), (mlp, "mlp")):
        drawn = torch.tensor(axes.images[0].get_array()).T  # [layers, T]
        assert torch.equal(drawn, torch.stack([solution.alpha[f"layer.{layer}.{branch}"] for layer in range(2)]))


def test_undefined_numbers_are_null_in_json(statistics: Statistics) -> None:
    statistics.grams["layer.1"].zero_()
    solution = statistics.first_samples(1).solve("layer")
    content = json.loads(solution.to_json(solution.bootstrap(5)))
    assert list(content) == ["level", "models", "alpha", "retained", "condition", "alpha_std"]
    assert content["retained"]["layer.1"] == content["alpha_std"]["layer.0"] == [None] * 3
    assert content["condition"]["layer.1"] is None
    assert "alpha_std" not in json.loads(solution.to_json())


def test_a_recipe_that_nobody_meant_is_refused(statistics: Statistics, tmp_path: Path) -> None:
    with pytest.raises(SltaError, match="no model 'org/maths'.*only org/llama, org/math"):
        statistics.solve().save_recipe(tmp_path / "plain.yml", models={"org/maths": "./math"})
    assert not list(tmp_path.iterdir())
