"""Checks of models by their configurations and file headers: whether each can be merged, and with the base model.

No tensor is read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard
from mergekit.common import ModelPath, ModelReference

from mergekit_slta import files
from mergekit_slta.checks.folder import beside_weights, code_of, refuse_links
from mergekit_slta.checks.tokenizers import json_file
from mergekit_slta.engine.partial import require_finished
from mergekit_slta.errors import SltaError, refuse
from mergekit_slta.models import headers
from mergekit_slta.models.adapters import NO_FOLDER, names_in, target_of, with_adapter
from mergekit_slta.models.architecture import refuse_turned, vocabulary_axes
from mergekit_slta.models.fingerprint import adapter_settings, computation
from mergekit_slta.models.headers import Model, config_entry
from mergekit_slta.models.layout import Layout, meta_model, model_tensor_name
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.words import listed

SAME_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")


def one_model(experiment: Experiment, reference: ModelReference) -> None:
    """Refuse a quantized model, and an adapter that has no folder to be merged in or is not of its model."""
    model, adapter, options = experiment.model(reference), reference.lora, experiment.options
    if model.folder:
        require_finished(model.folder)
        refuse_links(model.folder, beside_weights(model.folder))
    if model.folder and reference == experiment.recipe.base:
        list(code_of(model.folder))  # is copied when the weights are written
    if empty := sorted(name for name, header in model.tensors.items() if not header.shape.numel()):
        raise SltaError(f"{model} holds empty tensors ({listed(empty)}): save it again, and gather its shards first.")
    _full_precision(model)
    if adapter is not None:
        if not options.lora_merge_cache:
            raise SltaError(NO_FOLDER.format(model=model))
        _adapter_of(model, adapter, options.transformers_cache)


def _full_precision(model: Model) -> None:
    """Refuse quantized tensors: by the configuration, or weights in 8 bits or fewer."""
    configs = (model.config, model.text_config)
    if entry := next(filter(None, (getattr(config, "quantization_config", None) for config in configs)), None):
        raise SltaError(
            f"{model} is quantized ({dict(entry).get('quant_method', 'in some way')}) by its config.json: name the "
            "unquantized model, or dequantize it first; or remove the entry 'quantization_config', if its tensors are "
            "not quantized."
        )
    for name, header in model.tensors.items():
        is_matrix = name.endswith(("weight", "_blocks")) and len(header.shape) > 1
        if is_matrix and header.nbytes < 2 * header.shape.numel():
            raise SltaError(
                f"{model} stores {name} in 8 bits or fewer, so it is quantized: name the unquantized model, or "
                "dequantize it first."
            )


def _adapter_of(model: Model, adapter: ModelPath, cache_dir: str | None) -> None:
    """Refuse an adapter that cannot be merged: peft puts its tensors into the model, both without their content."""
    folder = headers.adapter_folder(adapter, cache_dir)
    stored = headers.file_headers(headers.adapter_weights(folder))
    refuse_links(folder, beside_weights(folder))
    settings = adapter_settings(folder)
    # The mask of SHiRA cannot be drawn without the weights.
    if model.built is not None and settings.get("peft_type") != "SHIRA":
        tensors = {name: torch.empty(header.shape, device="meta") for name, header in stored.items()}
        with_adapter(meta_model(model.config, model.trust_remote_code), model.reference, folder, tensors)
    if parted := _parted_ends(model, settings, stored):
        raise SltaError(
            f"The adapter {adapter} changes {listed(parted)} of {model.reference.model}, where embedding and output "
            "head are one tensor, so it cannot be merged into it: train it on the decoder layers alone, or save the "
            "base model with 'tie_word_embeddings' false."
        )


def same_family(experiment: Experiment, reference: ModelReference) -> None:
    """Refuse an expert that was not fine-tuned from the base model, by its architecture, sizes and shapes."""
    base, expert = experiment.model(experiment.recipe.base), experiment.model(reference)
    if experiment.recipe.settings.runs_models or not experiment.options.allow_crimes:
        _same_architecture(base, expert)
    sizes = [(name, *(config_entry(model.text_config, name) for model in (expert, base))) for name in SAME_SIZES]
    # A configuration may leave a default size out.
    if differing := [f"{name} {n} instead of {m}" for name, n, m in sizes if n != m and None not in (n, m)]:
        raise SltaError(
            f"The expert {expert} has {', '.join(differing)}: it was not fine-tuned from the base model {base}; "
            "leave it out."
        )
    refuse_turned(base, expert)
    vocabularies = base.vocabulary, expert.vocabulary
    for name, stored in base.tensors.items():
        other = expert.tensors.get(model_tensor_name(name, expert.tensors, expert.prefix) or "", stored)
        is_vocabulary = (*stored.shape[:1], *other.shape[:1]) == vocabularies and stored.shape[1:] == other.shape[1:]
        if stored.shape != other.shape and stored.shape.numel() and other.shape.numel() and not is_vocabulary:
            raise SltaError(
                f"The tensor {name} of the expert {expert} has the shape {list(other.shape)} instead of "
                f"{list(stored.shape)}: it was not fine-tuned from the base model {base}; leave it out."
            )
    tied = [model for model in (base, expert) if getattr(model.config, "tie_word_embeddings", False)]
    if len(tied) == 1:
        untied = expert if tied[0] is base else base
        raise SltaError(
            f"{tied[0]} ties its output head to its embedding and {untied} does not (tie_word_embeddings): the merged "
            f"head would fit neither; save {tied[0]} with 'tie_word_embeddings' false."
        )


def _same_architecture(base: Model, expert: Model) -> None:
    """Refuse another architecture, apart from the language tower of a multimodal model."""
    if (expert.architecture, expert.config.model_type) == (base.architecture, base.config.model_type):
        return
    texts = [model.text_config for model in (base, expert)]
    one_is_tower = (texts[0] is base.config) != (texts[1] is expert.config)
    if texts[0].model_type != texts[1].model_type or not one_is_tower:
        raise SltaError(
            f"The expert {expert} is a {expert.architecture} ({expert.config.model_type}), the base model {base} a "
            f"{base.architecture} ({base.config.model_type}): only models of one architecture can be merged."
        )


# Checkpoints


def complete_checkpoints(models: Sequence[Model], aligned: bool = False) -> None:
    """Refuse checkpoints that lack tensors of the model, and experts with tensors that the base model lacks.

    A tensor that the model does not run, such as a head for multi-token prediction, may be missing. The first model is
    the base model; where ``aligned``, mergekit puts the rows of embeddings in the order of another tokenizer.
    """
    base, *experts = models
    layout = base.layout(base.built)
    rows = vocabulary_axes(layout, base.tensors, base.config) if aligned else {}
    incomplete = (
        " of the model, so it is incomplete: get an undamaged copy; of a model that was saved from inside "
        "torch.compile, FSDP or DDP, save the module inside that."
    )
    another = f", which the base model {base} lacks, so it was not fine-tuned from {base}: leave it out."
    unaligned = (
        f" of the base model {base}, whose rows mergekit cannot put in the order of the recipe's 'tokenizer': leave "
        "'tokenizer' and 'tokenizer_source' out."
    )
    # A tied parameter has only its first name here.
    shapes = {name: parameter.shape for name, parameter in layout.model.named_parameters()} if layout.model else {}
    whole = {name: shapes.get(piece.targets[0]) for name, piece in layout.pieces.items() if piece.pattern is None}
    odd = [name for name, shape in whole.items() if shape and shape != base.tensors[name].shape]
    faults = [
        (base, ": the checkpoint lacks", [name for name in shapes if name not in layout], incomplete),
        (base, ": config.json gives other shapes of", odd, ": correct it, or get undamaged copies of the files."),
    ]
    for expert in experts:
        theirs = expert.layout(base.built)
        more = _lost(theirs, layout)
        if theirs.outside and expert.built and expert.architecture == base.architecture:
            # Of one class, another configuration may have more tensors, such as biases.
            more += [name for name in theirs.outside if name in expert.layout(expert.built).pieces]
        has, may_lack = _merged_tensors(expert, theirs), layout.may_lack(theirs)
        faults += [
            (expert, ": the checkpoint lacks", [n for n in _lost(layout, theirs) if n not in may_lack], incomplete),
            (expert, ": the checkpoint has", more, another),
            (expert, " lacks", [name for name in may_lack if name in rows and name not in has], unaligned),
        ]
    refuse(f"{model}{verb} {listed(names)}{rest}" for model, verb, names, rest in faults if names)


def _lost(layout: Layout, other: Layout) -> list[str]:
    """The stored tensors that another checkpoint lacks, whatever it calls them and how it cuts them."""
    names = [name for name in layout.pieces if name not in other.pieces]
    return [name for name in names if not all(target in other for target in layout.pieces[name].targets)]


def _merged_tensors(model: Model, layout: Layout) -> Collection[str]:
    """The stored tensors of a model that are there when its adapter, if it has one, has been merged."""
    return model.tensors if model.reference.lora is None else layout.pieces


# Notes


def other_base(base: Model, model: Model, cache_dir: str | None) -> Iterator[str]:
    """An expert that was trained on another model, as its adapter's configuration says, or its card."""
    adapter, trained_on = model.reference.lora, list[str]()
    if adapter is not None:
        file = headers.adapter_folder(adapter, cache_dir) / headers.ADAPTER_CONFIG
        base, trained_on = model, [str(json_file(file).get("base_model_name_or_path") or "")]
    elif not os.path.exists(base.reference.model.path):
        with contextlib.suppress(Exception):  # a card may be anything
            card = ModelCard.load(headers.folder_with(("README.md",), model.reference.model, cache_dir) / "README.md")
            named = card.data.base_model or []
            named = [named] if isinstance(named, str) else named
            on_hub = not os.path.exists(model.reference.model.path)  # in a folder's card it may be a path
            trained_on = [name for name in named if on_hub or files.is_hub_name(name)]
    names = [os.path.basename(os.path.normpath(name)) for name in (base.reference.model.path, *trained_on) if name]
    if names[0] not in (names[1:] or names):
        yield (
            f"{adapter or model} was trained on {listed(trained_on)}, not on {base.reference.model}: a merge makes "
            "sense only if one is a copy of the other, such as a quantized one, or a fine-tune of it."
        )


