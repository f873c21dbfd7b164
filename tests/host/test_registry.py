"""The merge method inside mergekit: every tensor, every thread, every merge of a process, every refusal."""

import html
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mergekit.merge
import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from conftest import MakeFamily, WriteRecipe
from mergekit import merge_methods
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task
from mergekit.io.tasks import LoaderCache, LoadTensor
from mergekit.merge_methods import merge_tensors
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.scripts import merge_raw_pytorch, multimerge, run_yaml
from safetensors.torch import load_file
from support import families, featcal_reference, reference
from support.adapters import write_adapter
from support.copies import edit_tensors, edited
from support.families import Family
from support.html_elements import assert_self_contained

from mergekit_slta.errors import SltaError
from mergekit_slta.featcal import scratch as solved_module
from mergekit_slta.host import patches, registry
from mergekit_slta.layers.blend import weighted_sum
from mergekit_slta.layers.trace import trace
from mergekit_slta.slta import measure
from mergekit_slta.slta.statistics import Statistics

LEVELS = ("layer", "attn_mlp")

State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def registered() -> None:
    patches.install()


def merged_state(folder: Path) -> State:
    """Every tensor of a model folder by the names of ``state_dict``, in float64."""
    return families.load_model(folder).state_dict()


def worst_error(found: State, expected: State) -> float:
    """The largest relative error of a tensor."""
    assert set(found) == set(expected)
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


def solved(path: Path, level: str) -> dict[str, torch.Tensor]:
    return dict(Statistics.load(path).solve(level).alpha)


# Tensors


@pytest.mark.parametrize("edges", ["base", "mean"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("gemma2", torch.float32), ("falcon_new", torch.float32)],
    ids=str,
)
def test_every_tensor_is_the_base_plus_the_weighted_task_vectors(
    architecture: str, dtype: torch.dtype, level: str, edges: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    changes = {"tie_word_embeddings": False} if architecture == "falcon_new" else {}
    family = make_family(families.config_of(architecture, **changes), dtype=dtype)
    stats = tmp_path / "stats.safetensors"
    out = families.merge(families.recipe(family, level=level, edges=edges, statistics=str(stats)), tmp_path / "out")
    alpha = solved(stats, level)
    expected = reference.merged(family.models(), alpha, level, reference.SPLITS[architecture], edges)
    assert worst_error(merged_state(out), expected) < 1e-6


@pytest.mark.parametrize("level", LEVELS)
def test_the_whole_way_equals_the_naive_one(level: str, llama: Family, tmp_path: Path) -> None:
    out = families.merge(families.recipe(llama, level=level), tmp_path / "out")
    models, split = llama.models(), reference.SPLITS["llama"]
    alpha = reference.solve(reference.deltas(models, llama.token_ids(), level, split))
    assert worst_error(merged_state(out), reference.merged(models, alpha, level, split)) < 1e-6


@pytest.mark.parametrize(
    "settings", [{"balance": False}, {"ridge": 0.3}, {"balance": "false", "ridge": "0.3"}], ids=str
)
def test_balance_and_ridge_reach_the_solution(settings: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    """Also as strings, which YAML makes of quoted values."""
    models, split = llama.models(), reference.SPLITS["llama"]
    deltas = reference.deltas(models, llama.token_ids(), "layer", split)
    out = families.merge(families.recipe(llama, level="layer", **settings), tmp_path / "out")
    values = {name: yaml.safe_load(str(value).lower()) for name, value in settings.items()}
    expected = reference.merged(models, reference.solve(deltas, **values), "layer", split)
    assert worst_error(merged_state(out), expected) < 1e-6


def test_merging_in_bfloat16_rounds_and_no_more(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(dtype=torch.bfloat16)
    exact = merged_state(families.merge(families.recipe(family), tmp_path / "float32"))
    for dtype, out_dtype in (("float32", "bfloat16"), ("bfloat16", None)):
        out = families.merge(families.recipe(family, dtype=dtype, out_dtype=out_dtype), tmp_path / f"in_{dtype}")
        assert {tensor.dtype for tensor in load_file(next(out.glob("*.safetensors"))).values()} == {torch.bfloat16}
        assert worst_error(merged_state(out), exact) < 2**-8


@pytest.mark.parametrize("shape", [(), (1, 6), (4, 1)], ids=["number", "columns", "rows"])
def test_weighted_sum_changes_no_input(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    kept = [tensor.clone() for tensor in tensors]
    result = weighted_sum(tensors[0], list(zip(tensors[1:], weights, strict=True)))
    base, first, second = (tensor.double() for tensor in tensors)
    expected = base + weights[0] * (first - base) + weights[1] * (second - base)
    assert torch.allclose(result.double(), expected, atol=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(kept, tensors, strict=True))


def test_a_weight_of_zero_leaves_the_base_as_it_is() -> None:
    base, broken = torch.randn(5), torch.full((5,), torch.nan)
    zero = torch.zeros((), dtype=torch.float64)
    assert torch.equal(weighted_sum(base, [(broken, zero)]), base)


# Once per merge


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each calibration that is run."""
    return counted(monkeypatch, measure, "calibrate")


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    """One entry for each call of a module's function, the calling thread."""
    calls: list[int] = []
    function = getattr(module, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(threading.get_ident())
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, count)
    return calls


class ThreadedExecutor:
    """Merges all tensors at once on many threads, as mergekit's own does under ``--multi-gpu``."""

    merged: dict[str, torch.Tensor | Exception]

    def __init__(self, targets: list[Any], **settings: Any) -> None:
        tasks = {task for target in targets for task in _tasks_under(target)}
        self.tasks = [task for task in tasks if isinstance(task, ExecuteMergeMethodTask)]

    def run(self, quiet: bool) -> list[Any]:
        for prepared in {task.prepared for task in self.tasks if isinstance(task, patches.MergedTensor)}:
            prepared.execute()
        together = threading.Barrier(len(self.tasks), timeout=300)  # if one fails, all do

        def merge(task: ExecuteMergeMethodTask) -> torch.Tensor | Exception:
            tensors = _run(task.gather_tensors)
            together.wait()
            try:
                return task.execute(tensors)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.tasks)) as pool:
            found = list(pool.map(merge, self.tasks))
        names = [task.output_weight.name for task in self.tasks]
        ThreadedExecutor.merged = dict(zip(names, found, strict=True))
        return []


def _tasks_under(task: Any) -> Iterator[Any]:
    yield task
    for needed in task.arguments().values():
        yield from _tasks_under(needed)


def _run(task: Any) -> Any:
    return task.execute(**{name: _run(needed) for name, needed in task.arguments().items()})


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mergekit.merge, "Executor", ThreadedExecutor)
    functional_call = torch.func.functional_call

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.002)  # so that other threads come in between
        return functional_call(*args, **kwargs)

    monkeypatch.setattr(torch.func, "functional_call", slow)


