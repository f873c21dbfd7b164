"""The statistics file: everything that calibration measured, small enough to publish beside a model.

One ``.safetensors`` file with ``gram/{submodule}`` [N, T, T] float64, ``task`` [N] and ``tokens`` [N] int64, and one
metadata entry, ``mergekit_slta``, that says what was measured on which models and data. Rows are ordered by task, then
by sample.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Literal

import huggingface_hub
import safetensors
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import save as serialize

from mergekit_slta import __version__, files
from mergekit_slta.errors import SltaError
from mergekit_slta.levels import LEVELS, covers, of_level, sort_key
from mergekit_slta.models import hub
from mergekit_slta.slta.solution import Solution
from mergekit_slta.slta.solver import solve

FORMAT_VERSION = 1
METADATA_KEY = "mergekit_slta"
PUBLISHED_PREFIX = "hf:"
_GRAM = "gram/"
_PUBLISHED = re.compile(r"hf:(?P<repo>[^/@]+/[^/@]+)/(?P<file>[^@]+)(?:@(?P<revision>[^@]+))?")


class CalibrationInfo(BaseModel):
    """Which data an expert was measured on."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str
    template: str
    sha256: str
    chat_date: date | None = None  # what the chat template was told; none where it did not ask


class Content(BaseModel):
    """A model by what its tensors hold, wherever and in however many files they are.

    Attributes:
        sample: identifies the tensors' names, shapes and dtypes and a few bytes of each; known at little cost.
        whole: identifies all their bytes, so that an edit of a few rows shows; None where they were not read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    sample: str
    whole: str | None

    def __str__(self) -> str:
        return self.whole or self.sample

    def fits(self, other: Content) -> bool:
        """Whether two models are the same: by their samples, and by all bytes where both are known by them."""
        return self.sample == other.sample and (None in (self.whole, other.whole) or self.whole == other.whole)


class BaseContent(Content):
    """The base model, in whose layers every model's weights are run.

    Attributes:
        config: the entries of its configuration that may decide what the layers compute, each with a hash of its value.
    """

    config: dict[str, str]


class Fingerprint(BaseModel):
    """What decides whether a file fits a recipe: the contents of the models and the data, and the settings.

    A model that is one string, as older versions wrote it, is known by its sample alone: neither all its bytes nor the
    base model's configuration can be compared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    base: BaseContent | str
    experts: tuple[Content | str, ...]
    tokens: str
    settings: str

    @property
    def samples_only(self) -> bool:
        """Whether some model is known by its sample alone."""
        return any(content.whole is None for content in self.contents)

    @property
    def contents(self) -> list[Content]:
        """The base model, then the experts."""
        return [
            content if isinstance(content, Content) else Content(sample=content, whole=None)
            for content in (self.base, *self.experts)
        ]


