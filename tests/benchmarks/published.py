"""RegMean++ (arXiv 2508.03121) and FeatCal (arXiv 2605.13030) as published: what featcal is compared with.

Both go through whole Llama-shaped models layer by layer and replace every linear map W. With S_t = sum_x x x^T over the
inputs x that a map has on task t, and x' the same tokens' inputs in expert t:

- RegMean++: W = (sum_t W_t G_t) (sum_t G_t)^-1, G_t being S_t with its off-diagonal elements shrunk; x comes from
  expert t's layer on the hidden states that the merged layers before it give. Everything else is the experts' average.
- FeatCal: W = (sum_t W_t C_t^T / |S_t| + r A) (sum_t S_t / |S_t| + r I)^-1, C_t = sum_x x (a x' + (1 - a) x)^T, S_t and
  C_t as means over the tokens; x comes from the merged model, whose layer is replaced once all its inputs are known. It
  begins as task arithmetic M, and A = W_0 + rho (W_M - W_0). Norms are M's: the published rule needs norms with a bias.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

SHRINK = 0.9  # of the off-diagonal elements, as in the paper
# FeatCal's published settings for task arithmetic, whose weight is the usual one.
WEIGHT, RIDGE, RHO, TEACHER = 0.3, 0.05, 2.2, 0.25

Tasks = Sequence[Sequence[Sequence[int]]]


@torch.no_grad()
def regmean_plus_plus(experts: Sequence[Any], tasks: Tasks) -> Any:
    """The merged model, from the experts and the token ids of each one's samples."""
    merged = copy.deepcopy(experts[0])
    states = [expert.state_dict() for expert in experts]
    merged.load_state_dict({name: sum(state[name] for state in states) / len(states) for name in states[0]})
    for index, layer in enumerate(merged.model.layers):
        inputs = []
        for expert, samples in zip(experts, tasks, strict=True):
            merged.model.layers[index] = expert.model.layers[index]
            inputs.append(_inputs(merged, index, samples))
            merged.model.layers[index] = layer
        maps = _maps(experts, index)
        _replace(layer, {name: regmean_map([own[name] for own in inputs], maps[name]) for name in maps})
    return merged


@torch.no_grad()
def published_featcal(base: Any, experts: Sequence[Any], tasks: Tasks) -> Any:
    """The merged model, from the base model, the experts and the token ids of each one's samples."""
    merged, start = copy.deepcopy(base), base.state_dict()
    changes = [expert.state_dict() for expert in experts]
    merged.load_state_dict(
        {name: own + WEIGHT * sum(state[name] - own for state in changes) for name, own in start.items()}
    )
    for index, layer in enumerate(merged.model.layers):
        inputs = [_inputs(merged, index, samples) for samples in tasks]
        teachers = [_inputs(expert, index, samples) for expert, samples in zip(experts, tasks, strict=True)]
        own, before, now = _maps(experts, index), _maps([base], index), _maps([merged], index)
        solved = {}
        for name, maps in own.items():
            anchor = before[name][0] + RHO * (now[name][0] - before[name][0])
            pairs = [(given[name], teacher[name]) for given, teacher in zip(inputs, teachers, strict=True)]
            solved[name] = featcal_map(pairs, maps, anchor)
        _replace(layer, solved)
    return merged


def regmean_map(inputs: Sequence[torch.Tensor], maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """RegMean++'s map [out, in], from the inputs [n, in] and the maps of each task."""
    grams = [x.T @ x for x in inputs]
    grams = [gram * SHRINK + (1 - SHRINK) * gram.diagonal().diag() for gram in grams]
    mixed = sum(gram @ own.T for gram, own in zip(grams, maps, strict=True))
    return torch.linalg.solve(sum(grams), mixed).T


def featcal_map(
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor]], maps: Sequence[torch.Tensor], anchor: torch.Tensor
) -> torch.Tensor:
    """FeatCal's map [out, in], from each task's inputs [n, in] in the merged model and in its expert."""
    system, mixed = RIDGE * torch.eye(anchor.shape[1], dtype=anchor.dtype), RIDGE * anchor.T
    for (given, own), expert in zip(inputs, maps, strict=True):
        gram = given.T @ given / len(given)
        cross = given.T @ (TEACHER * own + (1 - TEACHER) * given) / len(given)
        system = system + gram / gram.norm()
        mixed = mixed + cross @ expert.T / gram.norm()
    return torch.linalg.solve(system, mixed).T


def _replace(layer: torch.nn.Module, maps: Mapping[str, torch.Tensor]) -> None:
    for name, weight in maps.items():
        layer.get_submodule(name).weight.copy_(weight)  # type: ignore[operator]


def _maps(models: Sequence[Any], index: int) -> dict[str, list[torch.Tensor]]:
    """The models' linear maps in a layer, by their names."""
    layers = [model.model.layers[index] for model in models]
    names = [name for name, module in layers[0].named_modules() if isinstance(module, torch.nn.Linear)]
    return {name: [layer.get_submodule(name).weight.double() for layer in layers] for name in names}


def _inputs(model: Any, index: int, samples: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """The inputs [n, in] of a layer's linear maps on all tokens, by the maps' names."""
    found: dict[str, list[torch.Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: found.setdefault(name, []).append(args[0].flatten(0, -2).double())
        )
        for name, module in model.model.layers[index].named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    for ids in samples:
        model(torch.tensor([list(ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}
