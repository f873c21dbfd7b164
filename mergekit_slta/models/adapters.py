"""LoRA adapters: their files, and their merge into a folder named by the content of the adapter and its base model."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from filelock import FileLock
from mergekit.common import ModelPath, ModelReference, dtype_from_name, get_auto_cls
from mergekit.io.tasks import LoaderCache
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from mergekit_slta.errors import SltaError, reading
from mergekit_slta.files import digest, versions
from mergekit_slta.models import headers
from mergekit_slta.models.fingerprint import fingerprint_of, source_files, stamps
from mergekit_slta.models.headers import ADAPTER_CONFIG, CHAT_TEMPLATES, CODE, TOKENIZER_FILES
from mergekit_slta.models.layout import model_tensor_name
from mergekit_slta.words import listed

LOG = logging.getLogger(__name__)

NO_FOLDER = "{model} is a LoRA adapter: name a folder for the merged model with --lora-merge-cache FOLDER."


def tokenizer_folder(path: ModelPath, cache_dir: str | None = None) -> Path | None:
    """The folder with an adapter's own tokenizer; None if the adapter has none."""
    folder = headers.folder_with((*TOKENIZER_FILES, *CHAT_TEMPLATES, CODE), path, cache_dir)
    return folder if any((folder / name).exists() for name in TOKENIZER_FILES[:3]) else None


