"""Re-read a finished merge, one tensor at a time, and say whether programs can use it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
import transformers
from mergekit.common import dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from tqdm import tqdm

from mergekit_slta.checks.tokenizers import GENERATION
from mergekit_slta.engine.partial import require_finished
from mergekit_slta.errors import as_note, first_line, printable
from mergekit_slta.models.adapters import source_folders
from mergekit_slta.models.architecture import vocabulary_axes
from mergekit_slta.models.checkpoint import is_finite
from mergekit_slta.models.folder import CHAT_TEMPLATES, PROCESSOR, TOKENIZER_FILES
from mergekit_slta.models.headers import Headers, Model, folder_headers
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import RecipeOrFile
from mergekit_slta.recipe.settings import SETTINGS
from mergekit_slta.words import listed


@dataclass(frozen=True, repr=False)
class Verification:
    """What a second look at a merged model found; printed, it is sentences.

    Attributes:
        problems: what is wrong, one sentence each, in the order of the tensors; empty for a sound merge.
        tensors: how many tensors were read.
        notes: files of the base model that the folder lacks, one sentence each.
    """

    problems: tuple[str, ...]
    tensors: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if count := len(self.problems):
            heading = f"{count} problem{'s' * (count > 1)} found, {self.tensors} tensors read."
        else:
            heading = f"Nothing is wrong with the names, shapes, data types and values of {self.tensors} tensors. "
            heading += "transformers loads the folder, which has all tensors of the base model."
        return "\n".join(
            [heading, *(f"- {printable(problem)}" for problem in self.problems), *map(as_note, self.notes)]
        )

    __repr__ = __str__


def verify(
    recipe: RecipeOrFile,
    merged: str | os.PathLike[str],
    **options: Unpack[Options],
) -> Verification:
    """Re-read a merged model tensor by tensor, and check that programs can use it.

    Its tensors must have the names and shapes of the base model's checkpoint and the recipe's data type, and their
    values be finite. Then transformers loads the folder without its weights, and the base model's other tensors and
    files are looked for. The experts are not opened. mergekit's own methods choose names themselves, as do recipes with
    slices: of these, names and shapes are left to transformers.

    Args:
        recipe: the recipe that was merged, or its file.
        merged: the folder that the merge was written to.
        options: see ``Options``.

    Returns:
        What is wrong.

    Raises:
        SltaError: the recipe or its base model cannot be opened, or the merged model's files cannot be read.
    """
    experiment = opened(recipe, options)
    folder, config = Path(merged).expanduser(), experiment.recipe.config
    require_finished(folder)
    base = experiment.model(config.base_model or config.referenced_models()[0])
    stored, wanted = folder_headers(folder), _planned(experiment)
    lost = [name for name in wanted if name not in stored]
    strange = [name for name in stored if wanted and name not in wanted]
    names = [name for name in stored if name not in strange]
    has_tokenizer = experiment.recipe.tokenizer_source is not None
    resized = vocabulary_axes(experiment.layout, wanted, base.config) if wanted and has_tokenizer else ()
    shapes = {name: header.shape for name, header in wanted.items() if name not in resized}
    dtype = config.out_dtype or (config.dtype if wanted else None)
    faults = tensor_faults(folder, names, experiment.quiet, shapes, dtype)
    problems = [f"The tensor {name} is missing." for name in lost]
    problems += [f"The tensor {name} does not belong to the model." for name in strange]
    problems += [fault for sentences in faults.values() for fault in sentences]
    problems += _loading_problems(base, folder, stored, {*lost, *strange, *faults})
    base_folder, _ = source_folders(base.reference, experiment.options.transformers_cache)
    notes = _lacking_files(base_folder, folder, config, has_tokenizer)
    return Verification(tuple(problems), len(names), tuple(notes))


def _planned(experiment: Experiment) -> Headers:
    """The base model's tensors, which a merge by a method of this package writes; none where mergekit names them."""
    if experiment.recipe.config.merge_method not in SETTINGS or experiment.in_slices:
        return {}
    layout = experiment.layout
    return {name: experiment.stored[name] for name in (*layout.pieces, *layout.outside)}


