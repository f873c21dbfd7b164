"""RegMean++ as published (arXiv 2508.03121), on whole Llama-shaped models: what featcal is compared with.

Layer by layer, each expert's layer reads the hidden states that the merged layers before it give, and every linear map
becomes (sum_t G_t)^-1 sum_t G_t W_t with G_t = sum_x x x^T over its inputs, whose off-diagonal elements are shrunk.
Everything else is the experts' average.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

SHRINK = 0.9  # of the off-diagonal elements, as in the paper


@torch.no_grad()
def regmean_plus_plus(experts: Sequence[Any], tasks: Sequence[Sequence[Sequence[int]]]) -> Any:
    """The merged model, from the experts and the token ids of each one's samples."""
    merged = copy.deepcopy(experts[0])
    states = [expert.state_dict() for expert in experts]
    merged.load_state_dict({name: sum(state[name] for state in states) / len(states) for name in states[0]})
    for index in range(len(merged.model.layers)):
        grams = [_grams(merged, expert.model.layers[index], index, t) for expert, t in zip(experts, tasks, strict=True)]
        for name, module in merged.model.layers[index].named_modules():
            if isinstance(module, torch.nn.Linear):
                own = [expert.model.layers[index].get_submodule(name).weight.double() for expert in experts]
                total = sum(gram[name] for gram in grams)
                mixed = sum(gram[name] @ weight.T for gram, weight in zip(grams, own, strict=True))
                module.weight.copy_(torch.linalg.solve(total, mixed).T)
    return merged


def _grams(
    merged: Any, layer: torch.nn.Module, index: int, samples: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """G by the name of the map [in, in], with an expert's layer in its place in the merged model."""
    grams: dict[str, torch.Tensor] = {}
    hooks = []
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):

            def add(module: torch.nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                inputs = args[0].flatten(0, -2).double()
                grams[name] = grams.get(name, 0) + inputs.T @ inputs

            hooks.append(module.register_forward_pre_hook(add))
    own = merged.model.layers[index]
    merged.model.layers[index] = layer
    for ids in samples:
        merged(torch.tensor([list(ids)]), use_cache=False)
    merged.model.layers[index] = own
    for hook in hooks:
        hook.remove()
    eye = {name: torch.eye(len(gram), dtype=torch.float64) for name, gram in grams.items()}
    return {name: gram * (SHRINK + (1 - SHRINK) * eye[name]) for name, gram in grams.items()}
