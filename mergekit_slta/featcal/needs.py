"""The memory and the disk space that a feature merge takes, from the shapes of the model's tensors alone."""

from __future__ import annotations

from dataclasses import dataclass

from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.groups import groups_by_layer
from mergekit_slta.featcal.merge import HEAD_ELEMENTS
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import tail_problem
from mergekit_slta.layers.maps import output_head

FLOAT32, FLOAT64 = 4, 8  # bytes


@dataclass(frozen=True)
class Needs:
    """Bytes that a feature merge takes while it runs, in memory beyond what is always there, and in its folder."""

    memory: int
    disk: int


def needs(decoder: Decoder, experts: int, tokens: int, head: bool, compare: bool = False) -> Needs:
    """What a feature merge of ``experts`` experts needs for ``tokens`` calibration tokens in all, about."""
    states = [layer.state_dict() for layer in decoder.layers]
    layers = [sum(tensor.numel() for tensor in state.values()) for state in states]
    solved = output_head(decoder) if head else None
    if solved and (problem := tail_problem(decoder)):
        raise SltaError(problem)
    head_rows, head_columns = decoder.model.state_dict()[solved.weight].shape if solved else (0, 0)
    shapes = [(head_columns, min(head_rows, HEAD_ELEMENTS // max(1, head_columns)))]
    for state, maps in zip(states, groups_by_layer(decoder), strict=True):
        for group in maps.groups:
            sizes = [state[m.weight].shape[-2:][:: -1 if m.transposed else 1] for m in group.maps]
            together = [(inputs, outputs) for outputs, inputs in dict.fromkeys(map(tuple, sizes))]
            shapes += together if group.fused else [(sizes[0][1], sum(outputs for outputs, _ in sizes))]
    sums = max(4 * inputs**2 + 3 * inputs * outputs for inputs, outputs in shapes)  # while they are solved
    width, widest = decoder.model.config.get_text_config().hidden_size, max(map(max, shapes[1:]))
    hidden = 2 * (3 if compare else 2) * tokens * width  # before and after a layer
    passing = tokens * (2 * widest + 4 * width)  # what the maps of one child have returned
    weights = max((experts + 2) * max(layers), 3 * head_rows * head_columns)
    return Needs(
        memory=FLOAT32 * (weights + hidden + passing) + FLOAT64 * sums,
        disk=FLOAT32 * (sum(layers) + head_rows * head_columns + hidden),
    )
