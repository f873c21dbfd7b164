"""The statistics file: the results of a calibration, small enough to publish beside a model.

A ``.safetensors`` file with ``gram/{submodule}`` [N, T, T] float64, ``task`` [N] and ``tokens`` [N] int64, and one
metadata entry, ``mergekit_slta``, that describes the models and the data. Rows are ordered by task, then by sample.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

import huggingface_hub
import safetensors
import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import save as serialize

from mergekit_slta import files
from mergekit_slta.errors import SltaError, reading
from mergekit_slta.files import STATISTICS_OF_MERGE
from mergekit_slta.levels import LEVELS, Fallback, of_level, place_of, sort_key
from mergekit_slta.models import hub

METADATA_KEY = "mergekit_slta"
PUBLISHED_PREFIX = "hf:"
LARGEST = 1e100  # the squares of float32 numbers, summed over all tokens and dimensions, are far below
ROUNDING = 1e-5  # of sums in float32, relative to the squares
_GRAM = "gram/"
_SUBMODULE = re.compile(r"model|layer\.[0-9]{1,6}(\.(?!.*\d{10}).+)?")
_PUBLISHED = re.compile(r"hf:(?P<repo>[^/@]+/[^/@]+)/(?P<file>[^@]+)(?:@(?P<revision>[^@]+))?")


class CalibrationInfo(BaseModel, extra="forbid", frozen=True):
    source: str
    template: str
    sha256: str


class BaseContent(BaseModel, extra="forbid", frozen=True):
    """Identifies the base model, whose layers run the weights of every model."""

    tensors: str  # a hash of its tensors, as of an expert's
    config: dict[str, str]  # the entries of its configuration that may affect the layers' results, hashed


class Fingerprint(BaseModel, frozen=True):  # the file also has hashes of the samples and the settings
    """Identifies the models of a measurement, to compare a file with a recipe."""

    base: BaseContent
    experts: tuple[str, ...]


class Info(BaseModel, extra="forbid", frozen=True):
    format_version: Literal[2]
    levels: tuple[str, ...]
    base_model: str
    models: tuple[str, ...]
    calibration: tuple[CalibrationInfo, ...]
    samples: int
    max_tokens: int
    seed: int
    inputs: Literal["base"]
    architecture: str
    num_layers: int
    dtype: str
    versions: dict[str, str]
    fingerprint: Fingerprint
    # The file has these entries only where the base model has a task, and where a layer is measured at a coarser level.
    keep: CalibrationInfo | None = None
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def tasks(self) -> tuple[CalibrationInfo, ...]:
        """The data of every task: the experts', then the base model's, if it has one."""
        return (*self.calibration, *([self.keep] if self.keep else []))


# What a statistics file holds: the first fields of ``Statistics``.
Measured = tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, Info]


def write_statistics(path: Path, measured: Measured) -> None:
    """Write a statistics file; an OSError leaves an earlier one as it was."""
    grams, task, tokens, info = measured
    tensors = {_GRAM + name: gram.contiguous() for name, gram in grams.items()} | {"task": task, "tokens": tokens}
    content = info.model_dump(mode="json", exclude_defaults=True)
    hashes, settings = [task.sha256 for task in info.tasks], [info.inputs, info.samples, info.max_tokens, info.seed]
    content["fingerprint"] |= {"tokens": files.digest(hashes), "settings": files.digest(settings)}
    files.write(path, serialize(tensors, metadata={METADATA_KEY: json.dumps(content, sort_keys=True)}))


def read_statistics(path: Path) -> Measured:
    """Read and check a statistics file; the errors are those of ``Statistics.load``."""
    if not path.is_file():
        missing = f"There is no statistics file {path}: make one with 'mergekit-slta calibrate'."
        if path.is_dir() or path.match(STATISTICS_OF_MERGE):
            missing += " Only slta writes statistics into the merged folder; a recipe of featcal has 'report: FOLDER'."
        raise SltaError(missing)
    if path.suffix in (".yml", ".yaml"):
        raise SltaError(f"{path} is a recipe, and no statistics file: measure it with 'mergekit-slta calibrate'.")
    as_file = "cannot be read as a safetensors file", "download it or measure into another file"
    with reading(path, *as_file), safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if set(metadata) != {METADATA_KEY} or not tensors.keys() >= {"task", "tokens"}:
        raise SltaError(f"{path} is not a statistics file: make one with 'mergekit-slta calibrate'.")
    try:
        info = Info.model_validate_json(metadata[METADATA_KEY])
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "no JSON"
        fix = "download it again, update mergekit-slta, or measure into another file"
        raise SltaError(f"{path} has unusable metadata ({where}): {fix}.") from None
    task, tokens = tensors.pop("task"), tensors.pop("tokens")
    grams = {name.removeprefix(_GRAM): gram for name, gram in tensors.items()}
    measured = {name: grams[name] for name in sorted(grams, key=sort_key)}, task, tokens, info
    if problem := _problem(measured):
        raise SltaError(f"{path} is damaged or was changed ({problem}): download it or measure into another file.")
    return measured


def _problem(measured: Measured) -> str | None:
    """Why the content of a file cannot be a measurement, as a clause."""
    grams, task, tokens, info = measured
    experts, tasks = len(info.models), len(info.models) + (info.keep is not None)
    described = len(info.calibration) == len(info.fingerprint.experts) == experts >= 1
    if not (described and info.levels and all(fallback.layers for fallback in info.fallbacks)):
        return "it does not describe all of its models and levels"
    if len({info.base_model, *info.models}) <= experts:
        return "it has one name for two models"
    if task.dtype != torch.int64 or task.ndim != 1 or task.unique_consecutive().tolist() != list(range(tasks)):
        return "'task' does not name every task in order"
    fits = tokens.dtype == torch.int64 and tokens.shape == task.shape
    if not (fits and 1 <= int(tokens.min()) <= int(tokens.max()) <= info.max_tokens):
        return "'tokens' does not fit"
    for name, gram in grams.items():
        fits = gram.dtype == torch.float64 and gram.shape == (len(task), experts, experts)
        if not _SUBMODULE.fullmatch(name) or not fits or not _are_grams(gram):
            return f"'{name}' holds no Gram matrices of a submodule"
    for level in info.levels:
        layers = {place_of(name).layer for name in of_level(grams, level)}
        count = 1 if level == "model" else info.num_layers
        if level not in LEVELS or len(layers) != count or layers != ({None} if level == "model" else {*range(count)}):
            return f"it does not hold level '{level}' of {info.num_layers} layers"
    return None


def _are_grams(gram: torch.Tensor) -> bool:
    """Whether matrices [N, T, T] can be Gram matrices of float32 vectors: semidefinite, and of no impossible size."""
    squares = gram.diagonal(dim1=-2, dim2=-1)
    sizes = squares[squares != 0]
    if not (gram.isfinite().all() and torch.equal(gram, gram.mT) and ((sizes > 1 / LARGEST) & (sizes < LARGEST)).all()):
        return False
    return bool((torch.linalg.eigvalsh(gram) >= -ROUNDING * squares.sum(-1, keepdim=True)).all())


def resolve_statistics(source: str, cache_dir: str | None = None) -> Path:
    """The path of a statistics file, or of that in a merged folder; ``hf:...`` is downloaded from the Hub."""
    if not source.startswith(PUBLISHED_PREFIX):
        path = Path(source).expanduser()
        return beside if (beside := path / STATISTICS_OF_MERGE).is_file() else path
    parts = _PUBLISHED.fullmatch(source)
    if parts is None:
        raise SltaError(f"'{source}' names no file on the Hub: write hf:ORG/REPO/FILE or hf:ORG/REPO/FILE@REVISION.")
    try:
        repo, file, revision = parts["repo"], parts["file"], parts["revision"]
        return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision, cache_dir=cache_dir))
    except hub.HUB_ERRORS as error:
        raise hub.refused(f"The statistics file {source} cannot be downloaded: ", error) from error
