"""mergekit's options that functions in Python take, as keyword arguments."""

from __future__ import annotations

from typing import TypedDict

import torch


class ModelOptions(TypedDict, total=False):
    """Where to compute, and how to get models.

    Attributes:
        device: where to compute, "cpu" by default.
        cuda: compute on the GPU.
        trust_remote_code: run the Python code that comes with a model (dangerous).
        lora_merge_cache: the folder to merge LoRA adapters in; without one, adapters are refused.
        lora_merge_dtype: the data type to merge them in.
        transformers_cache: the folder for downloaded files.
        lazy_unpickle: read pickled checkpoints tensor by tensor.
        quiet: no progress bars and no notes.
    """

    device: str | torch.device | None
    cuda: bool
    trust_remote_code: bool
    lora_merge_cache: str | None
    lora_merge_dtype: str | None
    transformers_cache: str | None
    lazy_unpickle: bool
    quiet: bool


class MergeOptions(ModelOptions, total=False):
    """The same, and how to merge and write: mergekit-yaml's options by their names, but for logging and threads."""

    allow_crimes: bool
    unsafe_truncate_embeddings: bool
    low_cpu_memory: bool
    out_shard_size: int
    copy_tokenizer: bool
    clone_tensors: bool
    random_seed: int | None
    write_model_card: bool
    safe_serialization: bool
    read_to_gpu: bool
    multi_gpu: bool
    gpu_rich: bool
    async_write: bool
    write_threads: int
