"""The manifest of a merge: what was merged, and how, for whoever repeats or checks it; without paths and texts."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open

from mergekit_slta import files
from mergekit_slta.data.sources import source_name
from mergekit_slta.errors import SltaError
from mergekit_slta.evaluation.evaluate import Comparison
from mergekit_slta.files import MANIFEST_OF_MERGE
from mergekit_slta.models.adapters import source_folders
from mergekit_slta.models.headers import weight_map
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import SOURCES, Recipe, published_name
from mergekit_slta.recipe.settings import Parameters, expert_parameters
from mergekit_slta.slta.statistics import Solution
from mergekit_slta.slta.statistics_file import versions

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # in a tensor's name: of a layer, an expert
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})")  # in the Hub's cache, the commit of a download


class MergedModel(BaseModel):
    """The base model or an expert."""

    model_config = ConfigDict(frozen=True)
    name: str
    revision: str = ""  # on the Hub: the commit, of a download, or as the recipe names it
    sha256: str  # of the names, shapes and types of its tensors and a sample of their values
    parameters: dict[str, Any] = {}  # its own in the recipe, with the defaults filled in


class MergedTask(BaseModel):
    """The prompts of an expert or of the base model."""

    model_config = ConfigDict(frozen=True)
    model: str  # its name
    source: str
    revision: str = ""  # of a dataset on the Hub: the commit
    prompts: int
    sha256: str  # of their tokens


class Manifest(BaseModel):
    """What was merged, and how; the content of ``MANIFEST_OF_MERGE``."""

    model_config = ConfigDict(frozen=True)
    format_version: Literal[1] = 1
    method: str
    settings: dict[str, Any]  # the recipe's, with the defaults filled in
    base_model: MergedModel
    models: tuple[MergedModel, ...]  # the experts, in the recipe's order
    tasks: tuple[MergedTask, ...] = ()  # the experts', then the base model's
    versions: dict[str, str]
    # How many tensors there are of each type and shape, as "BF16 [32, 48]", by names with a star for each number.
    tensors: dict[str, dict[str, int]] = {}
    # By the model whose task it is: the ``TaskScore`` of the merge, with the numbers of prompts; by ``evaluate``.
    scores: dict[str, dict[str, int | float | None]] = {}


def describe(experiment: Experiment, solution: Solution | None = None, folder: Path | None = None) -> Manifest:
    """The manifest of a recipe's merge.

    Args:
        experiment: the opened recipe; its models are downloaded.
        solution: the merging weights of an ``slta`` merge, which know the prompts that a statistics file stands for.
        folder: the merged model, once it is written.

    Raises:
        SltaError: a model or the data cannot be read.
    """
    recipe = experiment.recipe
    hashes = dict(zip(recipe.references, experiment.fingerprints, strict=True))
    parameters = _parameters(recipe)
    models = [
        MergedModel(
            name=published_name(model), revision=_revision(model), sha256=hashes[model], parameters=parameters[model]
        )
        for model in recipe.references
    ]
    return Manifest(
        method=recipe.config.merge_method,
        settings=_settings(recipe),
        base_model=models[0],
        models=tuple(models[1:]),
        tasks=tuple(_tasks(experiment, solution)),
        versions=versions() | {"commit": commit()},
        tensors=tensor_table(folder) if folder else {},
    )


def write(manifest: Manifest, folder: Path) -> None:
    """Write a merge's manifest into its folder; an OSError leaves an earlier one as it was."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False)
    files.write(folder / MANIFEST_OF_MERGE, f"{text}\n".encode())


def read(folder: Path) -> Manifest | None:
    """The manifest in a merged folder; None without one.

    Raises:
        SltaError: it cannot be read.
    """
    path = folder / MANIFEST_OF_MERGE
    try:
        return Manifest.model_validate_json(path.read_bytes()) if path.is_file() else None
    except (OSError, ValidationError) as error:
        raise SltaError(
            f"{path} cannot be read ({type(error).__name__}): get an undamaged copy, or delete it."
        ) from None


def add_scores(folder: Path, comparison: Comparison) -> None:
    """Add a merge's scores to its manifest, if its folder has one; an OSError leaves it as it was."""
    made, place = read(folder), str(folder.expanduser().resolve())
    if made is not None:
        scores = {
            of.model: {"prompts": of.prompts, "short_answers": of.short_answers}
            | asdict(of.scores[place if place in of.scores else Path(place).name])
            for of in comparison.tasks.values()
        }
        write(made.model_copy(update={"scores": scores}), folder)


