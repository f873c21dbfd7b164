"""The statistics file: the results of a calibration, small enough to publish beside a model.

A ``.safetensors`` file with ``gram/{submodule}`` [N, T, T] float64, ``task`` [N] and ``tokens`` [N] int64, and one
metadata entry, ``mergekit_slta``, that describes the models and the data. Rows are ordered by task, then by sample.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, SupportsFloat, SupportsIndex

import huggingface_hub
import safetensors
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import save as serialize

from mergekit_slta import __version__, files
from mergekit_slta.errors import SltaError, number, reading, whole_number
from mergekit_slta.files import STATISTICS_OF_MERGE
from mergekit_slta.levels import LEVELS, Fallback, of_level, place_of, sort_key
from mergekit_slta.models import hub
from mergekit_slta.slta.solution import Solution
from mergekit_slta.slta.solver import solve
from mergekit_slta.tables import Paragraphs, Table, known_names

METADATA_KEY = "mergekit_slta"
PUBLISHED_PREFIX = "hf:"
_GRAM = "gram/"
_SUBMODULE = re.compile(r"model|layer\.[0-9]{1,6}(\.(?!.*\d{10}).+)?")
_PUBLISHED = re.compile(r"hf:(?P<repo>[^/@]+/[^/@]+)/(?P<file>[^@]+)(?:@(?P<revision>[^@]+))?")


class CalibrationInfo(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str
    template: str
    sha256: str


class BaseContent(BaseModel):
    """Identifies the base model, whose layers run the weights of every model.

    Attributes:
        tensors: a hash of its tensors, as of an expert's.
        config: the entries of its configuration that may affect the layers' results, each with a hash of its value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    tensors: str
    config: dict[str, str]


