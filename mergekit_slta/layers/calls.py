"""How a model calls its decoder layers: captured once while functions stand in for them, then used layer by layer.

A layer can run alone once the arguments of the model's call are known. ``stand_ins`` replaces every layer by a function
while the model runs: ``embed`` so turns token ids into the first layer's input and each layer's call, and ``logits``
and ``head_input`` continue from the last layer's output. What a stand-in must return, ``LayerForm.returned``, is known
since the model was traced. A layer can also run on made-up weights and a made-up call, for the trace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder, LayerCall, ModelCodeError, OfStandIn, Reached, model_code
from mergekit_slta.models.checkpoint import Tensors

RANDOM_NUMBERS = 1_000_003  # the number of different values in a made-up tensor; it has no small divisors
SMALL = 2**16  # made-up tensors up to this many elements do not overlap in memory

# Stand-ins


LayerForward = Callable[[int, torch.Tensor, LayerCall], Any]  # what a layer returns, by index, hidden states and call


@contextlib.contextmanager
def stand_ins(layers: torch.nn.ModuleList, forward: LayerForward) -> Iterator[None]:
    """Replace every layer by ``forward``, which may run the layer itself."""

    def stand_in(index: int, *args: Any, **kwargs: Any) -> Any:
        hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        # By its own name it would hold itself, and with it all that it has captured, until garbage is collected.
        replaced = vars(layers[index]).pop("forward")
        try:
            return forward(index, hidden, LayerCall(args[1:], kwargs))
        except Exception as error:
            raise OfStandIn(error) from None
        finally:
            layers[index].forward = replaced

    for index, layer in enumerate(layers):
        layer.forward = functools.partial(stand_in, index)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class Made(torch.Tensor):
    """A tensor that a stand-in has returned, or that was computed from one."""


def returned_like(returned: Any, hidden: torch.Tensor) -> Any:
    """A copy of a layer's return value with other hidden states, all of it marked as ``Made``."""
    made = hidden.as_subclass(Made)
    if not isinstance(returned, (tuple, list)):
        return made
    return type(returned)([made, *tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(Made), returned[1:])])


def capture_calls(
    decoder: Decoder, token_ids: torch.Tensor, edges: Tensors, returned: LayerForward
) -> tuple[torch.Tensor, list[LayerCall], dict[int | str, int]]:
    """Run everything before the first layer, and capture how the model calls each layer.

    ``returned`` gives what a layer returns, whose form its stand-in then returns with other values. The result is the
    first layer's input as the model's own code gives it, each layer's other arguments, and what layers hand on as in
    ``LayerForm``.
    """
    inputs, handed = list[torch.Tensor](), list[torch.Tensor]()
    calls, returns = list[LayerCall](), list[Any]()
    taken: list[dict[int | str, int]] = []  # by layer and argument, the position in what the layer before returns
    strange = False  # whether a layer is given what another than the one before has made, or what was made of that

    def hand_on(layer: int, hidden: torch.Tensor, call: LayerCall) -> Any:
        nonlocal strange
        inputs.append(hidden.as_subclass(torch.Tensor))
        calls.append(call)
        previous = returns[-1] if returns and isinstance(returns[-1], (tuple, list)) else ()
        made = {id(part): position for position, part in enumerate(previous) if position and isinstance(part, Made)}
        taken.append({name: made[id(value)] for name, value in call.arguments.items() if id(value) in made})
        leaves = tree_leaves((call.args, call.kwargs))
        strange = strange or sum(isinstance(leaf, Made) for leaf in leaves) > len(taken[-1])
        form = returned(layer, inputs[0], call)
        if not handed:  # distinct values, which show any change
            handed.append(torch.arange(1.0, hidden.numel() + 1, device=decoder.device).view(hidden.shape))
        returns.append(returned_like(form, handed[0]))
        return returns[-1]

    tensors = {name.removeprefix(decoder.body_path): edges[name] for name in decoder.embed_tensors}
    # Some wrappers take the device of their first tensor, which may be an image tower's, for that of the tokens.
    name, first = next(iter(decoder.body.named_parameters()))
    tensors.setdefault(name, torch.zeros((), device=decoder.device).expand(first.shape))
    kwargs = {"input_ids": token_ids.to(decoder.device), "use_cache": False}
    decoder.restore()
    with stand_ins(decoder.layers, hand_on), torch.no_grad(), model_code(decoder.name):
        torch.func.functional_call(decoder.body, tensors, kwargs=kwargs)
    problem = None
    if len(calls) != len(decoder) or not calls:
        problem = f"does not call its {len(decoder)} decoder layers one after the other ({len(calls)} calls)"
    elif token_ids.shape not in (inputs[0].shape[:2], inputs[0].shape[1:3]):
        problem = "hands its decoder layers other positions than the tokens'"
    elif strange or any(before != taken[-1] for before in taken[1:]):
        problem = "hands its decoder layers more of earlier layers than what the layer before returns"
    elif not all(torch.equal(states, handed[0]) for states in inputs[1:]):
        problem = "changes the hidden states between its decoder layers"
    if problem:
        raise SltaError(f"{decoder.name} {problem}, so slta and featcal cannot run it: use 'merge_method: actmat'.")
    return inputs[0], calls, taken[-1]


