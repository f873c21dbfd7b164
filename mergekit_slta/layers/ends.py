"""Run what a model computes before its first decoder layer and after its last one.

``embed`` turns token ids into the first layer's input and captures how the model calls each layer; ``logits`` and
``head_input`` continue from the last layer's output. In both, stand-ins replace the layers and return what a layer of
that type returns. To know its form, ``try_layers`` runs one layer of each type first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mergekit_slta.errors import SltaError, first_line
from mergekit_slta.layers.calls import (
    LayerCall,
    LayerForward,
    Made,
    State,
    Weights,
    handed_on,
    hidden_of,
    returned_like,
    stand_ins,
)
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.placeholders import SmallProducts, random_numbers, zeros
from mergekit_slta.layers.recording import LayerRun, Reached
from mergekit_slta.layers.residual import plain

# How much rounding may change a token's hidden state, relative to the largest value.
CAUSAL_TOLERANCE = 1e-3


def embedding_tensors(decoder: Decoder) -> list[str]:
    """The model's names of the edge tensors that ``embed`` needs: all except the output head's."""
    return [name for name in decoder.edge_tensors if name.startswith(decoder.body_path)]


def embed(decoder: Decoder, token_ids: torch.Tensor, edges: Weights) -> tuple[torch.Tensor, list[LayerCall]]:
    """Run everything before the first layer, and capture how the model calls each layer.

    Right padding needs no mask unless ``padding_matters``.

    Args:
        decoder: the model's decoder.
        token_ids: [B, S] int64.
        edges: tensors outside the layers, by the model's names.

    Returns:
        The first layer's input [B, S, D], or [B, S, n, D] with ``n`` hidden states per token, and one call per layer.

    Raises:
        SltaError: the layers need more than the hidden states of the layer before.
    """
    returned = decoder.once(trial).returned
    return _capture(decoder, token_ids, edges, lambda layer, hidden, call: returned[layer])


def _capture(
    decoder: Decoder, token_ids: torch.Tensor, edges: Weights, returned: LayerForward
) -> tuple[torch.Tensor, list[LayerCall]]:
    """``embed``, with stand-ins that return values in the form that ``returned`` gives."""
    inputs: list[torch.Tensor] = []
    calls: list[LayerCall] = []
    handed: list[torch.Tensor] = []
    returns: list[Any] = []
    # By layer and argument, the position in the return value of the layer before.
    taken: list[dict[int | str, int]] = []
    strange = False  # whether a layer is given what another than the one before has made, or what was made of that

    def hand_on(layer: int, hidden: torch.Tensor, call: LayerCall) -> Any:
        nonlocal strange
        inputs.append(hidden.as_subclass(torch.Tensor))
        calls.append(call)
        if decoder.stacked is None:
            decoder.stacked = hidden.ndim == 4 and hidden.shape[:2] != token_ids.shape == hidden.shape[1:3]
        before = returns[-1] if returns and isinstance(returns[-1], (tuple, list)) else ()
        made = {id(part): position for position, part in enumerate(before) if position and isinstance(part, Made)}
        taken.append({name: made[id(value)] for name, value in call.arguments.items() if id(value) in made})
        leaves = tree_leaves((call.args, call.kwargs))
        strange = strange or sum(isinstance(leaf, Made) for leaf in leaves) > len(taken[-1])
        form = returned(layer, inputs[0], call)
        if not handed:  # distinct values, which show any change
            handed.append(torch.arange(1.0, hidden.numel() + 1, device=decoder.device).view(hidden.shape))
        returns.append(returned_like(form, handed[0]))
        return returns[-1]

    weights = {name.removeprefix(decoder.body_path): edges[name] for name in embedding_tensors(decoder)}
    # Some wrappers take the device of their first tensor, which may be an image tower's, for that of the tokens.
    name, first = next(iter(decoder.body.named_parameters()))
    weights.setdefault(name, torch.zeros((), device=decoder.device).expand(first.shape))
    kwargs = {"input_ids": token_ids.to(decoder.device), "use_cache": False}
    decoder.fresh.restore()
    with stand_ins(decoder.layers, hand_on), torch.no_grad():
        torch.func.functional_call(decoder.body, weights, kwargs=kwargs)
    if len(calls) != len(decoder):
        problem = f"does not call its {len(decoder)} decoder layers one after the other ({len(calls)} calls)"
    elif decoder.tokens_first(inputs[0]).shape[:2] != token_ids.shape:
        problem = "hands its decoder layers other positions than the tokens'"
    elif strange or any(own != taken[-1] for own in taken[1:]):
        problem = "hands its decoder layers more of earlier layers than what the layer before returns"
    elif not all(torch.equal(given, handed[0]) for given in inputs[1:]):
        problem = "changes the hidden states between its decoder layers"
    else:
        decoder.handed = taken[-1]
        return decoder.tokens_first(inputs[0]), calls
    raise SltaError(
        f"{decoder.name} {problem}, so no level applies to it; it can be merged with 'merge_method: actmat'."
    )


@dataclass(frozen=True)
class Trial:
    """The results of a model's layers with made-up weights on two tokens.

    Attributes:
        returned: for each layer, the return value of the first layer of its type.
        state: the tensors that layers pass to later layers, for one sample.
        causal: whether no token sees a later one.
    """

    returned: list[Any]
    state: State
    causal: bool = False


def trial(decoder: Decoder) -> Trial:
    """Try the layers with weights that are all zero, which take no memory."""
    token_ids = torch.zeros(1, 2, dtype=torch.int64)
    try:
        found = try_layers(decoder, token_ids, zeros)
    except SltaError:
        raise
    except Exception:  # a model's own code may raise anything where it is not given images
        if decoder.tower in (decoder.model, decoder.body):
            raise
        decoder.leave_wrapper()
        found = try_layers(decoder, token_ids, zeros)
    return replace(found, causal=is_causal(decoder) or _attend_causally(decoder))


def _attend_causally(decoder: Decoder) -> bool:
    """Use the attention that is given a mask, if no token sees a later one by it; by torch's own, the default, some do.

    torch's own is given none for text alone. It then takes from a flag of the module whether it is causal, and where
    prompts may be seen as a whole beside images (PaliGemma's), that flag says no.
    """
    default = decoder.model.config._attn_implementation
    decoder.model.set_attn_implementation("eager")
    if is_causal(decoder):
        return True
    decoder.model.set_attn_implementation(default)
    return False


def is_causal(decoder: Decoder) -> bool:
    """Whether no token sees a later one; compares two samples that differ in the second of two tokens."""
    first, second, other = some_tokens(decoder)
    with torch.no_grad():
        tried = try_layers(decoder, torch.tensor([[first, second], [first, other]]), random_numbers)
    pairs = [decoder.tokens_first(plain(hidden_of(returned)))[:, 0] for returned in tried.returned]
    return all(bool((one - two).abs().max() <= CAUSAL_TOLERANCE * one.abs().max()) for one, two in pairs)


def some_tokens(decoder: Decoder) -> list[int]:
    """Three tokens, none of them the padding, by which some models count positions."""
    padding = getattr(decoder.model.config.get_text_config(), "pad_token_id", None)
    return [token for token in range(4) if token != padding][:3]


def try_layers(decoder: Decoder, token_ids: torch.Tensor, fill: Callable[[Weights, torch.device], Weights]) -> Trial:
    """Run the first layer of each type on the embedded tokens [B, 2], with weights from ``fill``."""
    types = _types(decoder)
    found: dict[Any, Any] = {}
    state: dict[tuple[Any, ...], torch.Tensor] = {}

    def run(layer: int, hidden: torch.Tensor, call: LayerCall) -> Any:
        if types[layer] not in found:
            hidden = decoder.tokens_first(hidden)
            weights, run = fill(decoder.layers[layer].state_dict(), decoder.device), LayerRun()
            found[types[layer]] = decoder.call(run, layer, weights, hidden, call.own(state))
            state.update(run.state)
        return found[types[layer]]

    with SmallProducts():
        _capture(decoder, token_ids, fill(edge_state(decoder), decoder.device), run)
    state.update(handed_on(found[types[0]], decoder.handed))
    if any(tensor.shape[:1] != token_ids.shape[:1] for tensor in state.values()):
        raise SltaError(
            f"The layers of {decoder.name} pass something to later layers that is not of single samples, so no level "
            "applies to it; it can be merged with 'merge_method: actmat'."
        )
    return Trial([found.get(kind) for kind in types], {path: tensor[:1] for path, tensor in state.items()})


def _types(decoder: Decoder) -> list[Any]:
    """What distinguishes layers: their modules and shapes, and their settings (a window, states to share)."""
    names = getattr(decoder.model.config.get_text_config(), "layer_types", None) or [None] * len(decoder)
    choices = [tuple(map(_choices, layer.modules())) for layer in decoder.layers]
    return list(zip(decoder.first_of_kind, names, choices, strict=True))


def _choices(module: torch.nn.Module) -> tuple[Any, ...]:
    """A module's settings that are flags or names."""
    return tuple(
        (name, value if isinstance(value, bool | str) else type(value))
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, bool | str | int | None)
    )


