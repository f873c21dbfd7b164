"""Merge a recipe from Python."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import SupportsIndex

import torch
from mergekit.merge import run_merge

from mergekit_slta.host import patches  # noqa: F401 - mergekit must know the methods where start-up files are off
from mergekit_slta.host.run import run
from mergekit_slta.recipe.recipe import RecipeOrFile, loaded, plain_values


def merge(
    recipe: RecipeOrFile,
    out: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    cuda: bool = False,
    multi_gpu: bool = False,
    gpu_rich: bool = False,
    read_to_gpu: bool = False,
    low_cpu_memory: bool = False,
    trust_remote_code: bool = False,
    allow_crimes: bool = False,
    unsafe_truncate_embeddings: bool = False,
    lora_merge_cache: str | None = None,
    lora_merge_dtype: str | None = None,
    transformers_cache: str | None = None,
    lazy_unpickle: bool = False,
    out_shard_size: int | SupportsIndex = 5_000_000_000,
    copy_tokenizer: bool = True,
    write_model_card: bool = True,
    safe_serialization: bool = True,
    clone_tensors: bool = False,
    async_write: bool = False,
    write_threads: int | SupportsIndex = 1,
    random_seed: int | SupportsIndex | None = None,
    quiet: bool = False,
) -> Path:
    """Merge a recipe's models, as mergekit-yaml does, with a check first that names all problems at once.

    Takes recipes for mergekit's other methods too. Under torchrun all processes calibrate, and the first one merges.
    Threads may call it: one merges at a time, and the others wait. The keyword arguments are mergekit-yaml's options.

    Args:
        recipe: the recipe, or its file.
        out: the folder to write to.
        device: where to compute: "cpu", "cuda", or a GPU such as "cuda:1"; "cpu" by default.
        cuda: compute on the GPU.
        multi_gpu: share mergekit's work among all GPUs.
        gpu_rich: the same as ``cuda``, ``low_cpu_memory``, ``read_to_gpu`` and ``multi_gpu``.
        read_to_gpu: read weights into the GPU's memory.
        low_cpu_memory: keep results in the GPU's memory until they are written.
        trust_remote_code: run the Python code that comes with a model (dangerous).
        allow_crimes: merge models of different architectures, for methods without samples.
        unsafe_truncate_embeddings: cut embeddings to the smallest vocabulary, which adjusts no tokenizer.
        lora_merge_cache: the folder to merge LoRA adapters in; without one, adapters are refused.
        lora_merge_dtype: the data type to merge them in.
        transformers_cache: the folder for downloaded files; the Hub's own cache by default.
        lazy_unpickle: read pickled checkpoints tensor by tensor.
        out_shard_size: parameters in each file that is written.
        copy_tokenizer: copy the base model's tokenizer.
        write_model_card: write a README with the recipe and how the model was made.
        safe_serialization: write safetensors files, not pickled ones.
        clone_tensors: copy tensors before they are written, for recipes that repeat a layer.
        async_write: write files in the background.
        write_threads: threads that write them.
        random_seed: the seed of mergekit's randomized methods.
        quiet: no progress bars and no notes.

    Returns:
        The folder of the merged model.

    Raises:
        SltaError: the recipe, a model, the data or the disk does not allow the merge.
    """
    options = plain_values({name: value for name, value in locals().items() if name not in ("recipe", "out")})
    given, folder = loaded(recipe), Path(out).expanduser()
    run(inspect.unwrap(run_merge), given.config, str(folder), options, given.text, given.content)
    return folder