# Before the layers, and after


def embed(decoder: Decoder, token_ids: torch.Tensor, edges: Tensors) -> tuple[torch.Tensor, list[LayerCall]]:
    """Run everything before the first layer, and capture how the model calls each layer.

    Right padding needs no mask unless ``padding_matters``. ``edges`` are the ``embed_tensors``. The result is the first
    layer's input [B, S, D], or [B, S, n, D] with ``n`` hidden states per token, and one call per layer.
    """
    hidden, calls, _ = capture_calls(decoder, token_ids, edges, lambda layer, *_: decoder.form.returned[layer])
    return decoder.tokens_first(hidden), calls


def logits(decoder: Decoder, hidden: torch.Tensor, edges: Tensors) -> torch.Tensor:
    """Run everything after the last layer on its output [B, S, D], with ``logit_tensors``; returns [B, S, V].

    The layers before the last one return NaN, and so does an embedding that is not the head too.
    """
    kwargs = {"input_ids": torch.zeros(hidden.shape[:2], dtype=torch.int64, device=decoder.device), "use_cache": False}
    last, final = len(decoder) - 1, decoder.as_called(hidden)
    rows: Any = decoder.model.get_input_embeddings().weight
    unknown = torch.full((), torch.nan, device=decoder.device).expand(rows.shape)
    unset = torch.full_like(final, torch.nan)

    def output(layer: int, *_: object) -> Any:
        return returned_like(decoder.form.returned[layer], final if layer == last else unset)

    with stand_ins(decoder.layers, output), torch.no_grad(), model_code(decoder.name):
        returned: Any = torch.func.functional_call(decoder.model, {decoder.embedding: unknown, **edges}, kwargs=kwargs)
    return returned.logits.as_subclass(torch.Tensor)


def head_input(decoder: Decoder, hidden: torch.Tensor, edges: Tensors) -> torch.Tensor:
    """The input [B, S, D] of the output head for the last layer's output [B, S, D], with ``tail_tensors``.

    A ModelCodeError if the model's own code raises something, or does not call the head.
    """
    inputs: list[torch.Tensor] = []

    def stop(head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs.append(args[0].as_subclass(torch.Tensor))
        raise Reached

    head: Any = decoder.model.get_output_embeddings()
    with head.register_forward_pre_hook(stop), contextlib.suppress(Reached):
        logits(decoder, hidden, edges)
    if not inputs:
        raise ModelCodeError(f"{decoder.name} does not call its output head")
    return inputs[0]


# Made-up weights and calls


def random_numbers(state: Mapping[Any, torch.Tensor], device: torch.device, seed: int = 0) -> dict[Any, torch.Tensor]:
    """Random numbers in place of a model's tensors.

    The rows of a large matrix overlap in memory, and so do the matrices of a stack, each of which lies in one piece: no
    product copies more than one matrix.
    """
    generator, numbers = torch.Generator().manual_seed(seed), dict[Any, torch.Tensor]()
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            numbers[name] = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
            continue
        columns = tensor.shape[-1] if tensor.ndim > 1 else 1
        strides = list(torch.empty(tensor.shape, device="meta").stride())
        if tensor.numel() > SMALL:
            overlapping = tensor.ndim - (2 if tensor.ndim > 2 else 1)
            strides[:overlapping] = [16] * overlapping
        size = 1 + sum(stride * (length - 1) for stride, length in zip(strides, tensor.shape, strict=True))
        values = torch.randn(min(size, RANDOM_NUMBERS), generator=generator)
        values = values / columns**0.5 if tensor.ndim > 1 else 1 + values / 10
        values = values.repeat(-(-size // len(values))).to(device)
        numbers[name] = values.as_strided(tensor.shape, strides)
    return numbers


def made_up_edges(decoder: Decoder) -> Tensors:
    """Random numbers in place of the tensors outside the layers."""
    state = decoder.model.state_dict()
    return random_numbers({name: state[name] for name in decoder.edge_tensors}, decoder.device)


def some_tokens(decoder: Decoder) -> list[int]:
    """Three tokens, none of them the padding, by which some models count positions."""
    padding = getattr(decoder.model.config.get_text_config(), "pad_token_id", None)
    return [token for token in range(4) if token != padding][:3]


def made_up_layer(decoder: Decoder, layer: int) -> tuple[Tensors, torch.Tensor, LayerCall]:
    """Made-up weights of a layer, and its input and call for two samples that differ in the first of two tokens.

    Values that earlier layers hand to the layer, such as keys, are random too; indices stay, since they choose tokens.
    """
    first, other, last = some_tokens(decoder)
    hidden, calls = embed(decoder, torch.tensor([[first, last], [other, last]]), made_up_edges(decoder))
    state = {path: tensor.repeat_interleave(2, 0) for path, tensor in decoder.form.state.items()}
    state |= {path: made for path, made in random_numbers(state, decoder.device).items() if made.is_floating_point()}
    return random_numbers(decoder.layers[layer].state_dict(), decoder.device), hidden, calls[layer].with_state(state)
