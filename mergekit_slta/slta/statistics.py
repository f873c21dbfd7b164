"""The statistics file: everything that calibration measured, small enough to publish beside a model.

One ``.safetensors`` file with ``gram/{submodule}`` [N, T, T] float64, ``task`` [N] and ``tokens`` [N] int64, and one
metadata entry, ``mergekit_slta``, that says what was measured on which models and data. Rows are ordered by task, then
by sample.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Collection, Sequence
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
from mergekit_slta.models import hub
from mergekit_slta.slta.solver import Solution, solve

FORMAT_VERSION = 1
METADATA_KEY = "mergekit_slta"
PUBLISHED_PREFIX = "hf:"
_GRAM = "gram/"
_PUBLISHED = re.compile(r"hf:(?P<repo>[^/@]+/[^/@]+)/(?P<file>[^@]+)(?:@(?P<revision>[^@]+))?")
_LEVEL_PATTERNS = {
    "model": r"model",
    "layer": r"layer\.\d+",
    "attn_mlp": r"layer\.\d+\.(attn|mlp)",
    "head_mlp": r"layer\.\d+\.(head\.\d+|mlp)",
    "linear": r"layer\.\d+\.(?!(attn|mlp|head\.\d+)$).+",
}


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

    def submodules(self, level: str) -> list[str]:
        """The names of a level's submodules, in the order of the layers, attention before the MLP, linear maps by name.

        Raises:
            SltaError: the level was not measured.
        """
        if level not in self.info.levels:
            known = level in _LEVEL_PATTERNS
            fix = f"measure it with 'mergekit-slta calibrate --level {level}'" if known else "name one of these"
            raise SltaError(f"The statistics hold no level '{level}', only {', '.join(self.info.levels)}: {fix}.")
        names = [name for name in self.grams if re.fullmatch(_LEVEL_PATTERNS[level], name)]
        return sorted(names, key=_by_number)

    def select(self, experts: Sequence[int]) -> Statistics:
        """The statistics of a subset of the experts in the given order, as if only they had been measured."""
        chosen = torch.tensor(list(experts))
        rows = torch.cat([(self.task == expert).nonzero().flatten() for expert in experts])
        grams = {name: gram[rows][:, chosen][:, :, chosen] for name, gram in self.grams.items()}
        position = {expert: index for index, expert in enumerate(experts)}
        task = torch.tensor([position[int(expert)] for expert in self.task[rows]])
        calibration = tuple(self.info.calibration[expert] for expert in experts)
        fingerprint = self.info.fingerprint
        info = self.info.model_copy(
            update={
                "models": tuple(self.info.models[expert] for expert in experts),
                "calibration": calibration,
                "fingerprint": fingerprint.model_copy(
                    update={
                        "experts": tuple(fingerprint.experts[expert] for expert in experts),
                        "tokens": tokens_fingerprint([entry.sha256 for entry in calibration]),
                    }
                ),
            }
        )
        return Statistics(grams, task, self.tokens[rows], info)

    def first_samples(self, count: int) -> Statistics:
        """The statistics of each task's first ``count`` samples."""
        rows = torch.cat([(self.task == task).nonzero().flatten()[:count] for task in self.task.unique()])
        return replace(
            self,
            grams={name: gram[rows] for name, gram in self.grams.items()},
            task=self.task[rows],
            tokens=self.tokens[rows],
        )

    def solve(
        self,
        level: str,
        *,
        balance: bool = True,
        ridge: float = 0.0,
        task_weights: Sequence[float] | None = None,
    ) -> dict[str, Solution]:
        """Merging weights of every submodule of a level; the arguments are those of ``solver.solve``."""
        return {
            name: solve(self.grams[name], self.task, balance=balance, ridge=ridge, task_weights=task_weights)
            for name in self.submodules(level)
        }


def save(statistics: Statistics, path: Path) -> None:
    """Write a statistics file."""
    tensors = {_GRAM + name: gram.contiguous() for name, gram in statistics.grams.items()}
    tensors |= {"task": statistics.task, "tokens": statistics.tokens}
    text = json.dumps(statistics.info.model_dump(mode="json", exclude_none=True), sort_keys=True)
    files.write(path, serialize(tensors, metadata={METADATA_KEY: text}))


def load(path: Path) -> Statistics:
    """Read and check a statistics file.

    Raises:
        SltaError: the file is missing, truncated, of another kind or of a newer version, or its content cannot be
            what a calibration measured.
    """
    if not path.is_file():
        raise SltaError(f"There is no statistics file {path}: make one with 'mergekit-slta calibrate'.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise SltaError(f"{path} is truncated or no safetensors file ({error}): get it or measure it again.") from None
    if METADATA_KEY not in metadata:
        raise SltaError(f"{path} is no statistics file of mergekit-slta.")
    info = _parse_info(metadata[METADATA_KEY], path)
    grams = {name.removeprefix(_GRAM): tensor for name, tensor in tensors.items() if name.startswith(_GRAM)}
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(_GRAM)}
    if set(metadata) != {METADATA_KEY} or set(rest) != {"task", "tokens"}:
        raise SltaError(f"{path} holds entries that a statistics file does not have: get it or measure it again.")
    statistics = Statistics(dict(sorted(grams.items(), key=lambda item: _by_number(item[0]))), **rest, info=info)
    if problem := _problem(statistics):
        raise SltaError(f"{path} is damaged or was changed ({problem}): get it or measure it again.")
    return statistics


def resolve_statistics(source: str, cache_dir: str | None = None) -> Path:
    """Find a statistics file: a local path, or ``hf:ORG/REPO/FILE[@REVISION]``, which is fetched from the Hub.

    Args:
        source: what the recipe or the command line gives.
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
        if level not in _LEVEL_PATTERNS:
            return f"unknown level '{level}'"
        if not _is_complete(level, statistics.grams, info.num_layers):
            return f"level '{level}' does not cover the {info.num_layers} layers"
    for name, gram in statistics.grams.items():
        if not any(re.fullmatch(_LEVEL_PATTERNS[level], name) for level in info.levels):
            return f"'{name}' belongs to no level of the file"
        if gram.dtype != torch.float64 or gram.shape != (rows, experts, experts):
            return f"the Gram matrices of '{name}' have the wrong shape or type"
        if not _is_gram(gram):
            return f"'{name}' holds no Gram matrices"
    return None


def _is_complete(level: str, names: Collection[str], num_layers: int) -> bool:
    """Whether every layer of the model, and no other, has its submodules of a level."""
    if level == "model":
        return "model" in names
    layers: dict[int, set[str]] = {}
    for name in names:
        if re.fullmatch(_LEVEL_PATTERNS[level], name):
            _, layer, *rest = name.split(".", 2)
            layers.setdefault(int(layer), set()).update(rest)
    return set(layers) == set(range(num_layers)) and all(_is_whole(level, parts) for parts in layers.values())


def _is_whole(level: str, parts: set[str]) -> bool:
    """Whether these are all parts of a layer; which linear maps it has only the model knows."""
    if level == "attn_mlp":
        return parts == {"attn", "mlp"}
    if level == "head_mlp":
        return len(parts) > 1 and parts == {"mlp", *(f"head.{head}" for head in range(len(parts) - 1))}
    return True


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


def _by_number(name: str) -> tuple[object, ...]:
    """Sort key: layers and heads by number, all else by name."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))
