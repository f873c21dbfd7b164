"""Find how a decoder layer splits into branches by following what its modules make of the residual stream.

Nothing here knows an architecture by name: one run of the layer on two tokens shows which children make the output,
which others each of them reads, and which of them mix tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mergekit_slta.layers.branches import LayerStructure, Nodes
from mergekit_slta.layers.calls import LayerCall, Weights
from mergekit_slta.layers.children import child_of
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.forms import random_numbers
from mergekit_slta.layers.probe import made_up_layer
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.residual import INPUT

# The node of the graph of a layer's children that is its output.
OUTPUT = "<output>"


@torch.no_grad()
def find_structure(decoder: Decoder, layer: int) -> LayerStructure | None:
    """How the layer splits into branches, None where the trace does not show it."""
    made_up = made_up_layer(decoder, layer)
    run = decoder.run(layer, *made_up, unmix=True)
    module = decoder.layers[layer]
    owners = frozenset(child_of(module, name) for name in module.state_dict())
    # A list may hold several attentions, and a module that layers share may work differently in each of them.
    if any("." in child for child in owners) or decoder.shared_tensors & {*decoder.layer_tensors(layer).values()}:
        return None
    # Only one call of a child is recorded, and none where the layer calls the child's parts one by one.
    if (run.repeated | run.opened - run.reads.keys()) & owners:
        return None
    found = _branches(run, frozenset(run.mixers))
    if found is None:
        return None
    # Children whose tensors the layer uses by itself, or never, and its own tensors.
    unseen = owners.difference(*found.branches.values()) | owners & run.opened
    branches = {name: children | unseen for name, children in found.branches.items() if children & owners}
    boundary = found.boundary if len(branches) > 1 else None
    found = LayerStructure(branches or {"mlp": unseen}, found.mixers, boundary)
    return found if _told_apart(decoder, layer, found, *made_up) else None


def _told_apart(
    decoder: Decoder, layer: int, found: LayerStructure, weights: Weights, hidden: torch.Tensor, call: LayerCall
) -> bool:
    """Whether a branch alone makes of the layer what all together do, and another thing with other weights of it."""
    base = decoder.run(layer, weights, hidden, call)
    if found.boundary is not None:
        replay = {found.boundary: _with_other_rest(base.outputs[found.boundary])}
        if not torch.equal(decoder.run(layer, weights, hidden, call, replay=replay).output, base.output):
            return False  # the boundary returns more than the residual stream, such as the MLP branch's input
    others = random_numbers(decoder.layers[layer].state_dict(), decoder.device, seed=1)
    expected = {branch: found.features(branch, base).clone() for branch in found.branches}

    def features(branch: str, own: Weights) -> torch.Tensor:
        return found.features(branch, decoder.run(layer, own, hidden, call, replay=found.others_of(branch, base)))

    return all(
        torch.equal(features(branch, weights), expected[branch])
        and not torch.equal(features(branch, others), expected[branch])
        for branch in found.branches
    )


def _with_other_rest(returned: Any) -> Any:
    """A child's return value in which only the hidden states, its first part, are as they were."""
    if not isinstance(returned, (tuple, list)):
        return returned
    rest = [part + 1 if isinstance(part, torch.Tensor) else part for part in returned[1:]]
    return type(returned)([returned[0], *rest])


def _branches(run: LayerRun, mixers: Nodes) -> LayerStructure | None:
    """Sort the children that the output depends on; None where attention and MLP cannot be told apart.

    What the residual stream holds after the first children that mix tokens is either a sum with what it held before,
    which the MLP branch reads and adds to, or the output of a child through which everything goes (a norm of the sum).
    """
    reads = {**run.reads, OUTPUT: run.sources}
    before = all_before(reads)
    live = before[OUTPUT] - {INPUT, OUTPUT}
    first = {node for node in mixers & live if not before[node] & mixers - {node}}
    if not first:
        return LayerStructure({"mlp": frozenset(live)}, frozenset())
    leading = set().union(*(before[node] for node in first)) - {INPUT}
    after = {node for node in reads if before[node] & first}
    gates = [node for node in run.reads if node in live and not _avoids(node, reads)]
    # A child that the whole layer goes through, and after which nothing is left, ends both branches.
    ends = (node for node in gates if node in after and first <= before[node] and not live <= before[node])
    boundary = next(ends, None)
    if boundary is not None:
        attention = before[boundary] - {INPUT}
        mlp = live - attention
    else:
        roots = {INPUT, *(node for node in gates if node not in after)}
        merged = {node for node in after if reads[node] & after and reads[node] & roots}
        if OUTPUT not in merged:
            return None
        parallel = live - after - leading
        mlp = {node for node in live & after if before[node] & merged} | parallel
        attention = leading | (live & after - mlp)
        mlp |= set().union(*(before[node] for node in parallel)) - {INPUT}
    branches = {"attn": frozenset(attention), "mlp": frozenset(mlp)}
    return LayerStructure(branches, frozenset(first), boundary)


def all_before(reads: Mapping[str, Nodes]) -> dict[str, set[str]]:
    """By child, in the order of the calls: the child, and all that its arguments were made from."""
    before: dict[str, set[str]] = {}
    for node, read in reads.items():
        before[node] = {node}.union(*(before.get(source, {source}) for source in read))
    return before


def _avoids(node: str, reads: Mapping[str, Nodes]) -> bool:
    """Whether the output depends on the layer's input in a way that does not go through ``node``."""
    seen, frontier = {node}, [OUTPUT]
    while frontier:
        for source in reads.get(frontier.pop(), frozenset()) - seen:
            if source == INPUT:
                return True
            seen.add(source)
            frontier.append(source)
    return False