def differences(before: Manifest, now: Manifest) -> list[str]:
    """What an earlier merge had that this one has not, a clause each; written tensors are left out."""
    clauses = [f"the method {before.method} instead of {now.method}"] * (before.method != now.method)
    settings = [(name, before.settings.get(name), value) for name, value in now.settings.items()]
    hashes = {model.name: model for model in (before.base_model, *before.models)}
    for model in (now.base_model, *now.models):
        known = hashes.pop(model.name, None)
        if known is None:
            clauses.append(f"no model {model.name}")
            continue
        clauses += [f"other weights of {model.name}"] * (known.sha256 != model.sha256)
        own = [
            (f"{name} of {model.name}", known.parameters.get(name), value) for name, value in model.parameters.items()
        ]
        settings += own if before.method == now.method else []
    clauses += [f"the model {name}" for name in hashes]
    clauses += ["another base model"] * (before.base_model.name != now.base_model.name)
    clauses += [f"{name} {was} instead of {value}" for name, was, value in settings if was is not None and was != value]
    tasks = {task.model: task.sha256 for task in before.tasks}
    clauses += [
        f"other prompts of {task.model} ({task.source})"
        for task in now.tasks
        if tasks.get(task.model, task.sha256) != task.sha256
    ]
    for name, value in now.versions.items():
        was = before.versions.get(name)
        clauses += [f"{name} {was} instead of {value}"] * bool(was and value and was != value)
    return clauses


def tensor_table(folder: Path) -> dict[str, dict[str, int]]:
    """The ``Manifest.tensors`` of a folder; empty for pickled weights."""
    table: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for file in (folder / name for name in weight_map(folder) if name.endswith(".safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                stored = tensors.get_slice(name)
                table[_NUMBER.sub("*", name)][f"{stored.get_dtype()} {stored.get_shape()}"] += 1
    return {name: dict(sorted(table[name].items())) for name in sorted(table)}


def commit() -> str:
    """The commit that this package was installed from; empty for a release, or where nobody knows."""
    with suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.distribution("mergekit-slta").read_text("direct_url.json")
        if known := json.loads(installed or "{}").get("vcs_info"):
            return str(known["commit_id"])
    clone = Path(files.__file__).parents[1]
    if not (clone / ".git").exists():
        return ""
    with suppress(OSError, subprocess.CalledProcessError):
        asked = ["git", "-C", str(clone), "rev-parse", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def of_another_recipe(made: Manifest, experiment: Experiment) -> list[str]:
    """What a merge had that a recipe has not, a clause each, as far as the recipe and its base model show it."""
    recipe, known = experiment.recipe, {model.name: model for model in (made.base_model, *made.models)}
    base, *experts = (
        known.get(name := published_name(model), MergedModel(name=name, sha256="")).model_copy(
            update={"parameters": parameters}
        )
        for model, parameters in _parameters(recipe).items()
    )
    base = base.model_copy(update={"sha256": experiment.base.fingerprint()})
    method, settings = recipe.config.merge_method, _settings(recipe)
    update = {"method": method, "settings": settings, "base_model": base, "models": tuple(experts)}
    return differences(made, made.model_copy(update=update))


def _parameters(recipe: Recipe) -> dict[ModelReference, dict[str, Any]]:
    """The parameters of the base model and of each expert, with the defaults filled in."""
    given, kept = expert_parameters(recipe.config), recipe.keep
    parameters = {recipe.base: {"samples": kept.samples, "weight": kept.weight} if kept else {}}
    for expert in recipe.references[1:]:
        parameters[expert] = _filled(recipe.method.expert, given[expert], SOURCES - {"samples"})
    return parameters


def _settings(recipe: Recipe) -> dict[str, Any]:
    """A recipe's settings with the defaults filled in; those of mergekit as far as they decide the tensors."""
    config, source = recipe.config, recipe.tokenizer_source
    settings = _filled(recipe.method, config.parameters or {}, {"report"})
    if settings.get("statistics"):
        settings["statistics"] = source_name(settings["statistics"])
    tokenizer = published_name(source) if isinstance(source, ModelReference) else source
    return settings | {"dtype": config.dtype, "out_dtype": config.out_dtype, "tokenizer_source": tokenizer}


def _filled(table: type[Parameters], given: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """A table's parameters by their names in a recipe: those given, gradients too, and the defaults of the others."""
    fields = {field.alias or name: field for name, field in table.model_fields.items() if name not in left_out}
    return {name: given.get(name, field.default) for name, field in fields.items()}


def _tasks(experiment: Experiment, solution: Solution | None) -> Iterator[MergedTask]:
    recipe = experiment.recipe
    for index, task in enumerate(recipe.tasks if recipe.method.runs_models else ()):
        name = published_name(task.reference)
        if task.calibration:
            data = experiment.samples(task)
            source, count = source_name(data.source), len(data.token_ids)
            yield MergedTask(model=name, source=source, revision=data.revision, prompts=count, sha256=data.sha256)
        elif solution is not None:
            info, count = solution.statistics.info, int((solution.statistics.task == index).sum())
            measured = [*info.calibration, *([info.keep] if info.keep else [])][index]
            yield MergedTask(model=name, source=measured.source, prompts=count, sha256=measured.sha256)


def _revision(model: ModelReference) -> str:
    """The commits of a model and of its adapter in the Hub's cache, else the revisions that the recipe names."""
    folders = source_folders(model, LoaderCache().hf_cache_dir)
    commits = []
    for path, folder in zip(filter(None, (model.model, model.lora)), folders, strict=False):
        found = _SNAPSHOT.search(str(folder))
        commits.append(found[1] if found else path.revision or "")
    return "+".join(commits).strip("+")