class Info(BaseModel):
    """The metadata of a statistics file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format_version: Literal[1]
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


@dataclass(frozen=True)
class Statistics:
    """Per-sample Gram matrices of every submodule, and what they were measured on.

    Attributes:
        grams: submodule name to [N, T, T] float64.
        task: [N] int64, the index of the expert whose data the sample came from.
        tokens: [N] int64, the tokens of the sample that were used.
        info: the file's metadata.
    """

    grams: dict[str, torch.Tensor]
    task: torch.Tensor
    tokens: torch.Tensor
    info: Info

    def __repr__(self) -> str:
        submodules = ", ".join(f"{len(self.submodules(level))} at {level}" for level in self.info.levels)
        return (
            f"{len(self.task)} samples of {len(self.info.models)} tasks ({int(self.tokens.sum())} tokens), submodules: "
            f"{submodules}"
        )

    def submodules(self, level: str) -> list[str]:
        """The names of a level's submodules, in the order of the layers, attention before the MLP, linear maps by name.

        Raises:
            SltaError: the level was not measured.
        """
        if level not in self.info.levels:
            known = level in LEVELS
            fix = f"measure it with 'mergekit-slta calibrate --level {level}'" if known else "name one of these"
            raise SltaError(f"The statistics hold no level '{level}', only {', '.join(self.info.levels)}: {fix}.")
        return of_level(self.grams, level)

    def select(self, *names: str) -> Statistics:
        """The statistics of some of the experts in the given order, as if only they had been measured.

        Args:
            names: the experts' names, as in ``info.models``.

        Raises:
            SltaError: a name is not in the statistics, is given twice, or there is none.
        """
        known = self.info.models
        for name in names:
            if name not in known:
                raise SltaError(f"The statistics hold no expert '{name}', only {', '.join(known)}.")
            if names.count(name) > 1:
                raise SltaError(f"The expert '{name}' is named twice: name each of {', '.join(known)} once at most.")
        if not names:
            raise SltaError(f"No expert is named: name some of {', '.join(known)}.")
        return self.take([known.index(name) for name in names])

    def take(self, experts: Sequence[int]) -> Statistics:
        """``select`` by the experts' positions in ``info.models``."""
        chosen = torch.tensor(list(experts))
        rows = torch.cat([(self.task == expert).nonzero().flatten() for expert in experts])
        position = {expert: index for index, expert in enumerate(experts)}
        calibration = tuple(self.info.calibration[expert] for expert in experts)
        fingerprint = self.info.fingerprint.model_copy(
            update={
                "experts": tuple(self.info.fingerprint.experts[expert] for expert in experts),
                "tokens": tokens_fingerprint([entry.sha256 for entry in calibration]),
            }
        )
        models = tuple(self.info.models[expert] for expert in experts)
        return Statistics(
            grams={name: gram[rows][:, chosen][:, :, chosen] for name, gram in self.grams.items()},
            task=torch.tensor([position[int(expert)] for expert in self.task[rows]]),
            tokens=self.tokens[rows],
            info=self.info.model_copy(
                update={"models": models, "calibration": calibration, "fingerprint": fingerprint}
            ),
        )

    def first_samples(self, count: int) -> Statistics:
        """The statistics of each task's first ``count`` samples, or of all that a task has.

        Raises:
            SltaError: no task has so many, or ``count`` is not positive.
        """
        most = int(self.task.bincount().max())
        if not 1 <= count <= most:
            raise SltaError(f"The statistics hold {most} samples per task: the first {count} of them cannot be used.")
        rows = torch.cat([(self.task == task).nonzero().flatten()[:count] for task in self.task.unique()])
        return replace(
            self,
            grams={name: gram[rows] for name, gram in self.grams.items()},
            task=self.task[rows],
            tokens=self.tokens[rows],
        )

    def solve(
        self,
        level: str | None = None,
        *,
        balance: bool = True,
        ridge: float = 0.0,
        task_weights: Mapping[str, float] | Sequence[float] | None = None,
        samples: int | None = None,
    ) -> Solution:
        """Solve for the merging weights of every submodule of a level.

        Args:
            level: the level; by default ``attn_mlp`` if it was measured, else the first one that was.
            balance: give every sample the same influence (Eq. 33-34).
            ridge: draws the weights towards zero: adds ridge * trace(A) / T to A's diagonal.
            task_weights: how much each expert's task counts against the others': by the experts' names, 1 for those
                that are left out, or ``T`` numbers.
            samples: use each task's first samples only, so many.

        Raises:
            SltaError: the level was not measured, or an argument is out of its range.
        """
        level = level or ("attn_mlp" if "attn_mlp" in self.info.levels else self.info.levels[0])
        if not 0 <= ridge < math.inf:
            raise SltaError(f"'ridge' is {ridge}: give a number of at least zero.")
        weights = self._task_weights(task_weights) if task_weights else None
        used = self if samples is None else self.first_samples(samples)
        submodules = {
            name: solve(used.grams[name], used.task, balance=balance, ridge=ridge, task_weights=weights)
            for name in used.submodules(level)
        }
        return Solution(used, level, submodules, balance, ridge, weights)

    def _task_weights(self, given: Mapping[str, float] | Sequence[float]) -> tuple[float, ...]:
        """A weight for each expert's task."""
        names = self.info.models
        if not isinstance(given, Mapping):
            if len(given) != len(names):
                raise SltaError(f"There are {len(given)} task weights for {len(names)} experts: give one for each.")
            given = dict(zip(names, given, strict=True))
        for name, weight in given.items():
            if name not in names:
                raise SltaError(f"A task weight is for '{name}', but the experts are {', '.join(names)}.")
            if not 0 <= weight < math.inf:
                raise SltaError(f"The task weight of {name} is {weight}: give a number of at least zero.")
        weights = tuple(float(given.get(name, 1.0)) for name in names)
        if not any(weights):
            raise SltaError("Every task weight is zero: at least one task must count.")
        return weights

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics file.

        Raises:
            OSError: it cannot be written; what was there is still there.
        """
        tensors = {_GRAM + name: gram.contiguous() for name, gram in self.grams.items()}
        tensors |= {"task": self.task, "tokens": self.tokens}
        text = json.dumps(self.info.model_dump(mode="json", exclude_none=True), sort_keys=True)
        files.write(Path(path).expanduser(), serialize(tensors, metadata={METADATA_KEY: text}))

    @staticmethod
    def load(source: str | os.PathLike[str], cache_dir: str | None = None) -> Statistics:
        """Read and check a statistics file.

        Args:
            source: its path, or ``hf:ORG/REPO/FILE[@REVISION]`` on the Hugging Face Hub.
            cache_dir: where downloads are kept; the Hub's own cache by default.

        Raises:
            SltaError: the file is missing, truncated, of another kind or of a newer version, its content cannot be
                what a calibration measured, or the Hub does not give it.
        """
        path = resolve_statistics(os.fspath(source), cache_dir)
        if not path.is_file():
            raise SltaError(f"There is no statistics file {path}: make one with 'mergekit-slta calibrate'.")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError) as error:
            raise SltaError(
                f"{path} is truncated or no safetensors file ({error}): get it or measure it again."
            ) from None
        if METADATA_KEY not in metadata:
            raise SltaError(f"{path} is no statistics file of mergekit-slta.")
        info = _parse_info(metadata[METADATA_KEY], path)
        grams = {name.removeprefix(_GRAM): tensor for name, tensor in tensors.items() if name.startswith(_GRAM)}
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(_GRAM)}
        if set(metadata) != {METADATA_KEY} or set(rest) != {"task", "tokens"}:
            raise SltaError(f"{path} holds entries that a statistics file does not have: get it or measure it again.")
        statistics = Statistics(dict(sorted(grams.items(), key=lambda item: sort_key(item[0]))), **rest, info=info)
        if problem := _problem(statistics):
            raise SltaError(f"{path} is damaged or was changed ({problem}): get it or measure it again.")
        return statistics


def resolve_statistics(source: str, cache_dir: str | None = None) -> Path:
    """Find a statistics file: a local path, or ``hf:ORG/REPO/FILE[@REVISION]``, which is fetched from the Hub.

    Args:
        source: what the recipe or the user gives.
        cache_dir: where downloads are kept; the Hub's own cache by default.

    Raises:
        SltaError: the reference is malformed, or the Hub does not give the file.
    """
    if not source.startswith(PUBLISHED_PREFIX):
        return Path(source).expanduser()
    parts = _PUBLISHED.fullmatch(source)
    if parts is None:
        raise SltaError(f"Statistics '{source}': write hf:ORG/REPO/FILE or hf:ORG/REPO/FILE@REVISION.")
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                parts["repo"], parts["file"], revision=parts["revision"], cache_dir=cache_dir
            )
        )
    except hub.ERRORS as error:
        raise SltaError(f"Statistics '{source}' cannot be fetched: {hub.reason(error)}.") from error


def settings_fingerprint(samples: int, max_tokens: int, seed: int) -> str:
    """Identify the settings that decide what is measured; sha256 in hex."""
    return _sha256({"inputs": "base", "max_tokens": max_tokens, "samples": samples, "seed": seed})


def tokens_fingerprint(token_hashes: Sequence[str]) -> str:
    """Identify the token ids of all tasks, from the sha256 of each task's; sha256 in hex."""
    return _sha256(list(token_hashes))