def edge_state(decoder: Decoder) -> Weights:
    """The tensors outside the layers, without values."""
    state = decoder.model.state_dict()
    return {name: state[name] for name in decoder.edge_tensors}


def logits(decoder: Decoder, hidden: torch.Tensor, edges: Weights) -> torch.Tensor:
    """Run everything after the last layer on its output [B, S, D], with ``logit_tensors``; returns [B, S, V]."""
    return _run_tail(decoder, hidden, edges).logits.as_subclass(torch.Tensor)


def logit_tensors(decoder: Decoder) -> list[str]:
    """The model's names of the edge tensors that ``logits`` needs: all except an embedding that is not the head too."""
    head = head_tensors(decoder)
    unused = {embedding_tensor(decoder)} - {*head} if head else set()
    return [name for name in decoder.edge_tensors if name not in unused]


def head_tensors(decoder: Decoder) -> list[str]:
    """The model's names of the output head's weight and bias; the weight is the embedding where they are tied."""
    head = decoder.model.get_output_embeddings()
    own = {id(tensor) for tensor in head.parameters()} if head is not None else set()
    state = decoder.model.state_dict(keep_vars=True)
    return [name for name in decoder.edge_tensors if id(state[name]) in own]


def embedding_tensor(decoder: Decoder) -> str:
    """The model's name of the embedding, whose rows are the tokens'."""
    embedding = decoder.model.get_input_embeddings().weight
    name = next(name for name, weight in decoder.model.named_parameters() if weight is embedding)
    return decoder.first_names.get(name, name)


