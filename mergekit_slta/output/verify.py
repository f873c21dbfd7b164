"""Re-read a finished merge, one tensor at a time, and say whether programs can use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from mergekit.common import dtype_from_name
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from tqdm import tqdm

from mergekit_slta.engine.partial import require_finished
from mergekit_slta.models.adapters import source_folders
from mergekit_slta.models.architecture import vocabulary_axes
from mergekit_slta.models.headers import Headers, folder_headers
from mergekit_slta.output.finite import is_finite
from mergekit_slta.output.usable import lacking_files, loading_problems
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import RecipeOrFile
from mergekit_slta.recipe.settings import SETTINGS
from mergekit_slta.tables import Paragraphs


@dataclass(frozen=True, repr=False)
class Verification(Paragraphs):
    """What a second look at a merged model found; printed, it is sentences.

    Attributes:
        problems: what is wrong, one sentence each, in the order of the tensors; empty for a sound merge.
        tensors: how many tensors were read.
        notes: files of the base model that the folder lacks, one sentence each.
    """

    problems: tuple[str, ...]
    tensors: int
    notes: tuple[str, ...] = ()

    def columns(self) -> dict[str, list[str]]:
        """The columns of ``to_frame``: a row for each problem, or the verdict without any, and for each note."""
        kinds = ["problem"] * len(self.problems) or ["verdict"]
        sentences = [*(self.problems or str(self).splitlines()[:1]), *self.notes]
        return {"kind": [*kinds, *["note"] * len(self.notes)], "sentence": sentences}

    def __str__(self) -> str:
        if count := len(self.problems):
            heading = f"{count} problem{'s' * (count > 1)} found, {self.tensors} tensors read."
        else:
            heading = f"Nothing is wrong with the names, shapes, data types and values of {self.tensors} tensors. "
            heading += "transformers loads the folder, which has all tensors of the base model."
        return "\n".join([heading, *(f"- {problem}" for problem in self.problems), *map("Note: {}".format, self.notes)])


def verify(
    recipe: RecipeOrFile,
    merged: str | os.PathLike[str],
    **options: Unpack[Options],
) -> Verification:
    """Re-read a merged model tensor by tensor, and say whether programs can use it.

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
    stored, wanted = folder_headers(folder), _planned(experiment)
    lost = [name for name in wanted if name not in stored]
    strange = [name for name in stored if wanted and name not in wanted]
    names = [name for name in stored if name not in strange]
    problems = [f"The tensor {name} is missing." for name in lost]
    problems += [f"The tensor {name} does not belong to the model." for name in strange]
    wrong = [*lost, *strange]
    has_tokenizer = experiment.recipe.tokenizer_source is not None
    resized = vocabulary_axes(experiment.layout, wanted, experiment.base.config) if wanted and has_tokenizer else ()
    dtype = config.out_dtype or (config.dtype if wanted else None)
    loader = LazyTensorLoader.from_disk(str(folder))
    for name in tqdm(names, desc="Verifying", unit="tensor", leave=False, disable=experiment.quiet):
        shape = None if name in resized or name not in wanted else wanted[name].shape
        faults = list(_faults(name, loader.get_tensor(name), shape, dtype))
        problems += faults
        wrong += [name] * bool(faults)
    reference = config.base_model or config.referenced_models()[0]
    problems += loading_problems(experiment.model(reference), folder, wrong)
    base_folder, _ = source_folders(reference, experiment.transformers_cache)
    notes = lacking_files(base_folder, folder, has_tokenizer, bool(config.chat_template))
    return Verification(tuple(problems), len(names), tuple(notes))


def _planned(experiment: Experiment) -> Headers:
    """The base model's tensors, which a merge by a method of this package writes; none where mergekit names them."""
    if experiment.recipe.config.merge_method not in SETTINGS or experiment.in_slices:
        return {}
    layout = experiment.layout
    return {name: experiment.stored[name] for name in (*layout.pieces, *layout.outside)}


def _faults(name: str, merged: torch.Tensor, shape: tuple[int, ...] | None, dtype: str | None) -> Iterator[str]:
    """What is wrong with a merged tensor, whose shape and data type are compared where the right ones are known."""
    if dtype and merged.is_floating_point() and merged.dtype != dtype_from_name(dtype):
        yield f"The tensor {name} is of type {_name(merged.dtype)}, not {_name(dtype_from_name(dtype))}."
    if shape is not None and merged.shape != shape:
        yield f"The tensor {name} has the shape {list(merged.shape)}, not {list(shape)}."
    if not is_finite(merged, merged.dtype):
        yield f"The tensor {name} has {int((~merged.double().isfinite()).sum())} values that are not finite."


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
