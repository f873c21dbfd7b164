"""The manifest of a merge: what was merged, and how, for whoever repeats it; no absolute paths, no prompts."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from mergekit.common import ModelReference
from pydantic import BaseModel, TypeAdapter, ValidationError

from mergekit_slta import files
from mergekit_slta.data.sources import source_name
from mergekit_slta.errors import SltaError
from mergekit_slta.files import MANIFEST_OF_MERGE
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.fingerprint import fingerprint_of
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import SOURCES, published_name
from mergekit_slta.recipe.settings import Parameters, expert_parameters
from mergekit_slta.slta.statistics import Solution
from mergekit_slta.tables import as_json

_SNAPSHOT = re.compile(r"[/\\]snapshots[/\\]([0-9a-f]{40})")  # in the Hub's cache, the commit of a download


class MergedModel(BaseModel, frozen=True):
    """The base model or an expert."""

    name: str
    revision: str = ""  # on the Hub: the commit, of a download, or as the recipe names it
    sha256: str  # of the names, shapes and types of its tensors and a sample of their values
    parameters: dict[str, Any] = {}  # its own in the recipe, with the defaults filled in


class MergedTask(BaseModel, frozen=True):
    """The prompts of an expert or of the base model."""

    model: str  # its name
    source: str
    template: str = ""
    revision: str = ""  # of a dataset on the Hub: the commit
    prompts: int
    sha256: str  # of their tokens


class Manifest(BaseModel, frozen=True):
    """What was merged, and how; the content of ``MANIFEST_OF_MERGE``."""

    format_version: Literal[1] = 1
    method: str
    settings: dict[str, Any]  # the recipe's, with the defaults filled in
    base_model: MergedModel
    models: tuple[MergedModel, ...]  # the experts, in the recipe's order
    tasks: tuple[MergedTask, ...] = ()  # the experts', then the base model's
    versions: dict[str, str]
    machine: str = ""  # as "Linux x86_64, CPU"
    sha256: str = ""  # of the merged model, as ``MergedModel`` has it
    # By the model whose task it is: the ``TaskScore`` of the merge, with the numbers of prompts; by ``evaluate``.
    scores: dict[str, dict[str, Any]] = {}


def describe(
    experiment: Experiment, solution: Solution | None = None, folder: Path | None = None, *, whole: bool = True
) -> Manifest:
    """The manifest of a recipe whose models are downloaded; an SltaError if a model or the data cannot be read.

    Args:
        experiment: the opened recipe.
        solution: the merging weights of an ``slta`` merge, which know the prompts that a statistics file stands for.
        folder: the merged model, once it is written.
        whole: open the experts and the data; what else they would tell is left empty.
    """
    recipe, config = experiment.recipe, experiment.recipe.config
    given, base = expert_parameters(config), recipe.keep
    # Without prompts, a statistics file knows which were measured.
    not_told = set() if any(task.calibration for task in recipe.tasks) else {"samples", "seed", "max_tokens"}
    of_base = {"samples": base.samples if base else 0, "weight": recipe.keep_weight}
    own = [{key: of_base[key] for key in of_base if key not in not_told} if recipe.settings.runs_models else {}]
    kind = recipe.settings.expert
    own += [_filled(kind, given[expert.reference], SOURCES - {"samples"} | not_told) for expert in recipe.experts]
    checkpoints = experiment.checkpoints if whole else [experiment.base]
    contents = [(_revision(model), model.fingerprint) for model in checkpoints]
    contents += [("", "")] * (len(recipe.references) - len(contents))
    models = [
        MergedModel(name=recipe.names[model], revision=revision, sha256=sha256, parameters=parameters)
        for model, (revision, sha256), parameters in zip(recipe.references, contents, own, strict=True)
    ]
    settings = _filled(type(recipe.settings), config.parameters or {}, {"report"} | not_told)
    if settings.get("statistics"):
        settings["statistics"] = source_name(settings["statistics"])
    device = experiment.device
    device = torch.cuda.get_device_name(device) if device.startswith("cuda") else device.upper()
    tokenizer = recipe.tokenizer_source
    tokenizer = published_name(tokenizer) if isinstance(tokenizer, ModelReference) else tokenizer
    settings |= {"dtype": config.dtype, "out_dtype": config.out_dtype}
    settings |= {"tokenizer_source": tokenizer, "chat_template": config.chat_template}
    versions = files.versions() | {"python": platform.python_version()}
    if any(model.lora for model in recipe.references):
        versions |= {"peft": peft.__version__, "lora_merge_dtype": str(experiment.options.lora_merge_dtype)}
    return Manifest(
        method=config.merge_method,
        settings=settings,
        base_model=models[0],
        models=tuple(models[1:]),
        tasks=tuple(_tasks(experiment, solution)) if whole else (),
        versions=versions,
        machine=f"{platform.system()} {platform.machine()}, {device}",
        sha256=fingerprint_of(folder) if folder else "",
    )


def write(manifest: Manifest, folder: Path) -> None:
    """Write a merge's manifest into its folder; an OSError leaves an earlier one as it was."""
    files.write(folder / MANIFEST_OF_MERGE, as_json(manifest).encode())


