"""Run what a model computes before its first decoder layer and after its last one.

``embed`` turns token ids into the first layer's input and captures how the model calls each layer; ``logits`` and
``head_input`` continue from the last layer's output. In both, stand-ins replace the layers and return what a layer of
that type returns.
"""

from __future__ import annotations

from typing import Any

import torch

from mergekit_slta.errors import SltaError, first_line
from mergekit_slta.layers.calls import LayerCall, Weights, returned_like, stand_ins
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.forms import capture, edge_state, random_numbers
from mergekit_slta.layers.maps import LinearMap
from mergekit_slta.layers.recording import Reached


def embed(decoder: Decoder, token_ids: torch.Tensor, edges: Weights) -> tuple[torch.Tensor, list[LayerCall]]:
    """Run everything before the first layer, and capture how the model calls each layer.

    Right padding needs no mask unless ``padding_matters``. ``edges`` are the tensors that ``embedding_tensors`` names.

    Returns:
        The first layer's input [B, S, D], or [B, S, n, D] with ``n`` hidden states per token, and one call per layer.

    Raises:
        SltaError: the layers need more than the hidden states of the layer before.
    """
    hidden, calls, _ = capture(decoder, token_ids, edges, lambda layer, hidden, call: decoder.form.returned[layer])
    return decoder.tokens_first(hidden), calls


def logits(decoder: Decoder, hidden: torch.Tensor, edges: Weights) -> torch.Tensor:
    """Run everything after the last layer on its output [B, S, D], with ``logit_tensors``; returns [B, S, V]."""
    return _run_tail(decoder, hidden, edges).logits.as_subclass(torch.Tensor)


def logit_tensors(decoder: Decoder) -> list[str]:
    """The model's names of the edge tensors that ``logits`` needs: all except an embedding that is not the head too."""
    head = head_tensors(decoder)
    unused = {embedding_tensor(decoder)} - {*head} if head else set()
    return [name for name in decoder.edge_tensors if name not in unused]


def output_head(decoder: Decoder) -> LinearMap | None:
    """The model's output head, by the model's names; None if it is tied to the embedding or missing."""
    head = decoder.model.get_output_embeddings()
    embedding = decoder.model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return None
    path = decoder.path(head)
    bias = f"{path}.bias" if getattr(head, "bias", None) is not None else None
    return LinearMap(path, path, f"{path}.weight", bias, transposed=False)


def head_tensors(decoder: Decoder) -> list[str]:
    """The model's names of the output head's weight and bias; the weight is the embedding where they are tied."""
    head = decoder.model.get_output_embeddings()
    own = [f"{decoder.path(head)}.{name}" for name, _ in head.named_parameters()] if head is not None else []
    return [decoder.first_names[name] for name in own]


def embedding_tensor(decoder: Decoder) -> str:
    """The model's name of the embedding, whose rows are the tokens'."""
    return decoder.first_names[f"{decoder.path(decoder.model.get_input_embeddings())}.weight"]


def tail_tensors(decoder: Decoder) -> list[str]:
    """The model's names of the edge tensors that ``head_input`` needs: all except the embedding and the head."""
    left_out = {embedding_tensor(decoder), *head_tensors(decoder)}
    return [name for name in decoder.edge_tensors if name not in left_out]


def head_input(decoder: Decoder, hidden: torch.Tensor, edges: Weights) -> torch.Tensor:
    """The input [B, S, D] of the output head for the last layer's output [B, S, D], with ``tail_tensors``."""
    head = decoder.model.get_output_embeddings()
    given: list[torch.Tensor] = []

    def stop(states: torch.Tensor) -> torch.Tensor:
        given.append(states.as_subclass(torch.Tensor))
        raise Reached

    head.forward = stop
    try:
        _run_tail(decoder, hidden, edges)
        raise SltaError(f"{decoder.name} does not call its output head.")
    except Reached:
        return given[0]
    finally:
        del head.forward


def tail_problem(decoder: Decoder) -> str | None:
    """Why the logits cannot be computed from the last layer's output alone, if they cannot."""
    if decoder.model.get_output_embeddings() is None:
        return None
    edges = random_numbers(edge_state(decoder), decoder.device)
    inputs, _ = embed(decoder, torch.zeros(1, 2, dtype=torch.int64), edges)
    try:
        given = head_input(decoder, inputs, {name: edges[name] for name in tail_tensors(decoder)})
        if not given.isnan().any():
            return None
        why = "it needs those of earlier layers too"
    except Exception as error:  # a model's own code may raise anything
        why = first_line(error)
    return (
        f"'level: model' does not apply to {decoder.name}: it cannot compute its logits from the output of its last "
        f"decoder layer alone ({why}). Use 'level: layer'."
    )


def _run_tail(decoder: Decoder, hidden: torch.Tensor, edges: Weights) -> Any:
    """Run a model whose layers return ``hidden``; an embedding that is not in ``edges`` gives NaN."""
    token_ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=decoder.device)
    returned, last = decoder.form.returned, len(decoder) - 1
    final = decoder.as_called(hidden)
    embedding: Any = decoder.model.get_input_embeddings()
    unknown = torch.full((), torch.nan, device=decoder.device).expand(embedding.weight.shape)

    def output(layer: int, given: torch.Tensor, call: LayerCall) -> Any:
        return returned_like(returned[layer], final if layer == last else torch.full_like(final, torch.nan))

    with stand_ins(decoder.layers, output), torch.no_grad():
        return torch.func.functional_call(
            decoder.model,
            {embedding_tensor(decoder): unknown, **edges},
            kwargs={"input_ids": token_ids, "use_cache": False},
        )
