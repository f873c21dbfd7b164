"""Find how a decoder layer splits into branches by following what its modules make of the residual stream.

Nothing here knows an architecture by name: one run of the layer on two tokens shows which children make the output,
what each of them reads, and which of them mixes tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mergekit_slta.layers.calls import Weights, hidden_of
from mergekit_slta.layers.children import child_of, is_inside
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.placeholders import random_numbers
from mergekit_slta.layers.probe import explained, random_layer, token_mixers, trace
from mergekit_slta.layers.recording import LayerRun
from mergekit_slta.layers.residual import INPUT, plain

# The node of the graph of a layer's children that is its output.
OUTPUT = "<output>"

Nodes = frozenset[str]


@dataclass(frozen=True)
class LayerStructure:
    """How a decoder layer splits into an attention (or other token mixing) branch and an MLP branch.

    Attributes:
        branches: the direct children of the layer in each branch, ``attn`` and ``mlp``, norms included; a child, or a
            tensor of the layer's own, that feeds both branches is in both. A layer that only mixes tokens, or never
            mixes them, has one branch.
        mixers: the children in the attention branch that let tokens see each other.
        boundary: the child whose output is all that the MLP branch reads, where the attention branch ends with a norm
            of the residual stream; None where its contribution is added to the stream.
        adding: the children that add to the residual stream by themselves.
    """

    branches: Mapping[str, Nodes]
    mixers: Nodes
    boundary: str | None = None
    adding: Nodes = frozenset()

    def only(self, branch: str) -> Nodes:
        """The children that serve no other branch."""
        return self.branches[branch].difference(*(own for name, own in self.branches.items() if name != branch))

    def alone(self, branch: str, weights: Weights, base: Weights, run: LayerRun) -> tuple[Weights, dict[str, Any]]:
        """The weights, and the outputs to replay, with which only one branch differs from the base model.

        The other branches return what they return in the base model. A child that adds to the residual stream by
        itself would return the base model's stream too, so it runs with the base model's weights instead.

        Args:
            branch: the branch.
            weights: the layer's tensors.
            base: the base model's.
            run: the base model's run of the layer on the same input.
        """
        others = frozenset().union(*(self.only(other) for other in self.branches if other != branch))
        again = others & self.adding
        replay = {name: run.returned[name] for name in others - again if name in run.returned}
        return {name: base[name] if is_inside(name, again) else own for name, own in weights.items()}, replay

    def features(self, branch: str, run: LayerRun) -> torch.Tensor:
        """The residual stream where a branch ends."""
        if self.boundary is None or branch != "attn":
            output: torch.Tensor = run.output
            return output
        found: torch.Tensor = plain(hidden_of(run.outputs[self.boundary]))
        return found


def structure(decoder: Decoder, layer: int) -> LayerStructure | None:
    """How the layer splits into branches, None where the trace does not show it; layers of one kind are traced once.

    Raises:
        SltaError: the model's layers cannot be run one at a time.
    """
    return decoder.once_per_kind(layer, _structure)


@torch.no_grad()
def _structure(decoder: Decoder, layer: int) -> LayerStructure | None:
    run = trace(decoder, layer)
    module = decoder.layers[layer]
    owners = frozenset(child_of(module, name) for name in module.state_dict())
    # What a child returned is known of one call only, and not where the layer calls the child's parts one by one.
    if (run.repeated | run.opened - run.reads.keys()) & owners:
        return None
    found = _branches(run, token_mixers(decoder, layer))
    if found is None:
        return None
    # What the layer uses by itself, or never.
    unseen = owners.difference(*found.branches.values()) | owners & run.opened
    branches = {name: children | unseen for name, children in found.branches.items() if children & owners}
    boundary = found.boundary if len(branches) > 1 else None
    found = LayerStructure(branches or {"mlp": unseen}, found.mixers, boundary, frozenset(run.adding))
    with explained(decoder):
        return found if _told_apart(decoder, layer, found) else None


def _told_apart(decoder: Decoder, layer: int, found: LayerStructure) -> bool:
    """Whether a branch alone makes of the layer what all together do, and another thing with other weights of it."""
    weights, hidden, call = random_layer(decoder, layer)
    base = decoder.run(layer, weights, hidden, call)
    if found.boundary is not None:
        changed = _with_other_rest(base.returned[found.boundary])
        if not torch.equal(
            decoder.run(layer, weights, hidden, call, replay={found.boundary: changed}).output, base.output
        ):
            return False  # what the boundary returns is more than the residual stream, such as the MLP branch's input
    others = random_numbers(decoder.layers[layer].state_dict(), decoder.device, seed=1)
    expected = {branch: found.features(branch, base).clone() for branch in found.branches}

    def features(branch: str, own: Weights) -> torch.Tensor:
        held, replay = found.alone(branch, own, weights, base)
        return found.features(branch, decoder.run(layer, held, hidden, call, replay=replay))

    return all(
        torch.equal(features(branch, weights), expected[branch])
        and not torch.equal(features(branch, others), expected[branch])
        for branch in found.branches
    )


def _with_other_rest(returned: Any) -> Any:
    """A child's return value in which only the hidden states, its first part, are as they were."""
    if not isinstance(returned, (tuple, list)):
        return returned
    rest = [part + 1 if isinstance(part, torch.Tensor) else part for part in map(plain, returned[1:])]
    return type(returned)([returned[0], *rest])


def _branches(run: LayerRun, mixers: Nodes) -> LayerStructure | None:
    """Sort the children that the output depends on; None where attention and MLP cannot be told apart.

    What the residual stream holds after the first children that mix tokens is either a sum with what it held before,
    which the MLP branch reads and adds to, or the output of a child through which everything goes (a norm of the sum).
    """
    reads = {**run.reads, OUTPUT: run.sources}
    before: dict[str, set[str]] = {}
    for node, read in reads.items():  # in the order of the calls
        before[node] = {node}.union(*(before.get(source, {source}) for source in read))
    live = before[OUTPUT] - {INPUT, OUTPUT}
    first = {node for node in mixers & live if not before[node] & mixers - {node}}
    if not first:
        return LayerStructure({"mlp": frozenset(live)}, frozenset())
    leading = set().union(*(before[node] for node in first)) - {INPUT}
    after = {node for node in reads if before[node] & first}
    gates = [node for node in run.reads if node in live and not _avoids(node, reads)]
    boundary = next((node for node in gates if node in after and first <= before[node]), None)
    if boundary is not None:
        attention = before[boundary] - {INPUT}
        mlp = live - attention
    else:
        roots = {INPUT, *(node for node in gates if node not in after)}
        # The first child that adds attention to the residual stream by itself still belongs to attention.
        sums = {node for node in run.adding & after - mixers if not any(before[node] & run.adding - {node})}
        merged = {node for node in after - sums if reads[node] & after and reads[node] & roots}
        if OUTPUT not in merged:
            return None
        parallel = live - after - leading
        mlp = {node for node in live & after if before[node] & merged} | parallel
        attention = leading | (live & after - mlp)
        mlp |= set().union(*(before[node] for node in parallel)) - {INPUT}
    if mixers & mlp - attention:
        return None  # such as a second attention
    branches = {"attn": frozenset(attention), "mlp": frozenset(mlp)}
    return LayerStructure(branches, frozenset(first), boundary)


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
