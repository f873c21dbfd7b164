"""The checks of LoRA adapters."""

from __future__ import annotations

from mergekit_slta.adapters import adapter_headers
from mergekit_slta.case import Case, attempt
from mergekit_slta.errors import SltaError
from mergekit_slta.headers import Headers, Model, listed


def adapters(case: Case) -> list[str]:
    """LoRA adapters without a place to merge them in, incomplete ones, and those of another model."""
    problems = [problem for model in case.adapted for problem in adapter_problems(model)]
    if not case.options.lora_merge_cache:
        problems += [
            f"{model} is a LoRA adapter: give mergekit a folder to merge it in with --lora-merge-cache FOLDER."
            for model in case.adapted
        ]
    return problems


def adapter_problems(model: Model) -> list[str]:
    """Why an adapter cannot be used with its model; what only a download would tell is left open."""
    headers = attempt(adapter_headers, model.reference.lora)
    if headers is None:
        return []
    problem = headers.message if isinstance(headers, SltaError) else misfit(model, headers)
    return [problem] if problem else []


def misfit(model: Model, headers: Headers) -> str | None:
    """Why an adapter cannot be for its model, by the sizes of its matrices."""
    sizes = {}
    for name, down in headers.items():
        if name.endswith(".lora_A.weight"):
            up = headers.get(name.replace(".lora_A.", ".lora_B."))
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            sizes[target] = {down.shape[1], up.shape[0] if up else down.shape[1]}
    known = {target: stored for target in sizes if (stored := model.tensor(target))}
    wrong = [target for target, stored in known.items() if set(stored.shape) != sizes[target]]
    if model.tensors is None or not sizes or (known and not wrong):
        return None
    reason = f"its matrices for {listed(wrong)} have other sizes" if wrong else f"it adapts {listed(list(sizes))}"
    return (
        f"The adapter {model.reference.lora} was not trained on {model.reference.model} ({reason}): name its own base."
    )