@pytest.mark.parametrize("level", LEVELS)
def test_many_threads_calibrate_once_and_agree_with_one(
    level: str, on_threads: None, calibrations: list[int], llama: Family, tmp_path: Path
) -> None:
    families.merge(families.recipe(llama, level=level, statistics=str(tmp_path / "stats")), tmp_path / "out")
    assert len(calibrations) == 1
    alpha = solved(tmp_path / "stats", level)
    expected = reference.merged(llama.models(), alpha, level, reference.SPLITS["llama"])
    assert {type(found) for found in ThreadedExecutor.merged.values()} == {torch.Tensor}
    found = {name: tensor.double() for name, tensor in ThreadedExecutor.merged.items()}  # type: ignore[union-attr]
    assert worst_error(found, expected) < 1e-6


@pytest.mark.parametrize("method", ["slta", "featcal"])
def test_the_models_run_before_mergekit_has_a_tensor_in_memory(
    method: str, llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tensors that it reads are the embeddings of all models, the largest tensors."""
    order: list[str] = []
    module, name = (measure, "calibrate") if method == "slta" else (solved_module, "feature_merge")
    for where, function in ((module, name), (LoadTensor, "execute")):
        run = getattr(where, function)

        def noted(*args: Any, said: str = function, run: Callable[..., Any] = run, **kwargs: Any) -> Any:
            order.append(said)
            return run(*args, **kwargs)

        monkeypatch.setattr(where, function, noted)
    families.merge(families.recipe(llama, method, samples=2), tmp_path / "out")
    assert order[0] == name and order.count(name) == 1 and "execute" in order


def test_vocabularies_that_cannot_be_aligned_are_said_before_the_models_run(
    llama: Family, tmp_path: Path, calibrations: list[int]
) -> None:
    recipe = families.recipe(llama, samples=2)
    recipe["tokenizer"] = {"source": "base", "tokens": {"<new>": {"source": str(llama.base) + "-of-another-place"}}}
    with pytest.raises(Exception, match="another-place"):
        families.merge(recipe, tmp_path / "out")
    assert calibrations == []


def test_one_calibration_per_merge_and_none_for_what_is_in_the_cache(
    calibrations: list[int], llama: Family, tmp_path: Path
) -> None:
    first = merged_state(families.merge(families.recipe(llama), tmp_path / "first"))
    assert len(calibrations) == 1
    again = merged_state(families.merge(families.recipe(llama, ridge=0.0), tmp_path / "again"))
    assert len(calibrations) == 1
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    families.merge(families.recipe(llama, seed=1), tmp_path / "other")
    assert len(calibrations) == 2


def test_every_merge_of_a_process_has_its_own_weights(llama: Family, tmp_path: Path) -> None:
    """The models, the level and the failure of an earlier merge are forgotten."""
    contents = [
        families.recipe(llama, level="layer"),
        families.recipe(llama, experts=[2, 0]),
        families.recipe(llama, experts=[1], edges="mean"),
    ]
    alone = []
    for index, content in enumerate(contents):
        LoaderCache.loaders.clear()
        alone.append(merged_state(families.merge(content, tmp_path / f"alone{index}")))
    broken = families.recipe(llama)
    broken["models"][0]["parameters"]["template"] = "{nothing}"
    with pytest.raises(SltaError):
        families.merge(broken, tmp_path / "broken")
    for index, content in enumerate(contents):
        found = merged_state(families.merge(content, tmp_path / f"together{index}"))
        assert all(torch.equal(found[name], tensor) for name, tensor in alone[index].items())


def planner(content: dict[str, Any]) -> MergePlanner:
    config, options = MergeConfiguration.model_validate(content), MergeOptions(quiet=True)
    return MergePlanner(config, get_architecture_info(config, options), options, config.base_model.config())


def execute(tasks: list[Task[Any]]) -> None:
    for _ in Executor(tasks).run(quiet=True):
        pass


def test_planners_that_are_made_before_the_first_merge_have_their_own_weights(llama: Family, tmp_path: Path) -> None:
    contents = [families.recipe(llama, level="layer"), families.recipe(llama, experts=[2, 0])]
    for index, made in enumerate([planner(content) for content in contents]):
        execute(made.plan_to_disk(str(tmp_path / f"planned{index}")))
    for index, content in enumerate(contents):
        expected = load_file(families.merge(content, tmp_path / f"alone{index}") / "model.safetensors")
        found = load_file(tmp_path / f"planned{index}" / "model.safetensors")
        assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_planner_plans_its_merge_again(llama: Family, tmp_path: Path) -> None:
    """It has rewritten its recipe by then."""
    made = planner(families.recipe(llama, samples=2))
    for folder in (tmp_path / "first", tmp_path / "again"):
        execute(made.plan_to_disk(str(folder)))
    first, again = (load_file(folder / "model.safetensors") for folder in (tmp_path / "first", tmp_path / "again"))
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


def test_mergekit_multi_runs_several_merges(llama: Family, tmp_path: Path) -> None:
    """The second merge takes the result of the first as an expert."""
    first = families.recipe(llama, experts=[0, 1], level="layer") | {"name": "first"}
    second = families.recipe(llama, experts=[2])
    own = {"calibration": str(families.write_records(tmp_path / "both.jsonl", task=3))}
    second["models"].append({"model": "first", "parameters": own})
    (tmp_path / "recipes.yml").write_text(yaml.safe_dump_all([first, second]))
    parts = tmp_path / "parts"
    families.write_tokenizer(parts / "first")
    done = run(
        multimerge.main,
        tmp_path / "recipes.yml",
        "--intermediate-dir",
        parts,
        "--out-path",
        tmp_path / "out",
        "--no-write-model-card",
    )
    assert done.exit_code == 0, done.output
    alone = merged_state(families.merge({k: v for k, v in first.items() if k != "name"}, tmp_path / "alone"))
    found = merged_state(parts / "first")
    assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())
    second["models"][1]["model"] = str(parts / "first")
    expected = merged_state(families.merge(second, tmp_path / "second"))
    found = merged_state(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# Experts that touch only some submodules


def test_loras_of_the_attention_leave_everything_else_alone(
    llama: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = families.recipe(llama, experts=[0, 1], statistics=str(tmp_path / "stats"))
    for index, entry in enumerate(content["models"]):
        adapter = write_adapter(llama.base, tmp_path / f"adapter{index}", "q_proj", "v_proj", seed=index)
        entry["model"] = f"{llama.base}+{adapter}"
    with caplog.at_level(logging.WARNING, logger="mergekit_slta"):
        out = families.merge(content, tmp_path / "out", lora_merge_cache=str(tmp_path / "merged"))
    found, base = merged_state(out), merged_state(llama.base)
    for name, tensor in base.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            assert not torch.allclose(found[name], tensor, rtol=1e-3)
        elif "self_attn" in name or "input_layernorm" in name:
            assert torch.allclose(found[name], tensor, rtol=1e-6)
        else:
            assert torch.equal(found[name], tensor), name
    for name, gram in Statistics.load(tmp_path / "stats").grams.items():
        assert gram.any() == name.endswith(".attn")
    alpha = solved(tmp_path / "stats", "attn_mlp")
    assert all(alpha[name].any() == name.endswith(".attn") for name in alpha)
    dependent = [record.message for record in caplog.records if "minimum-norm" in record.message]
    assert len(dependent) == 1
    assert f"{families.LAYERS} of {2 * families.LAYERS} submodules" in dependent[0]


def test_the_same_lora_is_known_by_content(calibrations: list[int], llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, experts=[0, 1], statistics=str(tmp_path / "stats"))
    adapter = write_adapter(llama.base, tmp_path / "adapter")
    content["models"][0]["model"] = f"{llama.base}+{adapter}"
    families.merge(content, tmp_path / "out", lora_merge_cache=str(tmp_path / "merged"))
    copy = shutil.copytree(adapter, tmp_path / "copy")
    content["models"][0]["model"] = f"{llama.base}+{copy}"
    families.merge(content, tmp_path / "again", lora_merge_cache=str(tmp_path / "merged again"))
    assert len(calibrations) == 1


def test_two_identical_experts_share_the_weight(
    llama: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    twin = shutil.copytree(llama.experts[0], tmp_path / "twin")
    family = Family(llama.base, (llama.experts[0], twin, llama.experts[1]), llama.data, llama.config)
    with caplog.at_level(logging.WARNING, logger="mergekit_slta"):
        families.merge(families.recipe(family, statistics=str(tmp_path / "stats")), tmp_path / "out")
    for alpha in solved(tmp_path / "stats", "attn_mlp").values():
        assert torch.allclose(alpha[0], alpha[1], rtol=1e-9)
    assert sum("minimum-norm" in record.message for record in caplog.records) == 1


# Feature merges


FEATURE_PARAMETERS = {
    "samples": 30,
    "max_tokens": 512,
    "seed": 0,
    "towers": "base",
    "batch_tokens": 0,
    "ridge": "auto",
    "anchor": "actmat",
    "head": True,
    "scratch": "",
    "report": "",
}


def test_the_parameters_of_a_feature_merge_and_their_defaults() -> None:
    spec = registry.METHODS["featcal"].spec
    assert {parameter.name: parameter.default for parameter in spec.shared_parameters} == FEATURE_PARAMETERS
    assert {parameter.name for parameter in spec.parameters} - set(FEATURE_PARAMETERS) == {"calibration", "template"}
    assert spec.reference_url == "https://arxiv.org/abs/2605.13030"
    patches.install()
    assert "featcal" in [method.spec.name for method in merge_methods.registered_methods()]


def feature_recipe(family: Family, **parameters: Any) -> dict[str, Any]:
    """A recipe that the naive reference can follow: near the base model, with a ridge that is given."""
    return families.recipe(family, "featcal", **{"anchor": "base", "ridge": 0.003, **parameters})


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "gpt2",
        "gemma2",
        "phi3",
        "falcon_new",
        "mixtral",
        "gpt_oss",
        "granite_moe_hybrid",
        "lfm2",
        "opt",
        "bloom",
    ],
)
def test_every_tensor_is_the_solved_one_or_the_bases(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    """Under whatever names mergekit asks for them and a checkpoint stores them."""
    family = make_family(architecture)
    families.feature_merge(family, tmp_path / "solved")
    expected = merged_state(family.base)
    expected |= {name: tensor.double() for name, tensor in families.solved_tensors(tmp_path / "solved").items()}
    found = merged_state(families.merge(feature_recipe(family), tmp_path / "out"))
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "settings",
    [{}, {"ridge": "0.1"}, {"head": "false"}, {"samples": 3, "seed": 2, "max_tokens": 9}],
    ids=str,
)
def test_a_feature_merge_equals_the_naive_one(settings: dict[str, Any], llama: Family, tmp_path: Path) -> None:
    """Also with settings as strings, which YAML makes of quoted values."""
    out = families.merge(feature_recipe(llama, **settings), tmp_path / "out")
    values = {name: yaml.safe_load(str(value)) for name, value in settings.items()}
    drawn = {name: values.pop(name) for name in ("samples", "seed", "max_tokens") if name in values}
    base, *experts = llama.models()
    groups = featcal_reference.GROUPS["llama"]
    expected = featcal_reference.merge(base, experts, llama.token_ids(**drawn), groups, **values)
    assert worst_error(merged_state(out), expected) < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_an_endless_ridge_gives_the_actmat_merge_as_anchor(
    architecture: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    family = make_family(architecture)
    expected = merged_state(families.merge(families.recipe(family, "actmat", calibration=False), tmp_path / "actmat"))
    for head in (True, False):
        content = feature_recipe(family, anchor="actmat", ridge=1e12, head=head)
        assert worst_error(merged_state(families.merge(content, tmp_path / f"head {head}")), expected) < 1e-6


def test_a_feature_merge_near_that_of_actmat_equals_the_naive_one(llama: Family, tmp_path: Path) -> None:
    start = merged_state(families.merge(families.recipe(llama, "actmat", calibration=False), tmp_path / "anchor"))
    out = families.merge(feature_recipe(llama, anchor="actmat", ridge=0.1), tmp_path / "out")
    base, *experts = llama.models()
    groups, tasks = featcal_reference.GROUPS["llama"], llama.token_ids()
    expected = featcal_reference.merge(base, experts, tasks, groups, ridge=0.1, anchor=start, by_tasks=True)
    assert worst_error(merged_state(out), expected) < 1e-4


def test_a_feature_merge_in_bfloat16_rounds_and_no_more(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family(dtype=torch.bfloat16)
    exact = merged_state(families.merge(feature_recipe(family), tmp_path / "float32"))
    for dtype, out_dtype in (("float32", "bfloat16"), ("bfloat16", None)):
        content = feature_recipe(family, dtype=dtype, out_dtype=out_dtype)
        out = families.merge(content, tmp_path / f"in_{dtype}")
        assert {tensor.dtype for tensor in load_file(next(out.glob("*.safetensors"))).values()} == {torch.bfloat16}
        assert worst_error(merged_state(out), exact) < 2**-8


@pytest.fixture
def feature_merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each feature merge that is solved."""
    return counted(monkeypatch, solved_module, "feature_merge")


def test_many_threads_solve_once_and_agree_with_one(
    on_threads: None, feature_merges: list[int], llama: Family, tmp_path: Path
) -> None:
    families.merge(feature_recipe(llama), tmp_path / "out")
    assert len(feature_merges) == 1
    families.feature_merge(llama, tmp_path / "solved")
    expected = merged_state(llama.base)
    expected |= {name: tensor.double() for name, tensor in families.solved_tensors(tmp_path / "solved").items()}
    assert {type(found) for found in ThreadedExecutor.merged.values()} == {torch.Tensor}
    found = {name: tensor.double() for name, tensor in ThreadedExecutor.merged.items()}  # type: ignore[union-attr]
    assert worst_error(found, expected) < 1e-6


def test_every_feature_merge_of_a_process_has_its_own_tensors(
    feature_merges: list[int], llama: Family, tmp_path: Path
) -> None:
    contents = [feature_recipe(llama), feature_recipe(llama, experts=[2, 0], head=False), families.recipe(llama)]
    alone = []
    for index, content in enumerate(contents):
        LoaderCache.loaders.clear()
        alone.append(merged_state(families.merge(content, tmp_path / f"alone{index}")))
    for index, content in enumerate(contents):
        found = merged_state(families.merge(content, tmp_path / f"together{index}"))
        assert all(torch.equal(found[name], tensor) for name, tensor in alone[index].items())
    assert len(feature_merges) == 4


def test_a_feature_merge_of_loras_of_the_attention(llama: Family, tmp_path: Path) -> None:
    content = feature_recipe(llama, experts=[0, 1])
    for index, entry in enumerate(content["models"]):
        adapter = write_adapter(llama.base, tmp_path / f"adapter{index}", "q_proj", "v_proj", seed=index)
        entry["model"] = f"{llama.base}+{adapter}"
    out = families.merge(content, tmp_path / "out", lora_merge_cache=str(tmp_path / "merged"))
    found, base = merged_state(out), merged_state(llama.base)
    decoder = trace(llama.config)
    moved = {name for name in base if not torch.allclose(found[name], base[name], rtol=1e-6, atol=1e-8)}
    assert {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(3) for name in ("q_proj", "v_proj")
    } <= moved
    assert not [name for name in moved if "norm" in name or "embed" in name]
    assert moved <= {name for layer in range(3) for name in decoder.layer_tensors(layer).values()} | {"lm_head.weight"}


def test_a_feature_merges_report(llama: Family, tmp_path: Path) -> None:
    content = feature_recipe(llama, report=str(tmp_path / "report"))
    families.merge(content, tmp_path / "out")
    text = (tmp_path / "report" / "featcal.html").read_text()
    assert_self_contained(text)
    assert "After the last layer the merged model's features are" in html.unescape(text)
    for name in ("expert0", "expert1", "expert2"):
        assert f"{name}, before" in text and f"{name}, after" in text
    assert (tmp_path / "report" / "drift.png").is_file()
    assert str(tmp_path) not in text


@pytest.mark.parametrize("head", [True, False])
def test_what_is_not_finite_in_an_experts_head_matters_where_it_is_solved(
    head: bool, feature_merges: list[int], llama: Family, tmp_path: Path
) -> None:
    content = feature_recipe(llama, head=head)
    content["models"][1]["model"] = str(spoiled(llama.experts[1], tmp_path / "spoiled", "lm_head.weight"))
    if head:
        with pytest.raises(SltaError, match=r"spoiled holds NaN or Inf in the tensor lm_head\.weight"):
            families.merge(content, tmp_path / "out")
        assert not feature_merges
    else:
        assert merged_state(families.merge(content, tmp_path / "out"))["lm_head.weight"].isfinite().all()


@pytest.mark.parametrize("tensor", ["model.layers.2.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_a_feature_merge_of_what_is_not_finite_is_refused(tensor: str, llama: Family, tmp_path: Path) -> None:
    content = feature_recipe(llama)
    content["models"][1]["model"] = str(spoiled(llama.experts[1], tmp_path / "spoiled", tensor))
    with pytest.raises(SltaError, match=f"spoiled holds NaN or Inf in the tensor {tensor}"):
        families.merge(content, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


@pytest.mark.parametrize("name", ["ridge", "calibration"])
def test_one_value_for_the_whole_feature_merge(name: str, llama: Family, tmp_path: Path) -> None:
    content = feature_recipe(llama)
    target = content["models"][0]["parameters"] if name == "calibration" else content["parameters"]
    target[name] = ["a.jsonl", "b.jsonl"] if name == "calibration" else [0.1, 0.5]
    with pytest.raises(SltaError, match=f"'{name}'.* one value for the whole merge"):
        families.merge(content, tmp_path / "out")
    assert nothing_measured()


def test_a_feature_merge_of_single_tensors_is_refused_in_words() -> None:
    base, expert = torch.zeros(2, 2), torch.ones(2, 2)
    with pytest.raises(SltaError, match="'featcal' measures whole models.*mergekit-yaml"):
        merge_tensors([base, expert], method="featcal", base_index=0, parameters={"calibration": ["a.jsonl"]})


# Refusals


def run(command: Any, *arguments: Any) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def nothing_measured() -> bool:
    return not (Path(os.environ["XDG_CACHE_HOME"]) / "mergekit-slta").exists()


def spoiled(source: Path, folder: Path, tensor: str) -> Path:
    def spoil(tensors: State) -> None:
        tensors[tensor].view(-1)[-1] = torch.inf

    return edited(source, folder, spoil)


def test_a_model_of_the_recipe_is_not_overwritten(family: Family, write_recipe: WriteRecipe) -> None:
    file = family.experts[0] / "model.safetensors"
    before = file.read_bytes()
    recipe = write_recipe(family, "actmat", calibration=False)
    result = run(run_yaml.main, recipe, family.experts[0], "--quiet")
    assert result.exit_code == 1 and "which the merge would overwrite" in result.output
    assert file.read_bytes() == before


@pytest.mark.parametrize("tensor", ["model.layers.2.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"])
@pytest.mark.parametrize("role", ["base", "expert"])
def test_what_is_not_finite_is_refused_before_any_output(role: str, tensor: str, llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama)
    if role == "base":
        content["base_model"] = str(spoiled(llama.base, tmp_path / "spoiled", tensor))
    else:
        content["models"][1]["model"] = str(spoiled(llama.experts[1], tmp_path / "spoiled", tensor))
    with pytest.raises(SltaError, match=f"spoiled holds NaN or Inf in the tensor {tensor}"):
        families.merge(content, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


@pytest.mark.parametrize("edges", ["base", "mean"])
def test_what_is_not_finite_outside_the_layers_gets_into_no_output(edges: str, llama: Family, tmp_path: Path) -> None:
    """The experts' heads are not read by the measurement: where they matter, they are refused when they are merged."""
    content = families.recipe(llama, edges=edges)
    content["models"][1]["model"] = str(spoiled(llama.experts[1], tmp_path / "spoiled", "lm_head.weight"))
    out = tmp_path / "out"
    if edges == "mean":
        with pytest.raises(SltaError, match=r"lm_head\.weight"):
            families.merge(content, out)
        assert list(out.glob("*.safetensors")) == []
    else:
        assert torch.equal(
            merged_state(families.merge(content, out))["lm_head.weight"], merged_state(llama.base)["lm_head.weight"]
        )


# What the base model's output head holds -> what is said of it; no calibration looks at it.
TOO_LARGE = {
    "infinite": (torch.inf, r"(?=.*lm_head\.weight)(?=.*base).* NaN or "),
    "too large for float16": (1e5, "The merged tensor 'lm_head.weight' is not finite as float16.*out_dtype: bfloat16"),
}


@pytest.mark.parametrize("case", TOO_LARGE)
@pytest.mark.parametrize("method", ["slta", "featcal", "sftm"])
def test_a_merged_tensor_that_is_not_finite_is_never_written(
    method: str, case: str, llama: Family, tmp_path: Path
) -> None:
    value, words = TOO_LARGE[case]

    def enlarge(tensors: State) -> None:
        tensors["lm_head.weight"][-1, -1] = value

    settings: dict[str, Any] = {"head": False, "anchor": "base"} if method == "featcal" else {}
    content = families.recipe(llama, method, calibration=method != "sftm", out_dtype="float16", **settings)
    content["base_model"] = str(edited(llama.base, tmp_path / "base", enlarge))
    with pytest.raises(SltaError, match=words):
        families.merge(content, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


@pytest.mark.parametrize(("method", "settings"), [("actmat", {"scale": 3.0}), ("sftm", {"lambda": 3.0})])
def test_a_merge_of_float16_checkpoints_that_overflows_float16(
    method: str, settings: dict[str, Any], make_family: MakeFamily, tmp_path: Path
) -> None:
    """Experts that all move a value which is near the largest one of float16 upwards; float32 holds their merge."""
    family = make_family(experts=3, dtype=torch.float16)
    edit_tensors(family.base, lambda tensors: tensors["lm_head.weight"].view(-1)[:1].fill_(60000))
    for folder in family.experts:
        edit_tensors(folder, lambda tensors: tensors["lm_head.weight"].view(-1)[:1].fill_(65504))
    exact, *others = (
        families.recipe(family, method, calibration=False, dtype=dtype, out_dtype=out, **settings)
        for dtype, out in (("float32", None), ("float32", "float16"), ("float16", None))
    )
    head = merged_state(families.merge(exact, tmp_path / "exact"))["lm_head.weight"]
    assert head.isfinite().all() and head.max() > torch.finfo(torch.float16).max
    for content in others:
        with pytest.raises(SltaError, match=TOO_LARGE["too large for float16"][1]):
            families.merge(content, tmp_path / "out")
        assert list((tmp_path / "out").glob("*.safetensors")) == []


CHANGING = {
    "a list of sources": ("calibration", ["a.jsonl", "b.jsonl"]),
    "a filtered source": ("calibration", [{"filter": "mlp", "value": "a.jsonl"}, {"value": "b.jsonl"}]),
    "a gradient": ("samples", [5, 30]),
    "a filtered level": ("level", [{"filter": "mlp", "value": "layer"}, {"value": "attn_mlp"}]),
}


def with_parameter(llama: Family, name: str, value: Any) -> dict[str, Any]:
    content = families.recipe(llama)
    target = content["models"][0]["parameters"] if name == "calibration" else content["parameters"]
    target[name] = value
    return content


@pytest.mark.parametrize("case", CHANGING)
def test_one_value_for_the_whole_merge(case: str, llama: Family, tmp_path: Path) -> None:
    name, value = CHANGING[case]
    with pytest.raises(SltaError, match=f"'{name}'.* one value for the whole merge"):
        families.merge(with_parameter(llama, name, value), tmp_path / "out")
    assert nothing_measured()
    assert not (tmp_path / "out").exists()


def test_an_optional_tensor_that_comes_first_hides_no_experts_parameters(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mergekit gives the parameters of those experts alone that have the tensor, here not of the second one."""
    expected = merged_state(families.merge(families.recipe(llama), tmp_path / "expected"))
    execute, lacking = ExecuteMergeMethodTask.execute, [True]

    def first_lacks_an_expert(self: Any, tensors: dict[Any, torch.Tensor], **rest: Any) -> Any:
        if lacking:
            lacking.clear()
            some = {model: tensor for model, tensor in tensors.items() if "expert2" not in str(model)}
            execute(self, some, **rest)
        return execute(self, tensors, **rest)

    monkeypatch.setattr(ExecuteMergeMethodTask, "execute", first_lacks_an_expert)
    found = merged_state(families.merge(families.recipe(llama), tmp_path / "out"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_mergekit_pytorch_is_refused_in_words(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama)
    files = {str(folder): str(folder / "model.safetensors") for folder in llama.folders}
    content["base_model"] = files[content["base_model"]]
    for entry in content["models"]:
        entry["model"] = files[entry["model"]]
    path = families.write_recipe(tmp_path / "recipe.yml", content)
    done = run(merge_raw_pytorch.main, path, tmp_path / "out.safetensors")
    assert done.exit_code == 1
    assert "mergekit-yaml" in done.output
    assert "Traceback" not in done.output
    assert nothing_measured()
    assert not [path for path in (tmp_path / "out.safetensors").rglob("*") if path.is_file()]


def test_single_tensors_are_refused_in_words() -> None:
    base, expert = torch.zeros(2, 2), torch.ones(2, 2)
    with pytest.raises(SltaError, match="mergekit-yaml"):
        merge_tensors([base, expert], method="slta", base_index=0, parameters={"calibration": ["a.jsonl"]})


# The registration


def test_registering_twice_changes_nothing() -> None:
    patches.install()
    names = [method.spec.name for method in merge_methods.registered_methods()]
    assert names.count("slta") == 1
    assert not hasattr(MergePlanner.plan_to_disk.__wrapped__, "__wrapped__")


def test_other_methods_are_planned_as_before(llama: Family, tmp_path: Path) -> None:
    content = families.recipe(llama, "task_arithmetic", calibration=False, per_expert={"weight": 0.5})
    out = families.merge(content, tmp_path / "out")
    base, *experts = (merged_state(folder) for folder in llama.folders)
    expected = {name: base[name] + sum(0.5 * (expert[name] - base[name]) for expert in experts) for name in base}
    assert worst_error(merged_state(out), expected) < 1e-6
