"""Find how a decoder layer splits into branches, by changing what its children return.

Nothing here knows an architecture by name. Where the outputs of all children are given, a layer computes no more than
what lies between them, such as sums: changing one output shows what is made from it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from mergekit_slta.layers.calls import Weights, hidden_of
from mergekit_slta.layers.decoder import INPUT, Decoder, LayerStructure, Nodes
from mergekit_slta.layers.forms import random_numbers
from mergekit_slta.layers.heads import INSEPARABLE, find_heads
from mergekit_slta.layers.maps import linear_maps, takes_some_tokens
from mergekit_slta.layers.probe import made_up_layer
from mergekit_slta.layers.recording import LayerRun

# The node of the graph of a layer's children that is its output.
OUTPUT = "<output>"
# Of the largest number: by how much a token's features differ where a module has seen another token.
MIXING_TOLERANCE = 1e-4


@torch.no_grad()
def find_structure(decoder: Decoder, layer: int) -> LayerStructure:
    """How the layer splits into branches, in none where the trace does not show it."""
    trial = _Trial(decoder, layer)
    tokens = trial.base.output.shape[:2]
    of_some = (name for name, given in trial.base.inputs.items() if takes_some_tokens(name, given[0], tokens))
    split = LayerStructure(of_some_tokens=next(of_some, ""))
    with contextlib.suppress(Exception):  # a model's own code may raise anything when modules return other values
        split = _without_heads(trial, decoder, layer, split)
        if split.branches:
            split = replace(split, heads=find_heads(decoder, layer, split))
    return split


def _without_heads(trial: _Trial, decoder: Decoder, layer: int, whole: LayerStructure) -> LayerStructure:
    """What the layer makes of its children's outputs, added to ``whole``, and its branches."""
    reads = {node: trial.read_by(node) for node in (*trial.outputs, OUTPUT)}
    children = {child: reads[child] for child in trial.outputs}
    whole = replace(whole, reads=children, summands=trial.summands(reads[OUTPUT]))
    owners = frozenset(name.partition(".")[0] for name in decoder.layers[layer].state_dict())
    # Only one call of a child is known, and none where the layer calls the child's parts one by one; a module that
    # layers share may work differently in each of them.
    unknown = (trial.base.repeated | trial.base.opened - trial.outputs.keys()) & owners
    if unknown or decoder.shared_tensors & {*decoder.layer_tensors(layer).values()}:
        return whole
    split = _split(trial, reads, whole)
    # Children whose tensors the layer uses by itself, or never, and its own tensors.
    unseen = owners.difference(*split.branches.values()) | owners & trial.base.opened
    branches = {name: children | unseen for name, children in split.branches.items() if children & owners}
    boundary = split.boundary if len(branches) > 1 else None
    split = replace(split, branches=branches, boundary=boundary, heads=INSEPARABLE)
    return split if trial.confirms(split) else whole


class _Trial:
    """A layer with made-up weights, its input and the outputs of its children, which can be changed."""

    def __init__(self, decoder: Decoder, layer: int) -> None:
        self._decoder, self._layer = decoder, layer
        self._weights, self._hidden, self._call = made_up_layer(decoder, layer)
        self._others = random_numbers(decoder.layers[layer].state_dict(), decoder.device, seed=1)
        modules = [linear_map.module for linear_map in linear_maps(decoder.layers[layer]) if linear_map.expert is None]
        self.base = self._run(self._weights, {}, capture=modules)
        self.outputs = self.base.outputs
        self._given = {INPUT: self._hidden, **self.outputs}

    def _run(self, weights: Weights, given: Mapping[str, Any], **settings: Any) -> LayerRun:
        """Run the layer; the children whose outputs are not given compute them."""
        hidden = given.get(INPUT, self._hidden)
        return self._decoder.run(self._layer, weights, hidden, self._call, replay=given, **settings)

    def read_by(self, node: str) -> Nodes:
        """The children, and ``INPUT``, from whose outputs a child's arguments or the layer's output are made."""

        def made(name: str) -> Any:
            given = {**self._given, name: _other(self._given[name])} if name else self._given
            run = self._run(self._weights, given, until=node)
            return run.inputs.get(node, run.output)

        before = made("")
        return frozenset(name for name in self._given if not _equal(made(name), before))

    def summands(self, sources: Collection[str]) -> dict[str, float] | None:
        """The constants of ``LayerStructure.summands``."""
        found, zeros = [], tree_map_only(torch.Tensor, torch.zeros_like, self._given)
        replayed = self._run(self._others, self._given).output
        for weights, whole in ((self._weights, self.base.output), (self._others, replayed)):
            own = {name: value for name, value in self._given.items() if name in sources}  # in the order of the calls
            terms = {name: self._run(weights, {**zeros, name: value}).output for name, value in own.items()}
            if not terms or not _close(sum(terms.values()), whole):
                return None
            factors = {name: ratio(term, hidden_of(own[name])) for name, term in terms.items()}
            found.append({name: factor / factors.get(INPUT, 1.0) for name, factor in factors.items()})
        first, second = found
        same = all(math.isclose(factor, second[name], rel_tol=1e-4) for name, factor in first.items())
        return first if same else None

    def has_mixed(self, child: str) -> bool:
        """Whether a child's output for the second token shows the first one, by which alone the two samples differ."""
        value = hidden_of(self.outputs[child])
        if not isinstance(value, torch.Tensor) or value.shape[:2] != (2, 2) or not value.is_floating_point():
            return False
        first, second = value[:, 1]
        return float((first - second).abs().max()) > MIXING_TOLERANCE * float(first.abs().max())

    def is_gate(self, child: str) -> bool:
        """Whether the layer's input reaches its output through the hidden states that a child returns, and no else."""
        value = self.outputs[child]
        if isinstance(value, (tuple, list)):
            value = type(value)([value[0], *_other(value[1:])])
        return _equal(self._run(self._weights, {INPUT: _other(self._hidden), child: value}).output, self.base.output)

    def confirms(self, split: LayerStructure) -> bool:
        """Whether a branch alone makes of the layer what all together do, and another thing with other weights."""

        def changes(branch: str, weights: Weights) -> bool:
            run = self._run(weights, split.others_of(branch, self.base))
            return bool(split.change(branch, run, self.base).any())

        return all(not changes(own, self._weights) and changes(own, self._others) for own in split.branches)


