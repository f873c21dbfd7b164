"""A merge from Python."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import SupportsIndex, Unpack

from mergekit.merge import run_merge
from mergekit.options import MergeOptions as StockOptions

from mergekit_slta.host import patches  # noqa: F401 - mergekit's planning is replaced, also without start-up files
from mergekit_slta.host.run import run
from mergekit_slta.recipe.experiment import Options
from mergekit_slta.recipe.recipe import RecipeOrFile, loaded, plain


class MergeOptions(Options, total=False):
    """The options of a merge: those of every run, and the others of mergekit-yaml."""

    cuda: bool  # compute on the GPU
    multi_gpu: bool  # share mergekit's work among all GPUs
    gpu_rich: bool  # the same as ``cuda``, ``low_cpu_memory``, ``read_to_gpu`` and ``multi_gpu``
    read_to_gpu: bool  # read weights into the GPU's memory
    low_cpu_memory: bool  # keep results in the GPU's memory until they are written
    allow_crimes: bool  # merge models of different architectures, for methods without samples
    unsafe_truncate_embeddings: bool  # cut embeddings to the smallest vocabulary, which adjusts no tokenizer
    lora_merge_dtype: str | None  # the data type to merge LoRA adapters in
    lazy_unpickle: bool  # read pickled checkpoints tensor by tensor
    out_shard_size: int | SupportsIndex  # the most bytes of each file that is written; 5 billion by default
    copy_tokenizer: bool  # copy the base model's tokenizer; True by default
    write_model_card: bool  # write a README with the recipe and how the model was made; True by default
    safe_serialization: bool  # write safetensors files, not pickled ones; True by default
    clone_tensors: bool  # copy tensors before they are written, for recipes that repeat a layer
    async_write: bool  # write files in the background
    write_threads: int | SupportsIndex  # threads that write them: mergekit 0.1.5 uses one
    random_seed: int | SupportsIndex | None  # the seed of mergekit's randomized methods


def merge(recipe: RecipeOrFile, out: str | os.PathLike[str], **options: Unpack[MergeOptions]) -> Path:
    """Merge a recipe's models, as mergekit-yaml does, with a check first that names all problems at once.

    Takes recipes for mergekit's other methods too. Under torchrun all processes calibrate, and the first one merges.
    Threads may call it: one merges at a time, and the others wait.

    Args:
        recipe: the recipe, or its file.
        out: the folder to write to, which is returned.
        options: see ``MergeOptions``.

    Raises:
        SltaError: the recipe, a model, the data or the disk does not allow the merge.
    """
    if unknown := sorted(options.keys() - MergeOptions.__annotations__.keys()):
        raise TypeError(f"merge has no option {', '.join(unknown)}.")
    recipe, folder = loaded(recipe), Path(out).expanduser()
    run(inspect.unwrap(run_merge), recipe.config, str(folder), StockOptions(**plain(options)), recipe.text)
    return folder
