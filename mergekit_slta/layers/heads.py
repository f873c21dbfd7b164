"""Find which rows of an attention's linear maps belong to which head, without knowing the architecture.

Architectures store queries, keys and values separately or fused in several orders, share keys among heads, or
transpose. One gradient shows all of this: with the projections' outputs as variables, a head's features depend on
exactly the rows that belong to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from mergekit_slta.layers.decoder import Decoder, LayerStructure
from mergekit_slta.layers.maps import Heads, linear_maps
from mergekit_slta.layers.probe import made_up_layer

INSEPARABLE = "its heads cannot be told apart by its linear maps"


@torch.enable_grad()
def find_heads(decoder: Decoder, layer: int, split: LayerStructure) -> Heads | str:
    """The heads of a layer's attention, or why there are none to be told apart.

    Raises:
        Exception: whatever a model's own code raises when its norms return what they are given.
    """
    kinds = {name: type(decoder.layers[layer].get_submodule(name)).__name__ for name in sorted(split.mixers)}
    if not kinds:
        return "it mixes no tokens"
    others = [kind for kind in kinds.values() if "attention" not in kind.lower()]
    if others:
        return f"it mixes tokens by {' and '.join(others)}, which is not known to have heads"
    if len(kinds) > 1:
        return "it has several attentions"
    (mixer,) = kinds
    maps = {found.name: found for found in linear_maps(decoder.layers[layer]) if found.name.startswith(mixer + ".")}
    made_up = made_up_layer(decoder, layer)
    outputs = decoder.run(layer, *made_up, keep={own.module for own in maps.values()}).outputs
    projected = {name: own.clone().requires_grad_() for name, own in outputs.items() if "." in name}
    output = list(projected)[-1] if projected else ""
    if output not in maps:
        return "its attention ends in no linear map that all heads share"
    del projected[output]
    leaves = list(projected.values())
    with contextlib.ExitStack() as hooks:  # a norm over all heads would make each head depend on all rows
        for name, module in decoder.layers[layer].get_submodule(mixer).named_modules(prefix=mixer):
            if name not in (mixer, output, *projected) and list(module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_hook(lambda _, given, returned: given[0]))
        (features, *_) = decoder.run(layer, *made_up, replay=projected, until=output).inputs[output]
    # Such as those of an MLP after the attention in the same module. Keys may also come from an earlier layer.
    if not _mixes_tokens(features, leaves) and not decoder.form.state:
        return INSEPARABLE
    count = decoder.model.config.get_text_config().num_attention_heads
    if features.shape[-1] % count:
        return f"its attention does not split into {count} heads of one size"
    rows = {name: torch.zeros(own.shape[-1], count, dtype=torch.bool) for name, own in projected.items()}
    for head, part in enumerate(features.unflatten(-1, (count, -1)).unbind(-2)):
        gradients = torch.autograd.grad(part.square().sum(), leaves, retain_graph=True, allow_unused=True)
        for belongs, gradient in zip(rows.values(), gradients, strict=True):
            if gradient is not None:
                belongs[:, head] = gradient.abs().sum(dim=tuple(range(gradient.ndim - 1))) > 0
    for belongs in rows.values():
        belongs[~belongs.any(1)] = True
    return Heads(count, maps[output], rows)


def _mixes_tokens(features: torch.Tensor, projected: Sequence[torch.Tensor]) -> bool:
    """Whether the last token's features [..., S, D] depend on what the projections make of other tokens."""
    last = features.flatten(0, -2)[-1].square().sum()
    gradients = torch.autograd.grad(last, projected, retain_graph=True, allow_unused=True)
    return any(bool(own.flatten(0, -2)[:-1].any()) for own in gradients if own is not None)