def merge_adapter(
    self: ModelReference,  # of a model and an adapter
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    lora_merge_dtype: str | None = None,
) -> ModelReference:
    """Replace mergekit's ``ModelReference.merged``, which names the folder by the two paths.

    mergekit reuses that folder even if the base model or the adapter has changed, or if the merge was interrupted.
    Here the name depends on the files of both, the dtype and the versions, and the folder gets it only when it is
    complete.
    """
    if not cache_dir:
        raise SltaError(NO_FOLDER.format(model=self))
    base, adapter = headers.source_folders(self, LoaderCache().hf_cache_dir)
    assert self.lora and adapter
    headers.refuse_adapter_in(base)
    # Without the inode, which is another one where a cache was restored.
    files_of_both = sorted(stamp[:2] for stamp in stamps(source_files(base, adapter)).values())
    made_with = [versions() | {"commit": ""}, peft.__version__]  # each folder is a whole model
    content = [fingerprint_of(base, adapter), lora_merge_dtype, files_of_both, *made_with]
    folder = Path(cache_dir) / f"{merged_name(self)}_{digest(content)[:16]}"
    part = folder.with_name(f"{folder.name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):  # some file systems have no locks
            stack.enter_context(FileLock(f"{folder}.lock", fallback_to_soft=False))
        if folder.exists():
            return ModelReference(model=ModelPath(path=str(folder)))
        shutil.rmtree(part, ignore_errors=True)  # of a merge that was killed
        stack.callback(shutil.rmtree, part, ignore_errors=True)
        loader = get_auto_cls(self.config(trust_remote_code).architectures[0])
        how = {"revision": self.model.revision, "cache_dir": LoaderCache().hf_cache_dir}
        how |= {"dtype": dtype_from_name(lora_merge_dtype), "trust_remote_code": trust_remote_code}
        stack.enter_context(torch.random.fork_rng(devices=[]))  # a caller's numbers, as of dare, stay the same
        model = loader.from_pretrained(self.model.path, **how)
        with_adapter(model, self, adapter, peft.load_peft_weights(str(adapter), device="cpu")).save_pretrained(part)
        headers.weight_map(part)  # transformers writes no weights in processes of torchrun but the first
        os.replace(part, folder)
    return ModelReference(model=ModelPath(path=str(folder)))


def merged_name(reference: ModelReference) -> str:
    """mergekit's name for the folder of a merged adapter, with which ours begins."""
    assert reference.lora
    return f"{reference.model._unique_id()}_{reference.lora._unique_id()}"


_TRAINED = "base_model.model."  # what peft puts before the names of a model's modules


def names_in(model: transformers.PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The names of an adapter's tensors, each with its name where the adapter is one of this model.

    A text model and the language tower of a multimodal one have other names for the same modules.
    """
    known = {*(path for path, _ in model.named_modules()), *model.state_dict()}
    homes = {name: target_of(name) for name in names}
    places = {home: model_tensor_name(home, known, model.base_model_prefix) or home for home in homes.values()}
    return {name: name.replace(home, places[home], 1) for name, home in homes.items()}


def target_of(name: str) -> str:
    """The module that a tensor of a LoRA adapter changes; a tensor that an adapter holds whole."""
    # peft wraps a module once for each of its parameters, and calls the module inside a wrapper "base_layer".
    return name.removeprefix(_TRAINED).partition(".lora_")[0].removesuffix(".base_layer")


def with_adapter(
    model: transformers.PreTrainedModel, reference: ModelReference, folder: Path, tensors: Mapping[str, torch.Tensor]
) -> transformers.PreTrainedModel:
    """Merge an adapter's tensors into a model, which is changed; both may be on the meta device."""
    empty = [name for name, tensor in tensors.items() if not tensor.numel()]
    if empty or not tensors:
        holds = f"empty tensors ({listed(sorted(empty))})" if empty else "no tensors"
        raise SltaError(f"The adapter {reference.lora} holds {holds}: save it again, and gather its shards first.")
    names, is_meta = names_in(model, tensors), next(model.parameters()).is_meta
    cure = "name the model that it was trained on"
    if any(re.search(r"\.experts\.\d", name) for name in names):
        cure = "train it on all experts and all of their maps, which transformers has in one tensor"
    rows: Any = model.get_input_embeddings().weight.shape
    edges = {f"{_TRAINED}{name}" for name, tensor in model.state_dict().items() if tensor.shape == rows}
    if any(names[name] in edges and own.shape[1:] == rows[1:] and own.shape != rows for name, own in tensors.items()):
        cure = "its vocabulary has another size, so merge it by peft (merge_and_unload), and name the saved model"
    sentence = reading(f"The adapter {reference.lora}", f"does not fit {reference.model}", cure)
    with sentence, warnings.catch_warnings(action="ignore"):  # of what is refused below
        with warnings.catch_warnings(record=True, action="always") as said:
            config = peft.PeftConfig.from_pretrained(str(folder))
        for warning in said:
            if "Unexpected keyword" in str(warning.message):  # which only a newer peft knows
                LOG.warning("The adapter %s: %s", reference.lora, warning.message)
        config.inference_mode = True
        if reason := _unmerged(config, max(size for tensor in tensors.values() for size in tensor.shape)):
            raise SltaError(f"The adapter {reference.lora} {reason}.")
        if is_meta and hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # others compute with the weights
        mark = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type, "")
        if any(before != after for before, after in names.items()):
            _rename_targets(config, names)
        whole = peft.PeftModel(model, config, low_cpu_mem_usage=is_meta)
        renamed = {names[name]: tensor for name, tensor in tensors.items()}
        try:
            loaded: Any = peft.set_peft_model_state_dict(whole, renamed, low_cpu_mem_usage=is_meta)
        except KeyError as error:
            raise ValueError(f"it lacks {error.args[0]}, which its {ADAPTER_CONFIG} names") from error
        except RuntimeError as error:
            sizes = re.findall(r"size mismatch for (\S+): .*?(\[.*?\]).*?(\[.*?\])", str(error))
            clauses = [f"{target_of(name)} has the shape {given} instead of {wanted}" for name, given, wanted in sizes]
            raise ValueError(listed(clauses) or str(error)) from error
        if loaded.unexpected_keys:
            raise ValueError(f"it adapts {_targets(loaded.unexpected_keys)}, which that model lacks")
        state = whole.state_dict(keep_vars=True)
        filled = {id(state[name]) for name in state.keys() - set(loaded.missing_keys)}  # some kinds share tensors
        if lacking := [name for name in loaded.missing_keys if mark and mark in name and id(state[name]) not in filled]:
            raise ValueError(f"it lacks tensors of {_targets(lacking)}, which its {ADAPTER_CONFIG} names")
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(config, "ensure_weight_tying", False) and all(isinstance(end, LoraLayer) for end in ends):
        ends[1].scaling = dict.fromkeys(ends[1].scaling, 0.0)  # peft would add the change twice to their one tensor
    with reading(f"The adapter {reference.lora}", f"cannot be merged into {reference.model}", "train a plain LoRA"):
        try:
            return whole.merge_and_unload()
        except Exception as error:  # of a kind that differs between peft's classes
            if not (is_meta and "meta" in str(error)):  # some compute with the numbers
                raise
            return model


def _unmerged(config: Any, largest: int) -> str:
    """Why an adapter cannot be merged by its configuration, as the end of a sentence; "" if it can.

    ``largest`` is the size of its largest tensor along any axis.
    """
    ranks = [getattr(config, "r", 0), *(getattr(config, "rank_pattern", None) or {}).values()]
    if any(isinstance(rank, list) for rank in ranks):
        return "is an AdaLoRA with pruned ranks: merge it by peft (merge_and_unload), and name the saved model"
    if (rank := max(ranks)) > largest:
        return f"has the rank {rank} in its {ADAPTER_CONFIG}, and smaller matrices: get undamaged copies of its files"
    if config.is_prompt_learning or config.peft_type.value in ("SHADOW", "XLORA"):  # these load models they name
        return f"is of the type {config.peft_type.value}, which cannot be merged into a model: train a LoRA"
    start = str(getattr(config, "init_lora_weights", ""))
    if "_niter_" in start or start in ("corda", "loftq", "lora_ga"):
        cure = "save it with peft's 'path_initial_model_for_weight_conversion', or save the trained model whole"
        return f"was trained on weights that 'init_lora_weights: {start}' had changed, and does not hold them: {cure}"
    if getattr(config, "megatron_config", None):  # has peft import the module that 'megatron_core' names
        return "was trained with Megatron's layers ('megatron_config'): save the trained model whole"
    if getattr(config, "layer_replication", None):
        return "repeats layers ('layer_replication'), and a merge has the base model's: save the trained model whole"
    return ""


def _targets(names: Iterable[str]) -> str:
    return listed(sorted(set(map(target_of, names))))


def _rename_targets(config: Any, names: Mapping[str, str]) -> None:
    """Have an adapter's configuration name the modules that its tensors were renamed to, and no others."""
    homes = {target_of(old): target_of(new) for old, new in names.items() if ".lora_" in old}
    for name in ("rank_pattern", "alpha_pattern"):
        given = getattr(config, name, None) or {}
        known = ((new, get_pattern_key(list(given), old)) for old, new in homes.items())
        setattr(config, name, {re.escape(new): given[key] for new, key in known if key in given} | given)
    if config.target_modules:
        config.target_modules = {new for old, new in homes.items() if check_target_module_exists(config, old)}
    config.exclude_modules = config.layers_to_transform = None  # they have been obeyed
