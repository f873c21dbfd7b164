"""Find the maps that add to the residual stream: they can correct what the maps before them have missed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.layers.calls import LayerCall, Weights, hidden_of
from mergekit_slta.layers.children import is_inside
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.forms import random_numbers
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.residual import INPUT
from mergekit_slta.layers.structure import all_before


@dataclass(frozen=True)
class Writer:
    """A module whose output a layer adds to the residual stream.

    Attributes:
        factor: the constant that its output is multiplied by.
        before: what the stream is the sum of before: the layer's input and the outputs of children, each with the
            constant that it is multiplied by.
    """

    factor: float
    before: Mapping[str, float]


@torch.no_grad()
def find_writers(
    decoder: Decoder,
    layer: int,
    made_up: tuple[Weights, torch.Tensor, LayerCall],
    run: LayerRun,
    modules: Sequence[str],
    children: Collection[str],
) -> dict[str, Writer]:
    """The writers among a layer's modules; of those that write side by side, only the last.

    A norm, a learned gate or a router's weight behind a module multiplies its output by another number for each token,
    or with other weights: such a module is no writer.

    Args:
        decoder: the layer's decoder.
        layer: the layer's index.
        made_up: what ``made_up_layer`` gives for it.
        run: the layer's run on that, which has kept the modules' outputs.
        modules: paths of modules that are solved, in their order.
        children: the layer's children whose outputs are known when a later module is solved.
    """
    _, hidden, call = made_up
    others = random_numbers(decoder.layers[layer].state_dict(), decoder.device, seed=1)
    runs = (run, decoder.run(layer, others, hidden, call, keep=modules))
    terms = [own.terms or {} for own in runs]
    sources = [INPUT, *(child for child in run.reads if child in terms[0])]  # in the order of the calls
    if hidden.ndim != 3 or set(sources) != terms[0].keys():
        return {}

    def factor(source: str, module: str) -> float:
        """What the output of a module in ``source`` is multiplied by to be its summand; nan for no constant."""
        outputs = [hidden if module == INPUT else hidden_of(own.outputs.get(module)) for own in runs]
        first, second = (_ratio(own[source], output) for own, output in zip(terms, outputs, strict=True))
        return first if math.isclose(first, second, rel_tol=1e-4) else math.nan

    found, before_child = {}, all_before(run.reads)
    for place, child in enumerate(sources[1:], 1):
        before = {source: factor(source, source) for source in sources[:place] if source in {INPUT, *children}}
        complete = len(before) == place and all(child in before_child[later] for later in sources[place + 1 :])
        for module in [own for own in modules if is_inside(own, {child})][-1:]:
            written = Writer(factor(child, module), before)
            if complete and all(map(math.isfinite, (written.factor, *before.values()))):
                found[module] = written
    return found


def _ratio(summand: torch.Tensor, output: object) -> float:
    """The number that a module's output is multiplied by; nan if it is not one number other than zero."""
    if not isinstance(output, torch.Tensor) or output.shape != summand.shape:
        return math.nan
    ratio = (summand * output).sum() / output.square().sum()
    same = torch.allclose(summand, ratio * output, rtol=1e-4, atol=1e-5 * float(summand.abs().max()))
    return float(ratio) if same and ratio else math.nan
