"""How much memory it takes to run models layer by layer, counted beforehand; all sizes are in bytes, in float32."""

from __future__ import annotations

import torch

from mergekit_slta.engine.streams import Tasks, fitting_batch, make_batches
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import linear_maps, routed_tensors

NUMBER = torch.float32.itemsize
# Python and its libraries, once they have merged a tiny model.
LIBRARIES = 400_000_000
SCORES = 3  # copies of the scores of all pairs of tokens, where attention has them in memory
# Freed tensors below the first size stay with the process, in pieces that larger ones do not fit in. The share covers
# the peaks of merges with prompts of 5,000 tokens; it was not measured by itself.
MAPPED, FRAGMENTS = 2**25, 1.45


def hidden_size(decoder: Decoder) -> int:
    """The width of the hidden states."""
    return int(decoder.model.config.get_text_config().hidden_size)


def layer_bytes(decoder: Decoder) -> int:
    """The size of a model's largest layer; of a mixture's routed experts, one is in memory at a time."""

    def numbers(layer: torch.nn.Module) -> int:
        state, stacks = layer.state_dict(), routed_tensors(layer)
        return sum(
            len(state[name]) and state[name].numel() // (len(state[name]) if name in stacks else 1) for name in state
        )

    return NUMBER * max(numbers(decoder.layers[layer]) for layer in decoder.one_of_each_kind)


def edge_bytes(decoder: Decoder) -> int:
    """The size of a model's largest tensor outside the layers: the embedding or the output head."""
    state = decoder.model.state_dict()
    return NUMBER * max(state[name].numel() for name in decoder.edge_tensors)


def map_shapes(decoder: Decoder) -> set[tuple[int, int]]:
    """The shapes (out, in) of the linear maps of all layers."""
    layers = [decoder.layers[layer] for layer in decoder.one_of_each_kind]
    pairs = ((m, state) for layer in layers for state in [layer.state_dict()] for m in linear_maps(layer))
    return {(rows, columns) for m, state in pairs for rows, columns in [m.matrix(state).shape]}


def batch_bytes(decoder: Decoder, tasks: Tasks, hidden: int, inner: int) -> int:
    """The size of the features of a batch in a layer.

    Args:
        decoder: the models' decoder.
        tasks: the token ids of each task's samples.
        hidden, inner: how many hidden states, and inputs of the widest map, of each position are in memory at once.
    """
    config, batches = decoder.model.config.get_text_config(), make_batches(tasks, fitting_batch(decoder))
    widest = max((columns for _, columns in map_shapes(decoder)), default=0)
    positions = max(batch.token_ids.numel() for batch in batches)

    def taken(width: int, copies: int) -> int:
        size = NUMBER * positions * width
        return int(copies * size * (FRAGMENTS if size < MAPPED else 1))

    scores = (getattr(config, "num_attention_heads", None) or 0) * max(max(batch.lengths) for batch in batches)
    eager = SCORES if config._attn_implementation == "eager" else 0
    return taken(hidden_size(decoder), hidden) + taken(widest, inner) + taken(scores, eager)