def read(folder: Path) -> Manifest | None:
    """The manifest in a merged folder, None without one; an SltaError if it cannot be read."""
    path = folder / MANIFEST_OF_MERGE
    try:
        return Manifest.model_validate_json(path.read_bytes()) if path.is_file() else None
    except (OSError, ValidationError) as error:
        raise SltaError(
            f"{path} cannot be read ({type(error).__name__}): get an undamaged copy, or delete it."
        ) from None


def differences(before: Manifest, now: Manifest) -> list[str]:
    """What an earlier merge had that this one has not, a clause each; the machine and what came of it are left out."""
    models, earlier = (now.base_model, *now.models), (before.base_model, *before.models)
    named, here = [model.name for model in models], {model.sha256: model.name for model in models if model.sha256}
    others = [model for model in earlier if model.name not in named]
    copies = {model.name: here[model.sha256] for model in others if model.sha256 in here}  # the same, in another place
    had, has = _facts(before, copies), _facts(now, {})
    clauses = [
        f"other {name}" if name.startswith(("weights of", "prompts of")) else f"{name} {had[name]} instead of {value}"
        for name, value in has.items()
        if name in had and had[name] != value
    ]
    clauses += [f"the model {model.name}" for model in others if model.name not in copies]
    known = {copies.get(model.name, model.name) for model in earlier}
    return clauses + [f"no model {name}" for name in named if name not in known]


def _facts(made: Manifest, names: Mapping[str, str]) -> dict[str, Any]:
    """What two merges are compared by; ``names`` are other ones for models."""
    models = {names.get(model.name, model.name): model for model in (made.base_model, *made.models)}
    own = {f"{key} of {name}": value for name, model in models.items() for key, value in model.parameters.items()}
    weights = {f"weights of {name}": model.sha256 for name, model in models.items() if model.sha256}
    prompts = {f"prompts of {names.get(task.model, task.model)}": task.sha256 for task in made.tasks}
    known = {name: version for name, version in made.versions.items() if version}
    method = {"the method": made.method, "the base model": next(iter(models))}
    return method | weights | made.settings | own | prompts | known


def _filled(table: type[Parameters], given: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """A table's parameters by their names in a recipe: those given, gradients too, and the defaults of the others."""
    fields = {field.alias or name: field for name, field in table.model_fields.items() if name not in left_out}
    filled = {name: given.get(name, field.default) for name, field in fields.items()}
    return dict(TypeAdapter(dict[str, Any]).dump_python(filled, mode="json"))


def _tasks(experiment: Experiment, solution: Solution | None) -> Iterator[MergedTask]:
    recipe = experiment.recipe
    for index, task in enumerate(recipe.tasks if recipe.settings.runs_models else ()):
        if task.calibration:
            data, template = experiment.draw(task), task.template
            source, revision, count, sha256 = source_name(data.source), data.revision, len(data.token_ids), data.sha256
        elif solution is not None:
            info, count, revision = solution.statistics.info, int((solution.statistics.task == index).sum()), ""
            measured = info.tasks[index]
            source, template, sha256 = measured.source, measured.template, measured.sha256
        else:
            continue
        name = recipe.names[task.reference]
        yield MergedTask(model=name, source=source, template=template, revision=revision, prompts=count, sha256=sha256)


def _revision(model: Checkpoint) -> str:
    """The commits of a model and of its adapter in the Hub's cache, else the revisions that the recipe names."""
    places = zip(filter(None, (model.reference.model, model.reference.lora)), model.folders, strict=False)
    commits = [(_SNAPSHOT.search(str(folder)), path.revision or "") for path, folder in places]
    return "+".join(found[1] if found else named for found, named in commits).strip("+")
