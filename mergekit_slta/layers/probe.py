"""Run layers with made-up weights on a few tokens, to see what they do to tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.utils._pytree import tree_leaves

from mergekit_slta.layers.calls import LayerCall, Weights
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import embed
from mergekit_slta.layers.forms import edge_state, random_numbers, some_tokens

# How much rounding may change a rotary frequency.
PREFIX_TOLERANCE = 1e-5


def made_up_layer(decoder: Decoder, layer: int) -> tuple[Weights, torch.Tensor, LayerCall]:
    """Made-up weights of a layer, and its input and call for two samples that differ in the first of two tokens.

    Values that earlier layers hand to the layer, such as keys, are random too; indices stay, since they choose tokens.
    """
    first, other, last = some_tokens(decoder)
    edges = random_numbers(edge_state(decoder), decoder.device)
    hidden, calls = embed(decoder, torch.tensor([[first, last], [other, last]]), edges)
    state = {path: tensor.repeat_interleave(2, 0) for path, tensor in decoder.form.state.items()}
    state |= {path: own for path, own in random_numbers(state, decoder.device).items() if own.is_floating_point()}
    return random_numbers(decoder.layers[layer].state_dict(), decoder.device), hidden, calls[layer].own(state)


@torch.no_grad()
def padding_matters(decoder: Decoder, lengths: Collection[int]) -> bool:
    """Whether samples of these lengths may get other features in a right-padded batch than alone.

    They do if a token sees later tokens, if rotary embeddings depend on the length, or if layers pass more than hidden
    states to later layers, because the padding cannot be found in that.
    """
    ordered = sorted({max(length, 2) for length in lengths})  # one token alone shows no positions
    if len(set(lengths)) < 2 or len(ordered) < 2:
        return False
    if decoder.form.state or not decoder.form.causal:
        return True
    # Frequencies that depend on the length change at some length. Comparing the longest sample with the second
    # longest and the shortest shows whether that length lies between them.
    return any(_length_matters(decoder, short, ordered[-1]) for short in {ordered[0], ordered[-2]})


def _length_matters(decoder: Decoder, short: int, long: int) -> bool:
    """Whether the calls of the layers differ where a short and a long sample have the same tokens."""
    token_ids, edges = torch.zeros(1, long, dtype=torch.int64), random_numbers(edge_state(decoder), decoder.device)
    own, other = (_numbers(embed(decoder, token_ids[:, :length], edges)[1]) for length in (short, long))
    return len(own) != len(other) or not all(map(_is_prefix, own, other))


def _numbers(calls: Sequence[LayerCall]) -> list[torch.Tensor]:
    """The tensors in the calls that are neither masks, which may be missing or larger than needed, nor indices."""
    leaves = tree_leaves([(call.args, call.kwargs) for call in calls])
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return [tensor for tensor in tensors.values() if tensor.is_floating_point() or tensor.is_complex()]


def _is_prefix(own: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor equals the beginning of another one in each dimension."""
    if own.ndim != other.ndim:
        return False
    other = other[tuple(map(slice, own.shape))]
    return own.shape == other.shape and torch.allclose(own, other, rtol=PREFIX_TOLERANCE, atol=PREFIX_TOLERANCE)