class Fingerprint(BaseModel):
    """Identifies the models, the data and the settings of a measurement, to compare a file with a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    base: BaseContent
    experts: tuple[str, ...]
    tokens: str
    settings: str


class Info(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
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
    # The file has these entries only where the base model has a task, where a layer is measured at a coarser level, and
    # in a merge's output, which the same merge uses again while the models' files have not changed.
    keep: CalibrationInfo | None = None
    fallbacks: tuple[Fallback, ...] = ()
    files: str = ""


@dataclass(frozen=True, repr=False)
class Statistics(Paragraphs):
    """Per-sample Gram matrices of every submodule, with the metadata of their measurement.

    Attributes:
        grams: submodule name to [N, T, T] float64.
        task: [N] int64, the index of the task that the sample came from; task t is that of expert t, task T the base
            model's, if it has one.
        tokens: [N] int64, the number of tokens of the sample.
        info: the file's metadata.
        paths: where ``measure`` found the models, by their names in ``info``; not in the file, so empty after ``load``.
    """

    grams: dict[str, torch.Tensor]
    task: torch.Tensor
    tokens: torch.Tensor
    info: Info
    paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """How many samples, tasks, tokens and submodules were measured."""
        submodules = ", ".join(f"{len(self.submodules(level))} at {level}" for level in self.info.levels)
        samples, tasks = len(self.task), int(self.task.max()) + 1
        drawn = f"{samples} sample{'s' * (samples > 1)} of {tasks} task{'s' * (tasks > 1)}"
        return f"{drawn} ({int(self.tokens.sum())} tokens), submodules: {submodules}"

    def columns(self) -> dict[str, list[Any]]:
        """The columns of ``to_frame``: a row for each task, that of the base model last."""
        info = self.info
        sources = [*info.calibration, *([info.keep] if info.keep else [])]
        rows = [self.task == task for task in range(len(sources))]
        return {
            "task of": [*info.models, info.base_model][: len(sources)],
            "samples": [int(own.sum()) for own in rows],
            "tokens": [int(self.tokens[own].sum()) for own in rows],
            "calibration": [source.source for source in sources],
        }

    def parts(self) -> Iterator[str | Table]:
        """A row for each task, and a sentence on all."""
        columns = self.columns()
        yield Table(list(columns), [list(map(str, row)) for row in zip(*columns.values(), strict=True)])
        yield f"{self.summary}."
        yield from map(str, self.info.fallbacks)

    def submodules(self, level: str) -> list[str]:
        """The names of a level's submodules, in the order of the layers, attention before the MLP, linear maps by name.

        Returns:
            The names, such as ``layer.0.attn``.

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

        The base model's task stays.

        Args:
            names: the experts' names, as in ``info.models``, in the tables, or in the recipe that was measured.

        Returns:
            The Gram matrices of these experts on the samples of their tasks.

        Raises:
            SltaError: no name is given, or a name is not in the statistics or given twice.
        """
        known = self.info.models
        spelled = {path: name for name, path in self.paths.items()} | known_names(known)
        wanted = [spelled.get(str(name), str(name)) for name in names]
        for name, found in zip(names, wanted, strict=True):
            if isinstance(name, (list, tuple)):
                raise SltaError("'select' takes names, not a list of them: write select('a', 'b') or select(*names).")
            if found not in known:
                raise SltaError(f"The statistics hold no expert '{name}', only {', '.join(known)}.")
        if not names or len(set(wanted)) < len(wanted):
            raise SltaError(f"Name one or more of {', '.join(known)}, each once at most.")
        return self.take([known.index(name) for name in wanted])

    def take(self, experts: Sequence[int], keep: bool = True) -> Statistics:
        """``select`` by the experts' positions in ``info.models``; with the base model's task only if ``keep``."""
        chosen, info = torch.tensor(list(experts)), self.info
        kept = info.keep if keep else None
        tasks = [*experts, *([len(info.models)] if kept else [])]
        rows = torch.cat([(self.task == task).nonzero().flatten() for task in tasks])
        calibration = tuple(info.calibration[expert] for expert in experts)
        fingerprint = {
            "experts": tuple(info.fingerprint.experts[expert] for expert in experts),
            "tokens": tokens_fingerprint([entry.sha256 for entry in (*calibration, *([kept] if kept else []))]),
        }
        described = {
            "models": tuple(info.models[expert] for expert in experts),
            "calibration": calibration,
            "keep": kept,
            "fingerprint": info.fingerprint.model_copy(update=fingerprint),
        }
        return Statistics(
            grams={name: gram[rows][:, chosen][:, :, chosen] for name, gram in self.grams.items()},
            task=torch.tensor([tasks.index(task) for task in self.task[rows].tolist()]),
            tokens=self.tokens[rows],
            info=info.model_copy(update=described),
            paths=self.paths,
        )

    def at_levels(self, levels: Collection[str]) -> Statistics:
        """The statistics of some of the levels, as if only they had been measured."""
        names = {name for level in levels for name in self.submodules(level)}
        chosen = {
            "levels": tuple(level for level in self.info.levels if level in levels),
            "fallbacks": tuple(fallback for fallback in self.info.fallbacks if fallback.level in levels),
        }
        grams = {name: gram for name, gram in self.grams.items() if name in names}
        return replace(self, grams=grams, info=self.info.model_copy(update=chosen))

    def first_samples(self, count: int | SupportsIndex) -> Statistics:
        """The statistics of each task's first ``count`` samples, or of all samples if a task has fewer.

        Returns:
            The statistics, as if only these samples had been drawn.

        Raises:
            SltaError: every task has fewer samples, or ``count`` is not positive.
        """
        most, wanted = int(self.task.bincount().max()), whole_number("samples", count)
        if not 1 <= wanted <= most:
            raise SltaError(f"The statistics hold {most} samples per task: the first {wanted} of them cannot be used.")
        rows = torch.cat([(self.task == task).nonzero().flatten()[:wanted] for task in self.task.unique()])
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
        ridge: float | SupportsFloat = 0.0,
        task_weights: Mapping[str, float | SupportsFloat] | Iterable[float | SupportsFloat] | None = None,
        samples: int | SupportsIndex | None = None,
        keep_weight: float | SupportsFloat | None = None,
    ) -> Solution:
        """Solve for the merging weights of every submodule of a level.

        Args:
            level: the level; by default ``attn_mlp`` if it was measured, else the first measured level.
            balance: give every sample the same influence (Eq. 33-34).
            ridge: draws the weights towards zero: adds ridge * trace(A) / T to A's diagonal.
            task_weights: how much each expert's task counts relative to the others: ``T`` numbers, or a number by the
                expert's name, 1 by default.
            samples: how many of each task's first samples to use; all by default.
            keep_weight: how much the base model's task counts, κ; 1 by default, 0 leaves it out.

        Returns:
            The merging weights, what the merge keeps of each expert, and the condition of each linear system.

        Raises:
            SltaError: the level was not measured, an argument is out of its range, or the base model has no task to
                weight.
        """
        level = level or ("attn_mlp" if "attn_mlp" in self.info.levels else self.info.levels[0])
        balance, ridge = bool(balance), number("ridge", ridge)
        kept = 1.0 if keep_weight is None else number("keep_weight", keep_weight)
        for name, value in {"ridge": ridge, "keep_weight": kept}.items():
            if not 0 <= value < math.inf:
                raise SltaError(f"'{name}' is {value}: give a number of at least zero.")
        if keep_weight is not None and kept and self.info.keep is None:
            raise SltaError(
                "The statistics were measured without prompts of the base model, so there is nothing to keep: list the "
                "base model with a 'calibration' under the recipe's 'models', and measure again."
            )
        weights = self._task_weights(task_weights) if task_weights is not None else None
        used = self if samples is None else self.first_samples(samples)
        submodules = {
            name: solve(
                used.grams[name],
                used.task,
                tokens=used.tokens,
                balance=balance,
                ridge=ridge,
                task_weights=weights,
                keep_weight=kept,
            )
            for name in used.submodules(level)
        }
        return Solution(used, level, submodules, balance, ridge, weights, kept)

    def _task_weights(
        self, given: Mapping[str, float | SupportsFloat] | Iterable[float | SupportsFloat]
    ) -> tuple[float, ...]:
        names = self.info.models
        if not isinstance(given, Mapping):
            listed = list(given)
            if len(listed) != len(names):
                raise SltaError(f"There are {len(listed)} task weights for {len(names)} experts: give one for each.")
            given = dict(zip(names, listed, strict=True))
        for name, weight in given.items():
            if name not in names:
                raise SltaError(f"A task weight is for '{name}', but the experts are {', '.join(names)}.")
            if not 0 <= float(weight) < math.inf:
                raise SltaError(f"The task weight of {name} is {weight}: give a number of at least zero.")
        weights = tuple(float(given.get(name, 1.0)) for name in names)
        if not any(weights):
            raise SltaError("Every task weight is zero: at least one task must count.")
        return weights

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the statistics file.

        Returns:
            Its path.

        Raises:
            OSError: the file cannot be written; an earlier file is kept.
        """
        tensors = {_GRAM + name: gram.contiguous() for name, gram in self.grams.items()}
        tensors |= {"task": self.task, "tokens": self.tokens}
        text = json.dumps(self.info.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
        file = Path(path).expanduser()
        files.write(file, serialize(tensors, metadata={METADATA_KEY: text}))
        return file

    @staticmethod
    def load(source: str | os.PathLike[str], cache_dir: str | None = None) -> Statistics:
        """Read and check a statistics file.

        Args:
            source: its path, the folder of a merge by ``slta``, or ``hf:ORG/REPO/FILE[@REVISION]`` on the Hugging Face
                Hub.
            cache_dir: where downloads are kept; the Hub's own cache by default.

        Returns:
            The statistics.

        Raises:
            SltaError: the file is missing, truncated, damaged, of another kind or version, or cannot be
                downloaded.
        """
        path = resolve_statistics(os.fspath(source), cache_dir)
        if not path.is_file():
            said = f"There is no statistics file {path}: make one with 'mergekit-slta calibrate'."
            if path.is_dir() or path.match(STATISTICS_OF_MERGE):
                said += " Only slta writes statistics into the merged folder; a recipe of featcal has 'report: FOLDER'."
            raise SltaError(said)
        as_file = "cannot be read as a safetensors file", "get it or measure it again"
        with reading(path, *as_file), safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if set(metadata) != {METADATA_KEY} or not tensors.keys() >= {"task", "tokens"}:
            raise SltaError(f"{path} is not a statistics file: make one with 'mergekit-slta calibrate'.")
        try:
            info = Info.model_validate_json(metadata[METADATA_KEY])
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"])) or "no JSON"
            raise SltaError(f"{path} has unusable metadata ({where}): get it or measure it again.") from None
        task, tokens = tensors.pop("task"), tensors.pop("tokens")
        grams = {name.removeprefix(_GRAM): gram for name, gram in tensors.items()}
        statistics = Statistics({name: grams[name] for name in sorted(grams, key=sort_key)}, task, tokens, info)
        if problem := _problem(statistics):
            raise SltaError(f"{path} is damaged or was changed ({problem}): get it or measure it again.")
        return statistics


def resolve_statistics(source: str, cache_dir: str | None = None) -> Path:
    """The path of a statistics file, or of that in a merged folder; ``hf:...`` is downloaded from the Hub.

    Raises:
        SltaError: the reference is malformed, or the download failed.
    """
    if not source.startswith(PUBLISHED_PREFIX):
        path = Path(source).expanduser()
        return beside if (beside := path / STATISTICS_OF_MERGE).is_file() else path
    parts = _PUBLISHED.fullmatch(source)
    if parts is None:
        raise SltaError(f"Statistics '{source}': write hf:ORG/REPO/FILE or hf:ORG/REPO/FILE@REVISION.")
    try:
        repo, file, revision = parts["repo"], parts["file"], parts["revision"]
        return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision, cache_dir=cache_dir))
    except hub.HUB_ERRORS as error:
        raise SltaError(f"Statistics '{source}' cannot be fetched: {hub.reason(error)}.") from error


