"""The memory that ``check``, ``ask`` and ``evaluate`` say, against the peaks of models in which one thing is large."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from support import families, memory
from support.families import Family
from support.processes import in_a_process
from support.slow import slow_but

from mergekit_slta.asking import ask as asking
from mergekit_slta.checks.space import needs
from mergekit_slta.engine.memory import LIBRARIES
from mergekit_slta.evaluation import evaluate as evaluating
from mergekit_slta.featcal import merge
from mergekit_slta.recipe.recipe import Recipe


class Case(NamedTuple):
    architecture: str = "llama"
    sizes: Mapping[str, Any] = MappingProxyType({})
    prompts: int = 2  # of each task
    tokens: int = 16  # of each prompt


# By what is large.
VOCABULARY = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 60_000}
PART = 25_000  # rows of an output head that are solved at once, of this width
ONE_WINDOW = {"layer_types": ["sliding_attention"], "head_dim": 64}
CASES = {
    "many prompts": Case("llama", {"hidden_size": 256, "intermediate_size": 512}, 60, 256),
    "long prompts": Case("llama", {"hidden_size": 256, "intermediate_size": 1024}, 1, 3000),
    "8,000 tokens": Case("llama", {"hidden_size": 128, "intermediate_size": 512}, 1, 8000),
    "wide MLP": Case("llama", {"hidden_size": 128, "intermediate_size": 4096}, 8, 128),
    "weights": Case("llama", {"hidden_size": 768, "intermediate_size": 3072}),
    "mixture": Case("qwen3_moe", {"hidden_size": 256, "moe_intermediate_size": 256}, 30, 256),
    "masks": Case("mistral", {"sliding_window": 64}, 1, 3000),
    "a few queries": Case("gemma2", {"hidden_size": 256, "intermediate_size": 512, **ONE_WINDOW}, 1, 3000),
    "vocabulary": Case("llama", VOCABULARY, 2, 64),
    "vocabulary, few tokens": Case("llama", VOCABULARY, 2, 24),
    "vocabulary, many tokens": Case("llama", VOCABULARY, 8, 128),
    "head in parts": Case("llama", {"hidden_size": 1024, "intermediate_size": 1024, "vocab_size": 2 * PART}, 2, 270),
}
# Above and below the bounds: what a few small things take, of which LIBRARIES has the same amount to spare.
SLACK = 20_000_000
METHODS = ("slta", "featcal", "actmat", "evaluate", "ask")
GRID = [(method, name) for method in METHODS for name in (CASES if method not in ("actmat", "ask") else ("weights",))]
GRID += [("ask", name) for name in ("wide MLP", "long prompts")] + [("actmat", "vocabulary")]
QUICK = [("slta", "wide MLP"), ("featcal", "long prompts"), ("featcal", "head in parts")]
QUICK += [("actmat", "weights"), ("actmat", "vocabulary")]


def family_of(case: Case, folder: Path) -> Family:
    """A family with twice as many records as prompts, no two of them alike."""
    sizes = {**case.sizes, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    family = families.make_family(folder, families.config_of(case.architecture, **sizes), dtype=torch.bfloat16)
    for task, file in enumerate(family.data):
        text = families.ALPHABETS[task] * (case.tokens // 10 + 1)
        records = [{"text": f"{number:03}{text}"[: case.tokens - 2 - number % 5]} for number in range(2 * case.prompts)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return family


@contextmanager
def said_by(module: Any, name: str, said: list[int]) -> Iterator[None]:
    """Within it, what a function of a module says is noted."""
    counted = getattr(module, name)

    def count(*arguments: Any) -> int:
        said.append(counted(*arguments))
        return said[-1]

    with mock.patch.object(module, name, count):
        yield


def work(method: str, case: Case, family: Family, folder: Path) -> int:
    """Merge, ask or evaluate; returns what is said that it takes."""
    said: list[int] = []
    settings: dict[str, Any] = {"samples": case.prompts, "max_tokens": case.tokens} if method != "actmat" else {}
    name = "slta" if method in ("ask", "evaluate") else method
    recipe = families.recipe(family, name, calibration=method != "actmat", out_dtype="bfloat16", **settings)
    if method == "ask":
        with said_by(asking, "answer_bytes", said):
            asking.ask(family.base, folder / "answers.jsonl", family.data[0], samples=case.prompts, max_new_tokens=8)
    elif method == "evaluate":
        with said_by(evaluating, "scoring_bytes", said):
            evaluating.evaluate(Recipe(recipe), [family.experts[0]], samples=case.prompts)
    else:
        families.merge(recipe, folder / "merged")
        experiment = families.experiment(recipe)
        if method != "actmat":
            experiment.load_data(experiment.recipe.tasks)
        said.append(needs(experiment).memory)
    return said[0] - LIBRARIES


@mock.patch.object(merge, "HEAD_ELEMENTS", PART * 1024)
def report(method: str, case: Case, folder: Path) -> tuple[int, ...]:
    """What a little such work leaves, the peak above it, and what is said."""
    layer_types = {key: case.sizes[key] for key in case.sizes.keys() & {"layer_types"}}
    little, said = Case(case.architecture, layer_types), list[int]()
    work(method, little, family_of(little, folder / "little"), folder / "little")
    family, before = family_of(case, folder), memory.anonymous_memory()
    peak = memory.peak_of(lambda: said.append(work(method, case, family, folder)))
    if method == "ask":  # whose model is mapped from its file, which is no memory of the process but is needed
        peak += sum(file.stat().st_size for file in family.base.glob("*.safetensors"))
    return before, peak, *said


@memory.needs_account
@pytest.mark.parametrize("case", slow_but(QUICK, GRID), ids=" of ".join)
def test_the_memory_that_is_said_is_what_is_taken(
    case: tuple[str, str], forks: ForkServerContext, tmp_path: Path
) -> None:
    """Where glibc gives back what is freed, as the test's process has it do."""
    method, name = case
    before, peak, said = in_a_process(forks, report, method, CASES[name], tmp_path)
    print(f"{method}, {name}: peak {peak / 1e6:.1f} MB, said {said / 1e6:.1f} MB")
    assert before <= LIBRARIES - SLACK
    assert peak - SLACK <= said <= 1.25 * peak + SLACK
