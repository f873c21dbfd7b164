"""The checks of LoRA adapters, and of what mergekit has merged of them before."""

from __future__ import annotations

from mergekit.common import ModelReference

from mergekit_slta.checks.case import Case, attempt
from mergekit_slta.errors import SltaError
from mergekit_slta.models.adapters import adapter_headers, last_change, merged_folder
from mergekit_slta.models.headers import Headers, Model, listed, weight_map


def adapters(case: Case) -> list[str]:
    """LoRA adapters without a place to merge them in, incomplete ones, stale merges, and those of another model."""
    cache = case.options.lora_merge_cache
    return [
        problem
        for model in case.adapted
        for problem in adapter_problems(model) + adapter_cache_problems(model.reference, cache)
    ]


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
            sizes[target] = {*down.shape[1:2], *(up.shape[:1] if up else down.shape[1:2])}
    known = {target: stored for target in sizes if (stored := model.tensor(target))}
    wrong = [target for target, stored in known.items() if set(stored.shape) != sizes[target]]
    if model.tensors is None or not sizes or (known and not wrong):
        return None
    reason = f"its matrices for {listed(wrong)} have other sizes" if wrong else f"it adapts {listed(list(sizes))}"
    return (
        f"The adapter {model.reference.lora} was not trained on {model.reference.model} ({reason}): name its own base."
    )


def adapter_cache_problems(reference: ModelReference, cache: str | None) -> list[str]:
    """Nowhere to merge an adapter, an interrupted merge that mergekit takes for one, or one that is out of date."""
    if not cache:
        return [f"{reference} is a LoRA adapter: give mergekit a folder to merge it in with --lora-merge-cache FOLDER."]
    merged = merged_folder(reference, cache)
    if not merged.exists():
        return []
    files = attempt(weight_map, merged)
    if isinstance(files, SltaError):
        return [f"An earlier merge of {reference} was interrupted and left {merged} without weights: delete it."]
    assert reference.lora is not None
    if last_change(reference.lora) > max((merged / name).stat().st_mtime for name in files):
        return [f"{merged} holds {reference} as it was before its adapter changed: delete it."]
    return []