def settings_fingerprint(samples: int, max_tokens: int, seed: int) -> str:
    """Identify the settings of a measurement."""
    return _sha256({"inputs": "base", "max_tokens": max_tokens, "samples": samples, "seed": seed})


def tokens_fingerprint(token_hashes: Sequence[str]) -> str:
    """Identify the token ids of all tasks, from the sha256 of each task's."""
    return _sha256(list(token_hashes))


def versions() -> dict[str, str]:
    """The versions of the libraries that a measurement depends on."""
    installed = {name: importlib.metadata.version(name) for name in ("mergekit", "torch", "transformers")}
    return {"mergekit-slta": __version__, **installed}


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _problem(statistics: Statistics) -> str | None:
    """Why the content cannot be a measurement, as a clause."""
    info, task, tokens = statistics.info, statistics.task, statistics.tokens
    experts, tasks = len(info.models), len(info.models) + (info.keep is not None)
    if not (len(info.calibration) == len(info.fingerprint.experts) == experts >= 1) or not info.levels:
        return "it does not describe all of its models and levels"
    if task.dtype != torch.int64 or task.ndim != 1 or task.unique_consecutive().tolist() != list(range(tasks)):
        return "'task' does not name every task in order"
    if tokens.dtype != torch.int64 or tokens.shape != task.shape or bool((tokens < 1).any()):
        return "'tokens' does not fit"
    for name, gram in statistics.grams.items():
        if not _SUBMODULE.fullmatch(name):
            return f"'{name}' is not the name of a submodule"
        if gram.dtype != torch.float64 or gram.shape != (len(task), experts, experts):
            return f"the Gram matrices of '{name}' have the wrong shape or type"
        squares = gram.diagonal(dim1=-2, dim2=-1)
        if not bool(gram.isfinite().all()) or not torch.equal(gram, gram.mT) or bool((squares < 0).any()):
            return f"'{name}' holds no Gram matrices"
    for level in info.levels:
        if level not in LEVELS:
            return f"it holds no level '{level}'"
        layers = {place_of(name).layer for name in of_level(statistics.grams, level)}
        if layers != ({None} if level == "model" else set(range(info.num_layers))):
            return f"level '{level}' does not cover the {info.num_layers} layers"
    return None