def tensor_faults(
    folder: Path,
    names: Iterable[str],
    quiet: bool,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtype: str | None = None,
) -> dict[str, list[str]]:
    """What is wrong with tensors of a folder, by their names: values, and where it is known, shape and data type."""
    faults, of_type = dict[str, list[str]](), dict[torch.dtype, list[str]]()
    loader, wanted = LazyTensorLoader.from_disk(str(folder)), dtype_from_name(dtype)
    for name in tqdm(names, desc="Verifying", unit="tensor", leave=False, disable=quiet):
        tensor, shape = loader.get_tensor(name), (shapes or {}).get(name)
        sentences = []
        if wanted and tensor.is_floating_point() and tensor.dtype != wanted:
            of_type.setdefault(tensor.dtype, []).append(name)
        if shape is not None and tensor.shape != shape:
            sentences.append(f"The tensor {name} has the shape {list(tensor.shape)}, not {list(shape)}.")
        if not is_finite(tensor):
            count = int((~tensor.double().isfinite()).sum())
            sentences.append(f"The tensor {name} has {count} values that are not finite: merge in 'dtype: float32'.")
        if sentences:
            faults[name] = sentences
    for found, typed in of_type.items():
        faults |= {name: faults.get(name, []) for name in typed}
        verb = "is" if len(typed) == 1 else "are"
        faults[typed[0]].append(f"{listed(typed)} {verb} of type {_name(found)}, not {dtype}.")
    return faults


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _loading_problems(base: Model, folder: Path, stored: Headers, named: Collection[str]) -> Iterator[str]:
    """Say how transformers loads a merged folder onto the meta device, which reads no weights.

    Also named are tensors that transformers ignores, such as those of a head for multi-token prediction, where the
    base model has them and the folder does not. Those in ``named`` have been reported.
    """
    if base.built is None:
        return
    layout = base.layout(base)
    kind: Any = type(base.built)
    try:
        with _silent_transformers():
            _, info = kind.from_pretrained(
                folder,
                trust_remote_code=base.trust_remote_code,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # of any kind, as transformers reads the folder by code of many models
        yield f"transformers cannot load the folder ({first_line(error)})."
        return
    if missing := sorted(name for name in info["missing_keys"] if name in layout and name not in named):
        yield f"transformers misses {listed(missing)} in the folder, and would initialize them at random."
    if mismatched := sorted({name for name, *_ in info["mismatched_keys"]} - {*named}):
        yield f"{listed(mismatched)} have other shapes than the folder's config.json gives."
    if unexpected := sorted({*info["unexpected_keys"]} & stored.keys() - {*base.tensors, *named}):
        yield f"transformers does not know {listed(unexpected)}, which {base} does not have."
    if lost := sorted(name for name in layout.outside if name not in stored and name not in named):
        yield (
            f"{listed(lost)} of {base} are missing: transformers ignores them, but programs for multi-token "
            "prediction need them."
        )


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Keep transformers' table of missing keys and its progress bar off the screen."""
    log = transformers.utils.logging
    level, shown = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shown:
            log.enable_progress_bar()


def _lacking_files(base: Path, folder: Path, config: MergeConfiguration, has_tokenizer: bool) -> Iterator[str]:
    """Name files of the base model's folder that a merge with its tokenizer has too, where it lacks them."""
    of_tokenizer = (GENERATION, *TOKENIZER_FILES, *(() if config.chat_template else CHAT_TEMPLATES))
    patterns = PROCESSOR if has_tokenizer else (*PROCESSOR, *of_tokenizer)
    names = {file.relative_to(base).as_posix() for pattern in patterns for file in base.glob(pattern)}
    if lacking := sorted(name for name in names if not (folder / name).is_file()):
        fix = "copy them, because programs that convert or serve the model need them"
        yield f"{', '.join(lacking)} of {base} are not in the folder: {fix}."