def _parted_ends(model: Model, settings: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """The paths of a model's embedding and head, if they are one tensor and an adapter changes one of them alone."""
    if model.built is None or settings.get("ensure_weight_tying"):
        return []
    embedding, head = model.built.get_input_embeddings(), model.built.get_output_embeddings()
    if head is None or embedding.weight is not head.weight:
        return []
    paths = {module: path for path, module in model.built.named_modules()}
    ends = [paths[embedding], paths[head]]
    targets, saved = set(map(target_of, names_in(model.built, tensors).values())), settings.get("modules_to_save")

    def is_changed(path: str) -> bool:
        parts = {name.removeprefix(path) for name in targets if name == path or name.startswith(f"{path}.")}
        parts -= {".weight", ".base_layer.weight"}  # copies, unless they are among ``saved``
        if path == ends[0]:
            parts.discard(".token_adapter.trainable_tokens_delta")  # peft gives these tokens to the head, too
        return bool(parts) or (isinstance(saved, list) and bool({path, path.rpartition(".")[2]} & {*saved}))

    return list(filter(is_changed, ends))


def other_computation(
    config: transformers.PretrainedConfig, other: transformers.PretrainedConfig, whole: bool = False
) -> list[str]:
    """The entries in which two configurations that have them differ in what the decoder's layers compute.

    ``whole`` adds those of the other parts of a multimodal model.
    """
    parts = (part if whole else part.get_text_config() for part in (config, other))
    ours, theirs = (computation(part.to_dict()) for part in parts)
    tables = {name.partition(".")[0] for name in ours} & {name.partition(".")[0] for name in theirs}
    names = [name for name in ours.keys() | theirs.keys() if name.partition(".")[0] in tables]
    names = [name for name in names if not name.endswith("rope_parameters.type")]  # an older word for its rope_type
    return sorted(name for name in names if ours.get(name) != theirs.get(name))


def other_entries(base: Model, expert: Model, runs_models: bool) -> Iterator[str]:
    """An expert whose configuration makes it compute something else from the same weights."""
    names, rope = other_computation(base.config, expert.config), getattr(base.text_config, "rope_parameters", None)
    ours, theirs = (config_entry(model.text_config, "max_position_embeddings") or 0 for model in (base, expert))
    if rope and rope.get("rope_type") == "default" and theirs <= ours:  # rotations that have no longest position
        names = [name for name in names if name != "max_position_embeddings"]
    names += ["id2label"] * ("Classification" in base.architecture and base.config.id2label != expert.config.id2label)
    if names:
        measured = ", and the expert is measured with it too" if runs_models else ""
        yield (
            f"The configuration of the expert {expert} differs from that of the base model {base} in "
            f"{', '.join(names)}: the merged model gets the base model's configuration{measured}."
        )


def pickled(*opened: Model) -> Iterator[str]:
    """The models whose tensors mergekit cannot map from their files."""
    for model in opened:
        if (
            model.folder
            and not model.reference.lora
            and not all(name.endswith(".safetensors") for name in headers.weight_map(model.folder))
        ):
            reads = "each of its files is read whole into memory, for every layer anew"
            yield f"{model} is pickled, so {reads}: load it with transformers, and save it."


def outside_the_model(base: Model, *experts: Model) -> Iterator[str]:
    """The tensors outside the language model that not all checkpoints have."""
    layout = base.layout(base.built)
    if base.reference.lora is not None and layout.outside:
        yield f"{listed(layout.outside)} of {base} will be left out: merging its adapter loses them."
    for expert in experts:
        theirs = expert.layout(base.built)
        lost = {*layout.may_lack(theirs)} - {*_merged_tensors(expert, theirs)}
        if names := [name for name in _merged_tensors(base, layout) if name in lost]:
            yield f"{listed(names)}, which {expert} lacks, will be merged as if it had those of the base model {base}."
        if names := [name for name in theirs.outside if name not in base.tensors]:
            yield f"{listed(names)} of {expert} will be left out, because the base model {base} has none."