def tail_tensors(decoder: Decoder) -> list[str]:
    """The model's names of the edge tensors that ``head_input`` needs: all except the embedding and the head."""
    left_out = {embedding_tensor(decoder), *head_tensors(decoder)}
    return [name for name in decoder.edge_tensors if name not in left_out]


def head_input(decoder: Decoder, hidden: torch.Tensor, edges: Weights) -> torch.Tensor:
    """The input [B, S, D] of the output head for the last layer's output [B, S, D].

    Args:
        decoder: the model's decoder.
        hidden: [B, S, D].
        edges: the tensors that ``tail_tensors`` names.

    Raises:
        SltaError: the head is not called, or its input depends on more than the last layer's output.
    """
    head = decoder.model.get_output_embeddings()
    given: list[torch.Tensor] = []

    def stop(states: torch.Tensor) -> torch.Tensor:
        given.append(states.as_subclass(torch.Tensor))
        raise Reached

    head.forward = stop
    try:
        _run_tail(decoder, hidden, edges)
    except Reached:
        pass
    else:
        raise SltaError(f"{decoder.name} does not call its output head: set 'head: false'.")
    finally:
        del head.forward
    if given[0].isnan().any() and not hidden.isnan().any():
        raise SltaError(
            f"'level: model' does not apply to {decoder.name}: it computes its logits from more than the output of its "
            "last decoder layer. Use 'level: layer', or 'head: false' for featcal."
        )
    return given[0]


def tail_problem(decoder: Decoder) -> str | None:
    """Why the logits cannot be computed from the last layer's output alone."""
    return decoder.once(_tail_problem)


def _tail_problem(decoder: Decoder) -> str | None:
    if decoder.model.get_output_embeddings() is None:
        return None
    edges = zeros(edge_state(decoder), decoder.device)
    inputs, _ = embed(decoder, torch.zeros(1, 2, dtype=torch.int64), edges)
    try:
        head_input(decoder, inputs, {name: edges[name] for name in tail_tensors(decoder)})
    except SltaError as error:
        return error.message
    except Exception as error:  # a model's own code may raise anything
        return (
            f"'level: model' does not apply to {decoder.name}: it cannot compute its logits from the output of its "
            f"last decoder layer alone ({first_line(error)}). Use 'level: layer', or 'head: false' for featcal."
        )
    return None


def _run_tail(decoder: Decoder, hidden: torch.Tensor, edges: Weights) -> Any:
    """Run a model whose layers return ``hidden``; an embedding that is not in ``edges`` gives NaN."""
    token_ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=decoder.device)
    returned, last = decoder.once(trial).returned, len(decoder) - 1
    final = decoder.as_called(hidden)
    embedding: Any = decoder.model.get_input_embeddings()
    rows, columns = embedding.weight.shape
    unknown = torch.full((1, columns), torch.nan, device=decoder.device).expand(rows, columns)

    def output(layer: int, given: torch.Tensor, call: LayerCall) -> Any:
        return returned_like(returned[layer], final if layer == last else torch.full_like(final, torch.nan))

    with stand_ins(decoder.layers, output), torch.no_grad():
        return torch.func.functional_call(
            decoder.model,
            {embedding_tensor(decoder): unknown, **edges},
            kwargs={"input_ids": token_ids, "use_cache": False},
        )
