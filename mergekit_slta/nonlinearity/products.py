"""Outputs of a layer's first linear maps at many settings, from a few products.

The first maps of a layer or of a branch, such as those to queries, keys and values, get what norms make of the base
model's hidden states. A norm is linear in its weights, so a map's input at a setting c is x_0 + sum_u c_u d_u, where
d_u = x_u - x_0 is how much expert u's norm changes it. With the map's task vectors tau_t and bias changes e_t, its
output is

    y_0 + sum_t c_t (tau_t x_0 + e_t + W_0 d_t) + sum_t sum_u c_t c_u tau_t d_u

which takes the same products for all settings; the last sum is zero where the experts have the base model's norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mergekit_slta.layers.calls import Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import LinearMap, linear_maps
from mergekit_slta.layers.placeholders import random_numbers
from mergekit_slta.layers.probe import explained, random_layer
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.slta.features import ExpertRun, LayerFeatures

# Of the largest number: by how much an input may differ from the sum above by rounding.
ROUNDING = 1e-4
MADE_UP_SETTING = (0.4, 0.3)

# By run of a layer (see ``LayerFeatures.runs``), its first maps by the path of the module that holds them.
FirstMaps = dict[str, dict[str, LinearMap]]


def first_maps(decoder: Decoder, layer: int) -> FirstMaps:
    """The maps of a layer whose inputs are linear in the weights, in every run that a level may take."""
    return decoder.once_per_kind(layer, _first_maps)


@torch.no_grad()
def _first_maps(decoder: Decoder, layer: int) -> FirstMaps:
    """Find them by runs with made-up weights: of a base model, two experts, and a setting whose maps are unrelated."""
    modules = {found.module: found for found in linear_maps(decoder.layers[layer]) if found.expert is None}
    found: FirstMaps = {}
    with explained(decoder):
        base_weights, hidden, call = random_layer(decoder, layer)
        state = decoder.layers[layer].state_dict()
        experts = [random_numbers(state, decoder.device, seed) for seed in (1, 2)]
        setting = dict(random_numbers(state, decoder.device, 3))
        for name, tensor in base_weights.items():
            if tensor.ndim < 2 and tensor.is_floating_point():
                setting[name] = _sum(tensor, [own[name] for own in experts])
        for level in ("layer", "attn_mlp"):
            features = LayerFeatures(decoder, layer, [base_weights], [level], hidden.shape[1])
            base = features.run_base(hidden, call, modules)
            runs = [features.run(weights, base, hidden, call, watch=modules) for weights in (*experts, setting)]
            for name in features.runs:
                own = [run.runs[name].inputs for run in runs]
                fitting = {module for module in modules if _is_first(modules[module], base, own, base_weights)}
                known = {m: modules[m].apply(setting, own[-1][m][0]) for m in fitting}
                others = {**setting, **{modules[m].weight: base_weights[modules[m].weight] for m in fitting}}
                again = features.run(others, base, hidden, call, known={name: known}).runs[name].output
                same = _is_close(again, runs[-1].runs[name].output)  # else the layer uses a matrix by itself
                found[name] = {module: modules[module] for module in modules if module in fitting and same}
    return found


def _sum(base: torch.Tensor, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The base model's tensor plus the experts' changes of it by the made-up setting."""
    return base + sum(share * (own - base) for share, own in zip(MADE_UP_SETTING, experts, strict=True))


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= ROUNDING * expected.abs().max())


def _is_first(
    linear_map: LinearMap, base: LayerRun, own: Sequence[Mapping[str, tuple[torch.Tensor, ...]]], weights: Weights
) -> bool:
    """Whether a module does nothing but multiply, and its input at the setting is the sum of the others'."""
    module = linear_map.module
    if module in base.changed or any(len(inputs.get(module, ())) != 1 for inputs in (base.inputs, *own)):
        return False
    x, *experts, found = (inputs[module][0] for inputs in (base.inputs, *own))
    output = base.outputs[module]
    if any(other.shape != x.shape for other in (*experts, found)) or not isinstance(output, torch.Tensor):
        return False
    return _is_close(found, _sum(x, experts)) and _is_close(output, linear_map.apply(weights, x))


@dataclass
class BatchProducts:
    """The products of a layer's first maps on one batch.

    Args:
        maps: the first maps of the runs that the levels take.
        weights: the layer's tensors of the base model, then of each of the ``T`` experts.
        base: the base model's run, with the inputs and outputs of the maps' modules.
        experts: by expert, its own run with the inputs of the maps' modules.
    """

    maps: FirstMaps
    weights: Sequence[Weights]
    base: LayerRun
    experts: Mapping[int, ExpertRun]
    _products: dict[tuple[str, str, int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def outputs(self, setting: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """By run and module, the maps' outputs at a setting [T]."""
        used = setting.nonzero().flatten().tolist()
        found: dict[str, dict[str, torch.Tensor]] = {}
        for run, maps in self.maps.items():
            for module in maps:
                output = self.base.outputs[module].clone()
                for place, expert in enumerate(used):
                    for other in (None, *used[place:]):
                        product = self._product(run, module, expert, other)
                        if product is not None:
                            share = float(setting[expert]) * (1.0 if other is None else float(setting[other]))
                            output.add_(product, alpha=share)
                found.setdefault(run, {})[module] = output
        return found

    def _product(self, run: str, module: str, expert: int, other: int | None) -> torch.Tensor | None:
        """What an expert adds by itself, or together with another one or itself; computed once."""
        key = run, module, expert, other
        if key not in self._products:
            own = run, self.maps[run][module], expert
            self._products[key] = self._alone(*own) if other is None else self._together(*own, other)
        return self._products[key]

    def _alone(self, run: str, linear_map: LinearMap, expert: int) -> torch.Tensor:
        """tau_t x_0 + e_t + W_0 d_t."""
        product = self.base.inputs[linear_map.module][0] @ self._task_vector(linear_map, expert).T
        bias, own_bias = (linear_map.offset(self.weights[model]) for model in (0, 1 + expert))
        if bias is not None and own_bias is not None:
            product += own_bias - bias
        change = self._input_change(run, linear_map.module, expert)
        return product if change is None else product.add_(change @ linear_map.matrix(self.weights[0]).T)

    def _together(self, run: str, linear_map: LinearMap, expert: int, other: int) -> torch.Tensor | None:
        """tau_t d_u + tau_u d_t, or tau_t d_t; None if no norm changes the input."""
        product = None
        for mapped, changed in dict.fromkeys([(expert, other), (other, expert)]):
            change = self._input_change(run, linear_map.module, changed)
            if change is not None:
                term = change @ self._task_vector(linear_map, mapped).T
                product = term if product is None else product.add_(term)
        return product

    def _task_vector(self, linear_map: LinearMap, expert: int) -> torch.Tensor:
        return linear_map.matrix(self.weights[1 + expert]) - linear_map.matrix(self.weights[0])

    def _input_change(self, run: str, module: str, expert: int) -> torch.Tensor | None:
        """d_u of an expert, or None if its norms leave the map's input as it is."""
        change = self.experts[expert].runs[run].inputs[module][0] - self.base.inputs[module][0]
        return change if bool(change.any()) else None