def versions() -> dict[str, str]:
    """The versions of what measures."""
    installed = {name: importlib.metadata.version(name) for name in ("mergekit", "torch", "transformers")}
    return {"mergekit-slta": __version__, **installed}


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse_info(text: str, path: Path) -> Info:
    try:
        content = json.loads(text)
        version = content.get("format_version")
    except (ValueError, AttributeError):
        raise SltaError(f"{path} has unreadable metadata: get it or measure it again.") from None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise SltaError(f"{path} is of format version {version}: this needs a newer mergekit-slta.")
    try:
        return Info.model_validate(content)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise SltaError(f"{path} has unusable metadata ('{where}'): get it or measure it again.") from None


def _problem(statistics: Statistics) -> str | None:
    """What about the content cannot be a measurement, in a few words."""
    info, task, tokens = statistics.info, statistics.task, statistics.tokens
    experts, rows = len(info.models), len(task)
    if not (len(info.calibration) == len(info.fingerprint.experts) == experts >= 1):
        return "it does not describe each of its models"
    if info.fingerprint.settings != settings_fingerprint(info.samples, info.max_tokens, info.seed):
        return "its settings do not match their fingerprint"
    if info.fingerprint.tokens != tokens_fingerprint([entry.sha256 for entry in info.calibration]):
        return "its calibration data does not match its fingerprint"
    if task.dtype != torch.int64 or task.ndim != 1 or sorted(set(task.tolist())) != list(range(experts)):
        return "'task' does not name every expert"
    if bool((task.diff() < 0).any()):
        return "'task' is not in order"
    if tokens.dtype != torch.int64 or tokens.shape != task.shape or bool((tokens < 1).any()):
        return "'tokens' does not fit"
    for level in info.levels:
        if level not in LEVELS:
            return f"unknown level '{level}'"
        if not covers(statistics.grams, level, info.num_layers):
            return f"level '{level}' does not cover the {info.num_layers} layers"
    known = {name for level in info.levels for name in of_level(statistics.grams, level)}
    for name, gram in statistics.grams.items():
        if name not in known:
            return f"'{name}' belongs to no level of the file"
        if gram.dtype != torch.float64 or gram.shape != (rows, experts, experts):
            return f"the Gram matrices of '{name}' have the wrong shape or type"
        if not _is_gram(gram):
            return f"'{name}' holds no Gram matrices"
    return None


def _is_gram(gram: torch.Tensor) -> bool:
    """Whether matrices are finite, symmetric, and positive semidefinite up to rounding."""
    if not bool(torch.isfinite(gram).all()) or not torch.equal(gram, gram.mT):
        return False
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(gram.dtype).tiny).rsqrt(), 0.0)
    # An expert of norm zero has a row of zeros; the others are compared on a unit diagonal.
    untouched = gram.abs().sum(-1)[diagonal == 0]
    lowest = torch.linalg.eigvalsh(scale[:, :, None] * gram * scale[:, None, :])[:, 0]
    return bool((diagonal >= 0).all()) and bool((untouched == 0).all()) and bool((lowest >= -1e-9).all())
