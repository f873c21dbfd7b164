"""How much memory it takes to run models layer by layer, counted beforehand; all sizes are in bytes, in float32.

Each method's own module adds up what that method takes, from the parts counted here.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from mergekit_slta.engine.streams import Tasks, fitting_batch, make_batches, waiting_bytes
from mergekit_slta.layers.attention import SCORES
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import linear_maps, routed_tensors
from mergekit_slta.models.headers import config_entry

NUMBER = torch.float32.itemsize
# Python and its libraries, once they have merged a tiny model (torch's build for CUDA takes 70 MB more than that for
# CPUs, also without a GPU), and the buffers of products of large matrices (80 MB).
LIBRARIES = 530_000_000
TOKEN = 200  # bytes of its text and of its number, in all forms that a run has of them
MASK = 5  # bytes for each pair of tokens, where torch's attention is given a mask: a boolean, and a number

Shapes = Collection[torch.Size]  # of batches, each (rows, tokens)


def hidden_size(decoder: Decoder) -> int:
    return int(decoder.model.config.get_text_config().hidden_size)


def layer_bytes(decoder: Decoder, models: int) -> int:
    """The size of the largest layer of so many models; of a mixture's routed experts, one is in memory at a time."""

    def numbers(layer: torch.nn.Module) -> int:
        state, stacks = layer.state_dict(), routed_tensors(layer)
        return sum(part.numel() // (max(1, len(part)) if name in stacks else 1) for name, part in state.items())

    return NUMBER * models * max(numbers(decoder.layers[layer]) for layer in decoder.one_of_each_kind)


def states_bytes(decoder: Decoder, tasks: Tasks, streams: int) -> int:
    """The size of all samples, and of their hidden states in so many models."""
    tokens = sum(len(row) for task in tasks for row in task)
    return TOKEN * tokens + waiting_bytes(tokens, hidden_size(decoder), streams)


def edge_bytes(decoder: Decoder) -> int:
    """The size of a model's largest tensor outside the layers: the embedding or the output head."""
    state = decoder.model.state_dict()
    return NUMBER * max(state[name].numel() for name in decoder.edge_tensors)


def map_shapes(decoder: Decoder) -> set[tuple[int, int]]:
    """The shapes (out, in) of the linear maps of all layers."""
    layers = [decoder.layers[layer] for layer in decoder.one_of_each_kind]
    pairs = ((m, state) for layer in layers for state in [layer.state_dict()] for m in linear_maps(layer))
    return {(rows, columns) for m, state in pairs for rows, columns in [m.matrix(state).shape]}


def batch_shapes(decoder: Decoder, tasks: Tasks) -> Shapes:
    """The shapes (rows, tokens) of the batches, padding included."""
    return {batch.token_ids.shape for batch in make_batches(tasks, fitting_batch(decoder))}


def children(decoder: Decoder) -> int:
    """How many modules a layer calls one after the other: a run holds the output of each."""
    return max(len([*decoder.layers[layer].children()]) for layer in decoder.one_of_each_kind)


def heads_with_scores(decoder: Decoder, few: bool = False) -> int:
    """How many heads have scores of token pairs in memory, of all or of a ``few`` queries; 0 with torch's attention."""
    config = decoder.model.config.get_text_config()
    own = config._attn_implementation == "eager" and decoder.model._can_set_attn_implementation() == few
    return (config_entry(config, "num_attention_heads") or 0) * own


def mask_bytes(decoder: Decoder, shapes: Shapes) -> int:
    """The size of the masks of batches, of which those of one shape are shared; 0 where torch needs none."""
    config = decoder.model.config.get_text_config()
    pairs = sum(rows * length**2 for rows, length in shapes)
    if config._attn_implementation == "eager":
        return NUMBER * len(set(getattr(config, "layer_types", None) or [""])) * pairs
    longest = max(length for _, length in shapes)
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return pairs if any(window and window < longest for window in windows) else 0


def batch_bytes(decoder: Decoder, shapes: Shapes, hidden: int, inner: int, scores: int, beside: int = 0) -> int:
    """The size of the features of the largest batch in a layer, and of the masks of all batches.

    ``hidden`` and ``inner`` count the hidden states, and inputs of the widest map, for each position, ``beside`` other
    bytes; in attention it is half of the states, two queries, a key, a value, and ``scores`` per pair of tokens.
    """
    widest = max((columns for _, columns in map_shapes(decoder)), default=0)
    masks, most = mask_bytes(decoder, shapes), max(rows * length**2 for rows, length in shapes)
    few = 3 * min(heads_with_scores(decoder, few=True) * most, SCORES)  # before, in and after the softmax
    in_attention = NUMBER * (few + scores * heads_with_scores(decoder) * most) or MASK * bool(masks) * most
    state, wide = (NUMBER * columns * max(map(math.prod, shapes)) for columns in (hidden_size(decoder), widest))
    return masks + max(hidden * state + inner * wide + beside, (hidden // 2 + 4) * state + in_attention)
