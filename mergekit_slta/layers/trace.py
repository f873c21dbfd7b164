"""Trace a model once: build it without weights, and run its layers with made-up weights to see how they work.

Nothing here knows an architecture by name.

- What a layer returns besides hidden states shows in one run of a layer of each type (``LayerForm``).
- How a layer splits into branches shows when its children return other values. Where the outputs of all children are
  given, a layer computes no more than what lies between them, such as sums: changing one output shows what is made from
  it.
- Which rows of an attention's linear maps belong to which head shows in one gradient, although architectures store
  queries, keys and values separately or fused in several orders, share keys among heads, or transpose: with the
  projections' outputs as variables, a head's features depend on exactly the rows that belong to it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mergekit_slta.errors import SltaError, first_line
from mergekit_slta.layers.calls import (
    capture_calls,
    embed,
    head_input,
    made_up_edges,
    made_up_layer,
    random_numbers,
    some_tokens,
    tail_tensors,
)
from mergekit_slta.layers.decoder import (
    INPUT,
    Decoder,
    LayerCall,
    LayerForm,
    LayerRun,
    LayerStructure,
    ModelCodeError,
    Nodes,
    Writer,
    all_before,
    close,
    fresh,
    handed_on,
    hidden_of,
    ratio,
    watch,
)
from mergekit_slta.layers.maps import Heads, linear_maps, takes_some_tokens
from mergekit_slta.models.checkpoint import Weights
from mergekit_slta.models.layout import meta_model

LOG = logging.getLogger(__name__)

# The ends of the names of classes that make text from text; the last one's may take more than text.
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# The node of the graph of a layer's children that is its output.
OUTPUT = "<output>"
# Of the largest number: by how much a token's features differ where a module has seen another token.
MIXING_TOLERANCE = 1e-4
# How much rounding may change a token's hidden state, relative to the largest value.
CAUSAL_TOLERANCE = 1e-3
INSEPARABLE = "its heads cannot be told apart by its linear maps"


def trace(
    config: transformers.PretrainedConfig, trust_remote_code: bool = False, device: torch.device | str = "cpu"
) -> Decoder:
    """Find out how a model calls its decoder layers, how each splits into branches and heads, and how it ends.

    Raises:
        SltaError: the model is not a decoder-only language model, or its layers cannot be found, or run one at a time.
    """
    refuse_unless_decoder(config)
    return trace_model(meta_model(config, trust_remote_code), trust_remote_code, device)


def trace_model(
    model: transformers.PreTrainedModel, trust_remote_code: bool = False, device: torch.device | str = "cpu"
) -> Decoder:
    """``trace`` a model that is on the meta device."""
    device = _numbered(device)
    # Attention stays the architecture's default: torch's own, whose memory grows with the length, or, for a few such as
    # Gemma 2 and gpt-oss, the one that has the scores of all pairs of tokens in memory. See ``_attending_causally``.
    # One expert of a mixture after the other: the other ways compute the same, but gather copies of the weights.
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    tower = model if model.config.get_text_config() is model.config else model.get_decoder()
    layers = _find_layers(model, tower)
    _give_buffers(model, device)
    runs = watch(layers)
    decoder = Decoder(model, tower, model.base_model, layers, device, trust_remote_code, fresh(model), runs)
    try:
        decoder = _with_form(decoder)
        of_kind = {layer: find_structure(decoder, layer) for layer in decoder.one_of_each_kind()}
        structures = [of_kind[first] for first in decoder.first_of_kind]
        return replace(decoder, structures=structures, tail_problem=_tail_problem(decoder))
    except ModelCodeError as error:
        raise SltaError(
            f"The layers of {decoder.name} cannot be run one at a time ({error}), as slta and featcal do: use "
            "'merge_method: actmat'."
        ) from error


def on_device(decoder: Decoder, device: torch.device | str) -> Decoder:
    """The decoder, its layers to run on a device."""
    if _numbered(device) == decoder.device:
        return decoder
    return trace(decoder.model.config, decoder.trust_remote_code, device)


def _numbered(device: torch.device | str) -> torch.device:
    """A device with its number: "cuda" is the current GPU, which may be another one in another thread."""
    return torch.empty(0, device=device).device


def refuse_unless_decoder(config: transformers.PretrainedConfig) -> None:
    """Refuse a model without a single stack of causal decoder layers, and say which method to use instead."""
    if not config.architectures:  # building the model will report it
        return
    architecture = config.architectures[0]
    if config.is_encoder_decoder or config.get_text_config().is_encoder_decoder:
        kind = "is an encoder-decoder"
    elif not architecture.endswith(WRITERS) and architecture not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        kind = "is not a decoder-only language model"
    else:
        return
    raise SltaError(f"{architecture} {kind}, which calibration does not cover: use 'merge_method: actmat'.")


def _find_layers(model: transformers.PreTrainedModel, tower: torch.nn.Module) -> torch.nn.ModuleList:
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in tower.modules() if isinstance(module, torch.nn.ModuleList)]
    if deep := [module for module in lists if len(module) == depth]:
        return deep[0]
    # Some configurations count attention layers; a decoder layer may have several of them.
    kinds = set(getattr(tower, "_no_split_modules", None) or ())
    if len(found := [module for module in lists if kinds.issuperset(type(layer).__name__ for layer in module)]) == 1:
        return found[0]
    raise SltaError(
        f"{type(model).__name__} has no single stack of decoder layers, so slta and featcal cannot run it: use "
        "'merge_method: actmat'."
    )


def _give_buffers(model: transformers.PreTrainedModel, device: torch.device) -> None:
    """Fill the buffers that no checkpoint holds (rotary frequencies and the like) from the configuration.

    accelerate's ``init_empty_weights`` would fill them too, but it makes every parameter on the host before it drops
    it: one fused tensor of a large mixture is more than the memory of many machines.
    """
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    # Another module than its owner may fill a buffer, so the whole model initializes; meta weights get no values.
    model.initialize_weights()
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(device)


# The form of the calls


def _with_form(decoder: Decoder) -> Decoder:
    """The decoder with its ``form``, and with the language tower alone if the model cannot run without images."""
    try:
        decoder = replace(decoder, form=_try_layers(decoder))
    except ModelCodeError as error:  # as where it is not given images
        if decoder.tower in (decoder.model, decoder.body):
            raise
        LOG.info("The language tower of %s runs without the rest: %s", decoder.name, error)
        return _with_form(replace(decoder, body=decoder.tower))
    return decoder if decoder.form.causal else _attending_causally(decoder)


def _attending_causally(decoder: Decoder) -> Decoder:
    """The decoder with the attention that is given a mask, if no token sees a later one by it; by torch's own some do.

    torch's own is given none for text alone. It then takes from a flag of the module whether it is causal, and where
    prompts may be seen as a whole beside images (PaliGemma's), that flag says no.
    """
    default = decoder.model.config._attn_implementation
    decoder.model.set_attn_implementation("eager")
    masked = replace(decoder, form=_try_layers(decoder))
    if masked.form.causal:
        return masked
    decoder.model.set_attn_implementation(default)
    return decoder


def _try_layers(decoder: Decoder) -> LayerForm:
    """Run the first layer of each type with made-up weights; two samples differ in the second of two tokens alone."""
    first, second, other = some_tokens(decoder)
    # Three samples of two tokens: the dimensions have different sizes.
    token_ids = torch.tensor([[first, second], [first, other], [second, other]])
    types = _types(decoder)
    of_type: dict[Any, Any] = {}
    state: dict[tuple[Any, ...], torch.Tensor] = {}

    def run(layer: int, hidden: torch.Tensor, call: LayerCall) -> Any:
        if types[layer] not in of_type:
            weights = random_numbers(decoder.layers[layer].state_dict(), decoder.device)
            run_once = decoder.run(layer, weights, hidden, call.with_state(state))
            of_type[types[layer]] = run_once.returned
            state.update(run_once.state)
        return of_type[types[layer]]

    hidden, _, handed = capture_calls(decoder, token_ids, made_up_edges(decoder), run)
    state.update(handed_on(of_type[types[0]], handed))
    if any(tensor.shape[:1] != token_ids.shape[:1] for tensor in state.values()):
        raise SltaError(
            f"The layers of {decoder.name} pass something to later layers that mixes prompts, so no level applies: "
            "use 'merge_method: actmat'."
        )
    shape = hidden.shape
    stacked = len(shape) == 4 and shape[:2] != token_ids.shape == shape[1:3]
    # Each layer's output for the first token of the two samples that share it; rounding may differ.
    pairs = [hidden_of(returned) for returned in of_type.values()]
    pairs = [(pair.movedim(0, 2) if stacked else pair)[:2, 0] for pair in pairs]
    return LayerForm(
        stacked=stacked,
        handed=handed,
        returned=[of_type[kind] for kind in types],
        state={path: tensor[:1] for path, tensor in state.items()},
        causal=all(bool((one - two).abs().max() <= CAUSAL_TOLERANCE * one.abs().max()) for one, two in pairs),
    )


def _types(decoder: Decoder) -> list[Any]:
    """The type of each layer: its modules and shapes, and its settings (a window, states to share)."""
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


def _tail_problem(decoder: Decoder) -> str | None:
    """Why the logits cannot be computed from the last layer's output alone, if they cannot."""
    if decoder.model.get_output_embeddings() is None:
        return None
    edges = made_up_edges(decoder)
    inputs, _ = embed(decoder, torch.zeros(1, 2, dtype=torch.int64), edges)
    try:
        given = head_input(decoder, inputs, {name: edges[name] for name in tail_tensors(decoder)})
        if not given.isnan().any():
            return None
        why = "it needs those of earlier layers too"
    except ModelCodeError as error:
        why = first_line(error.__cause__ or error)
    return (
        f"'level: model' does not apply to {decoder.name}: it cannot compute its logits from the output of its last "
        f"decoder layer alone ({why}). Use 'level: layer'."
    )


# Branches


@torch.no_grad()
def find_structure(decoder: Decoder, layer: int) -> LayerStructure:
    """How the layer splits into branches, in none where the trace does not show it."""
    trial = _Trial(decoder, layer)
    tokens = trial.base.output.shape[:2]
    of_some = (name for name, given in trial.base.inputs.items() if takes_some_tokens(name, given[0], tokens))
    split = LayerStructure(of_some_tokens=next(of_some, ""))
    try:
        split = _without_heads(trial, decoder, layer, split)
        if split.branches:
            split = replace(split, heads=find_heads(decoder, layer, split))
    except ModelCodeError as error:  # as where modules return other values than they do in the model
        level = logging.INFO if split.branches else logging.WARNING  # of heads their fallback tells
        LOG.log(level, "Layers like this one are not split further, because its trace fails: %s", error)
    return split


def _without_heads(trial: _Trial, decoder: Decoder, layer: int, whole: LayerStructure) -> LayerStructure:
    """What the layer makes of its children's outputs, added to ``whole``, and its branches."""
    reads = {node: trial.read_by(node) for node in (*trial.outputs, OUTPUT)}
    children = {child: reads[child] for child in trial.outputs}
    whole = replace(whole, reads=children, summands=trial.summands(reads[OUTPUT]))
    whole = replace(whole, writers=trial.writers(whole))
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
        self.base = self._run(self._weights, {}, capture=modules, keep=modules)
        self.outputs = {name: output for name, output in self.base.outputs.items() if "." not in name}
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
        constants, zeros = [], tree_map_only(torch.Tensor, torch.zeros_like, self._given)
        replayed = self._run(self._others, self._given).output
        for weights, whole in ((self._weights, self.base.output), (self._others, replayed)):
            given = {name: value for name, value in self._given.items() if name in sources}  # in the order of the calls
            terms = {name: self._run(weights, {**zeros, name: value}).output for name, value in given.items()}
            if not terms or not close(sum(terms.values()), whole):
                return None
            factors = {name: ratio(term, hidden_of(given[name])) for name, term in terms.items()}
            constants.append({name: factor / factors.get(INPUT, 1.0) for name, factor in factors.items()})
        first, second = constants
        same = all(math.isclose(factor, second[name], rel_tol=1e-4) for name, factor in first.items())
        return first if same else None

    def writers(self, split: LayerStructure) -> dict[str, Writer]:
        """The ``LayerStructure.writers``, from the layer's other fields: what multiplies an output with any weights."""
        if self._hidden.ndim != 3 or split.summands is None:
            return {}
        modules = list(self.base.inputs)
        runs = self.base, self._run(self._others, {}, keep=modules)
        before = all_before(split.reads)
        sources = [INPUT, *(child for child in split.reads if child in split.summands)]  # in the order of the calls

        def factor(child: str, module: str) -> float:
            """What the output of a module in a child is multiplied by to be the child's; nan for no constant."""
            outputs = [hidden_of(run.outputs[child]) for run in runs]
            first, second = (ratio(output, run.outputs.get(module)) for output, run in zip(outputs, runs, strict=True))
            same = outputs[0].shape == self._hidden.shape and math.isclose(first, second, rel_tol=1e-4)
            return first if same else math.nan

        last = {module.partition(".")[0]: module for module in modules}  # by child, the last that it calls
        writers = {}
        for place, child in enumerate(sources[1:], 1):
            known = sources[:place], sources[place + 1 :]
            complete = {*sources} == split.summands.keys() and all(child in before[later] for later in known[1])
            giver = self._given_to_norm(child, split.reads)
            if not complete or (module := last.get(giver or child)) is None:
                continue
            constant = factor(giver or child, module)
            if math.isfinite(constant):
                written = split.summands[child] * (1.0 if giver else constant)
                earlier = {source: split.summands[source] for source in known[0]}
                writers[module] = Writer(written, earlier, child if giver else None)
        return writers

    def _given_to_norm(self, child: str, reads: Mapping[str, Nodes]) -> str | None:
        """The child whose output alone a child reads, right after it, if it multiplies it by no more than a vector."""
        previous = dict(zip([*reads][1:], reads, strict=False)).get(child)
        tensors = [tensor for name, tensor in self._weights.items() if name.partition(".")[0] == child]
        same = getattr(self.outputs[child], "shape", None) == self._hidden.shape and child not in self.base.repeated
        return previous if same and reads[child] == {previous} and all(t.ndim < 2 for t in tensors) else None

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

        return all(not changes(branch, self._weights) and changes(branch, self._others) for branch in split.branches)


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


def _equal(one: Any, two: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=True)
    return all(a is b or not isinstance(a, torch.Tensor) or torch.equal(a, b) for a, b in pairs)


def _other(values: Any) -> Any:
    """Other values, which are no multiples of the given ones; of indices the first two, whatever there is to choose."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cos() if tensor.is_floating_point() else (tensor == 0).to(tensor.dtype)

    return tree_map_only(torch.Tensor, other, values)


# Heads


@torch.enable_grad()
def find_heads(decoder: Decoder, layer: int, split: LayerStructure) -> Heads | str:
    """The heads of a layer's attention, or why there are none to be told apart.

    Raises:
        ModelCodeError: the model's own code fails when its norms return what they are given.
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
    maps = {m.name: m for m in linear_maps(decoder.layers[layer]) if m.name.startswith(mixer + ".")}
    made_up = made_up_layer(decoder, layer)
    outputs = decoder.run(layer, *made_up, keep={m.module for m in maps.values()}).outputs
    projected = {name: value.clone().requires_grad_() for name, value in outputs.items() if "." in name}
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
    count = getattr(decoder.model.config.get_text_config(), "num_attention_heads", None)
    if count is None:
        return INSEPARABLE
    if features.shape[-1] % count:
        return f"its attention does not split into {count} heads of one size"
    rows = {name: torch.zeros(value.shape[-1], count, dtype=torch.bool) for name, value in projected.items()}
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
    return any(bool(gradient.flatten(0, -2)[:-1].any()) for gradient in gradients if gradient is not None)
