"""Find the maps that add to the residual stream: they can correct what the maps before them have missed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from mergekit_slta.layers.calls import LayerCall, Weights, hidden_of
from mergekit_slta.layers.decoder import INPUT, Decoder
from mergekit_slta.layers.forms import random_numbers
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.structure import all_before, ratio


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
    structure, before_child = decoder.structures[layer], all_before(decoder.structures[layer].reads)
    others = random_numbers(decoder.layers[layer].state_dict(), decoder.device, seed=1)
    runs = (run, decoder.run(layer, others, hidden, call, keep=modules))
    if hidden.ndim != 3 or structure.summands is None:
        return {}
    sources = [INPUT, *(child for child in structure.reads if child in structure.summands)]  # in the order of the calls

    def factor(child: str, module: str) -> float:
        """What the output of a module in a child is multiplied by to be the child's; nan for no constant."""
        outputs = [hidden_of(own.outputs[child]) for own in runs]
        first, second = (ratio(output, own.outputs.get(module)) for output, own in zip(outputs, runs, strict=True))
        return first if outputs[0].shape == hidden.shape and math.isclose(first, second, rel_tol=1e-4) else math.nan

    found = {}
    for place, child in enumerate(sources[1:], 1):
        complete = {*sources[:place]} <= {INPUT, *children} and {*sources} == structure.summands.keys()
        complete = complete and all(child in before_child[later] for later in sources[place + 1 :])
        for module in [own for own in modules if own.partition(".")[0] == child][-1:]:
            written = structure.summands[child] * factor(child, module)
            if complete and math.isfinite(written):
                found[module] = Writer(written, {source: structure.summands[source] for source in sources[:place]})
    return found