def _split(trial: _Trial, reads: Mapping[str, Nodes], whole: LayerStructure) -> LayerStructure:
    """Sort the children that the output depends on; ``whole`` where attention and MLP cannot be told apart.

    What the residual stream holds after the first children that mix tokens is either a sum with what it held before,
    which the MLP branch reads and adds to, or the output of a child through which everything goes (a norm of the sum).
    """
    before = all_before(reads)
    live = before[OUTPUT] - {INPUT, OUTPUT}
    mixed = {node for node in live if trial.has_mixed(node)}
    first = {node for node in mixed if not before[node] & mixed - {node}}
    if not first:
        return replace(whole, branches={"mlp": frozenset(live)})
    leading = set().union(*(before[node] for node in first)) - {INPUT}
    after = {node for node in reads if before[node] & first}
    # A child that the whole layer goes through, and after which nothing is left, ends both branches.
    closing = live & after if INPUT not in reads[OUTPUT] else set()
    ends = [node for node in trial.outputs if node in closing and first <= before[node] and live - before[node]]
    boundary = next(filter(trial.is_gate, ends), None)
    if boundary is not None:
        attention = before[boundary] - {INPUT}
    else:
        earlier = leading - first | {INPUT}
        merged = {node for node in after if reads[node] & after and reads[node] & earlier}
        if OUTPUT not in merged:
            return whole
        attention = leading | {node for node in live & after if not before[node] & merged}
    mlp = live - attention
    mlp |= set().union(*(before[node] for node in mlp - after)) - {INPUT}  # what is parallel to the attention
    branches = {"attn": frozenset(attention), "mlp": frozenset(mlp)}
    return replace(whole, branches=branches, mixers=frozenset(first), boundary=boundary)


def all_before(reads: Mapping[str, Nodes]) -> dict[str, set[str]]:
    """By child, in the order of the calls: the child, and all that its arguments were made from."""
    before: dict[str, set[str]] = {}
    for node, read in reads.items():
        before[node] = {node}.union(*(before.get(source, {source}) for source in read))
    return before


def ratio(product: torch.Tensor, output: object) -> float:
    """The number that an output is multiplied by in a product; nan if it is not one number other than zero."""
    if not isinstance(output, torch.Tensor) or output.numel() != product.numel():
        return math.nan
    output = output.reshape(product.shape)
    found = (product * output).sum() / output.square().sum()
    return float(found) if found and _close(found * output, product) else math.nan


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5 * float(two.abs().max()))


def _equal(one: Any, two: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=True)
    return all(a is b or not isinstance(a, torch.Tensor) or torch.equal(a, b) for a, b in pairs)


def _other(values: Any) -> Any:
    """Other values, which are no multiples of the given ones; of indices the first two, whatever there is to choose."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cos() if tensor.is_floating_point() else (tensor == 0).to(tensor.dtype)

    return tree_map_only(torch.Tensor, other, values)
