"""Checks of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mergekit.common import ModelPath
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner

from mergekit_slta.errors import SltaError, all_of
from mergekit_slta.models.adapters import adapter_config, adapter_headers
from mergekit_slta.models.headers import Headers, Model, listed
from mergekit_slta.models.merged_adapters import NO_FOLDER
from mergekit_slta.recipe.experiment import Experiment

NOT_MERGED = ("POLY", "SHADOW", "XLORA")  # depend on the input; peft says so only when it merges
Shapes = dict[str, list[tuple[int, ...]]]


def require_mergeable(model: Model, adapter: ModelPath, folder: str | None) -> None:
    """Refuse an adapter that is incomplete, cannot be merged, is of another model, or has no folder to be merged in."""

    def fits() -> None:
        headers, config = adapter_headers(adapter), adapter_config(adapter)
        _can_become_weights(model, adapter, config, headers or {})
        _of_this_model(model, adapter, headers or {})  # nothing is known of an adapter that is pickled on the Hub

    def has_folder() -> None:
        if not folder:
            raise SltaError(NO_FOLDER.format(model=model))

    all_of([fits, has_folder])


def _can_become_weights(model: Model, adapter: ModelPath, config: Mapping[str, Any], headers: Headers) -> None:
    """Refuse an adapter that peft cannot make part of its model's weights."""
    kind = config.get("peft_type")
    tuner = next((tuner for known, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items() if known == kind), object)
    if not issubclass(tuner, BaseTuner) or kind in NOT_MERGED:
        raise SltaError(
            f"The adapter {adapter} is of the type {kind}, which cannot become part of a model's weights: "
            "leave it out, or train a LoRA."
        )
    biased = [target_of(name) for name in headers if name.endswith(".lora_B.bias")]
    if without := [name for name in biased if not model.tensor(f"{name}.bias")]:
        raise SltaError(
            f"The adapter {adapter} has biases (lora_bias) for {listed(without)}, where "
            f"{model.reference.model} has none: peft cannot merge it, train it without lora_bias."
        )


def _of_this_model(model: Model, adapter: ModelPath, headers: Headers) -> None:
    """Refuse an adapter whose matrices do not have the sizes of its model's.

    Most adapters are compared with the checkpoint's tensors. An adapter of modules that checkpoints store under other
    names, such as a mixture's fused experts, is compared with the modules that transformers builds, as peft does.
    """
    sizes = {}
    for name, down in headers.items():
        if name.endswith(".lora_A.weight") and len(down.shape) == 2:
            up = headers.get(name.replace(".lora_A.", ".lora_B."))
            sizes[target_of(name)] = {down.shape[1], *(up.shape[:1] if up else down.shape[1:2])}
    if model.tensors is None or not sizes:
        return
    reason = ""
    for shapes_of in (_stored_shapes, _built_shapes):
        found = shapes_of(model, sizes)
        wrong = [target for target, shapes in found.items() if sizes[target] not in map(set, shapes)]
        if found and not wrong:
            return
        reason = reason or (f"its matrices for {listed(wrong)} have other sizes" if wrong else "")
    reason = reason or f"it adapts {listed(sizes)}"
    raise SltaError(
        f"The adapter {adapter} was not trained on {model.reference.model} ({reason}): name the model "
        "that it was trained on."
    )


def _stored_shapes(model: Model, targets: Iterable[str]) -> Shapes:
    """The shapes of those targets that the checkpoint stores."""
    return {target: [stored.shape] for target in targets if (stored := model.tensor(f"{target}.weight"))}


def _built_shapes(model: Model, targets: Iterable[str]) -> Shapes:
    """The shapes of the matrices in the modules that targets name; for fused experts, the shape of one expert's."""
    modules = dict(model.built.named_modules()) if model.built else {}
    # peft wraps a module once for each of its parameters, and calls the module inside a wrapper "base_layer".
    adapted = {target: modules.get(target.replace(".base_layer", "")) for target in targets}
    return {
        target: [tuple(parameter.shape[-2:]) for parameter in module.parameters(recurse=False) if parameter.ndim > 1]
        for target, module in adapted.items()
        if module is not None
    }


def adapted_ends(experiment: Experiment) -> Iterator[str]:
    """LoRA adapters of the embedding or of the output head, where both are one tensor."""
    for model in map(experiment.model, experiment.recipe.references):
        adapter = model.reference.lora
        ends = tied_ends(model) if adapter is not None else set()
        if adapter is None or not ends or adapter_config(adapter).get("ensure_weight_tying"):
            continue
        if names := sorted(ends & {target_of(name) for name in adapter_headers(adapter) or ()}):
            yield (
                f"The adapter {adapter} changes {listed(names)} of {model.reference.model}, whose embedding and output "
                "head are one tensor: merging the adapter changes both, so the merged expert is not the model that was "
                "trained. Train it on the decoder layers alone."
            )


def target_of(name: str) -> str:
    """The module that a tensor of a LoRA adapter changes."""
    return name.removeprefix("base_model.model.").partition(".lora_")[0]


def tied_ends(model: Model) -> set[str]:
    """The names of the embedding and the output head of a model in which both are one tensor; else none."""
    if model.built is None or not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return set()
    ends = (model.built.get_input_embeddings(), model.built.get_output_embeddings())
    return {name for name, module in model.built.named_modules() if module in ends}
