"""Checks of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable

from mergekit_slta.checks.case import Case, attempt
from mergekit_slta.errors import SltaError
from mergekit_slta.models.adapters import adapter_headers
from mergekit_slta.models.headers import Headers, Model, listed
from mergekit_slta.models.merged_adapters import NO_FOLDER


def adapters(case: Case) -> list[str]:
    """Incomplete LoRA adapters, adapters of another model, and adapters that mergekit has no folder to merge in."""
    problems = []
    for model in case.adapted:
        headers = attempt(adapter_headers, model.reference.lora)  # None if only a download would show them
        if isinstance(headers, SltaError):
            problems.append(headers.message)
        elif headers is not None and (problem := misfit(model, headers)):
            problems.append(problem)
    if not case.options.lora_merge_cache:
        problems += [NO_FOLDER.format(model=model) for model in case.adapted]
    return problems


def misfit(model: Model, headers: Headers) -> str | None:
    """Why the sizes of an adapter's matrices do not fit its model.

    Most adapters are compared with the checkpoint's tensors. An adapter of modules that checkpoints store under other
    names, such as a mixture's fused experts, is compared with the modules that transformers builds, as peft does.
    """
    sizes = {}
    for name, down in headers.items():
        if name.endswith(".lora_A.weight") and len(down.shape) == 2:
            up = headers.get(name.replace(".lora_A.", ".lora_B."))
            target = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            sizes[target] = {down.shape[1], *(up.shape[:1] if up else down.shape[1:2])}
    if model.tensors is None or not sizes:
        return None
    reason = ""
    for shapes_of in (_stored_shapes, _built_shapes):
        found = shapes_of(model, sizes)
        wrong = [target for target, shapes in found.items() if sizes[target] not in map(set, shapes)]
        if found and not wrong:
            return None
        reason = reason or (f"its matrices for {listed(wrong)} have other sizes" if wrong else "")
    reason = reason or f"it adapts {listed(sizes)}"
    return (
        f"The adapter {model.reference.lora} was not trained on {model.reference.model} ({reason}): name the model "
        "that it was trained on."
    )


Shapes = dict[str, list[tuple[int, ...]]]


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
