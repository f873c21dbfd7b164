"""Trace a model once: build it without weights, and run its layers with made-up weights to see how they work.

Nothing here knows an architecture by name.

- What a layer returns besides hidden states shows in one run of a layer of each kind (``LayerForm``).
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
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

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
    fresh,
    hidden_of,
    watch,
)
from mergekit_slta.layers.maps import Heads, linear_maps, takes_some_tokens
from mergekit_slta.models.checkpoint import Tensors
from mergekit_slta.models.headers import config_entry
from mergekit_slta.models.layout import meta_model

LOG = logging.getLogger(__name__)
Found = TypeVar("Found")

# The ends of the names of classes that make text from text; the last one's may take more than text.
ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
OUTPUT = "<output>"  # the node of the graph of a layer's children that is its output
MIXING_TOLERANCE = 1e-4  # of the largest number: by how much features differ where a module has seen another token
CAUSAL_TOLERANCE = 1e-3  # how much rounding may change a token's hidden state, relative to the largest value
INSEPARABLE = "its heads cannot be told apart by its linear maps"


def trace(
    config: transformers.PretrainedConfig,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    built: transformers.PreTrainedModel | None = None,  # the model on the meta device, if it is there; it is changed
) -> Decoder:
    """Find out how a model calls its decoder layers, and what these return; an SltaError if it is no decoder."""
    architecture = (config.architectures or ("",))[0]  # without one, building the model reports it
    is_one = architecture.endswith(ENDINGS) or architecture in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    encodes = config.is_encoder_decoder or config.get_text_config().is_encoder_decoder
    if architecture and (encodes or not is_one):
        kind = "is an encoder-decoder" if encodes else "is not a decoder-only language model"
        raise SltaError(f"{architecture} {kind}, which calibration does not cover: use 'merge_method: actmat'.")
    model = built or meta_model(config, trust_remote_code)
    # Attention stays the architecture's default, torch's own for most. See ``_with_form`` and ``few_queries``.
    # One expert of a mixture after the other: the other ways compute the same, but gather copies of the weights.
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    tower = model if model.config.get_text_config() is model.config else model.get_decoder()
    layers = _find_layers(model, tower)
    _fill_buffers(model)
    runs = watch(layers)  # before the state to which the model returns is taken
    decoder = Decoder(model, tower, model.base_model, layers, torch.device("cpu"), fresh(model), runs)
    try:
        return on_device(_with_form(decoder), device)
    except ModelCodeError as error:
        fix = "as slta and featcal do: use 'merge_method: actmat'"
        raise SltaError(f"The layers of {decoder.name} cannot be run one at a time ({error}), {fix}.") from error


def on_device(decoder: Decoder, device: torch.device | str) -> Decoder:
    """The decoder, from now on with its layers to run on a device."""
    device = torch.empty(0, device=device).device  # with its number, which may be another one in another thread
    if device == decoder.device:
        return decoder

    def place(values: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)

    decoder.restore()
    for owner in decoder.model.modules():
        owner._buffers.update(place({name: owner._buffers[name] for name in owner._non_persistent_buffers_set}))
    form = decoder.form
    decoder.form = replace(form, returned=place(form.returned), state=place(form.state))
    decoder.device, decoder.restore = device, fresh(decoder.model)
    return decoder


def _find_layers(model: transformers.PreTrainedModel, tower: torch.nn.Module) -> torch.nn.ModuleList:
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in tower.modules() if isinstance(module, torch.nn.ModuleList)]
    if deep := [module for module in lists if len(module) == depth]:
        return deep[0]
    # Some configurations count attention layers; a decoder layer may have several of them.
    kinds = set(getattr(tower, "_no_split_modules", None) or ())
    if len(of_kinds := [module for module in lists if kinds.issuperset(type(layer).__name__ for layer in module)]) == 1:
        return of_kinds[0]
    fix = "so slta and featcal cannot run it: use 'merge_method: actmat'"
    raise SltaError(f"{type(model).__name__} has no single stack of decoder layers, {fix}.")


def _fill_buffers(model: transformers.PreTrainedModel) -> None:
    """Fill the buffers that no checkpoint holds (rotary frequencies and the like) from the configuration.

    accelerate's ``init_empty_weights`` would fill them too, but it makes every parameter on the host before it drops
    it: one fused tensor of a large mixture is more than the memory of many machines.
    """
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    # Another module than its owner may fill a buffer, so the whole model initializes; meta weights get no values.
    model.initialize_weights()


# The form of the calls


def _with_form(decoder: Decoder) -> Decoder:
    """The decoder with its ``form``, and with the language tower alone if the model cannot run without images.

    Torch's own attention is given no mask for text alone. It then takes from a flag of the module whether it is causal,
    and where prompts may be seen as a whole beside images (PaliGemma's), that flag says no. If no token sees a later
    one by the attention that is given a mask, it takes the place of torch's own.
    """
    try:
        decoder.form = _try_layers(decoder)
    except ModelCodeError as error:  # as where it is not given images
        if decoder.tower in (decoder.model, decoder.body):
            raise
        LOG.info("The language tower of %s runs without the rest: %s", decoder.name, error)
        return _with_form(replace(decoder, body=decoder.tower))
    if not decoder.form.causal:
        default = decoder.model.config._attn_implementation
        decoder.model.set_attn_implementation("eager")
        if (masked := _try_layers(decoder)).causal:
            decoder.form = masked
        else:
            decoder.model.set_attn_implementation(default)
    return decoder


def _try_layers(decoder: Decoder) -> LayerForm:
    """Run the first layer of each kind with made-up weights; two samples differ in the second of two tokens alone."""
    first, second, other = some_tokens(decoder)
    # Three samples of two tokens: the dimensions have different sizes.
    token_ids = torch.tensor([[first, second], [first, other], [second, other]])
    of_kind: dict[int, Any] = {}
    state: dict[tuple[Any, ...], torch.Tensor] = {}
    readers: list[int] = []  # the first layer whose output depends on what earlier ones have put into a dictionary

    def run(layer: int, hidden: torch.Tensor, call: LayerCall) -> Any:
        if (kind := decoder.first_of_kind[layer]) not in of_kind:
            tensors = random_numbers(decoder.layers[layer].state_dict(), decoder.device)
            run_once = decoder.run(layer, tensors, hidden, call.with_state(state))
            of_kind[kind] = run_once.returned
            if state and not readers and _differs_from(run_once, decoder, layer, tensors, hidden, call):
                readers.append(layer)
            state.update(run_once.state)
        return of_kind[kind]

    hidden, _, handed = capture_calls(decoder, token_ids, made_up_edges(decoder), run)
    if not readers:  # as of most Gemma 4 models
        state.clear()
    state.update({(argument,): of_kind[0][position] for argument, position in handed.items()})
    if any(tensor.shape[:1] != token_ids.shape[:1] for tensor in state.values()):
        fix = "so no level applies: use 'merge_method: actmat'"
        raise SltaError(f"The layers of {decoder.name} pass something to later layers that mixes prompts, {fix}.")
    shape = hidden.shape
    stacked = len(shape) == 4 and shape[:2] != token_ids.shape == shape[1:3]
    # Each layer's output for the first token of the two samples that share it; rounding may differ.
    pairs = [hidden_of(returned) for returned in of_kind.values()]
    pairs = [(pair.movedim(0, 2) if stacked else pair)[:2, 0] for pair in pairs]
    return LayerForm(
        stacked=stacked,
        handed=handed,
        returned=[of_kind[kind] for kind in decoder.first_of_kind],
        state={path: tensor[:1] for path, tensor in state.items()},
        causal=all(bool((one - two).abs().max() <= CAUSAL_TOLERANCE * one.abs().max()) for one, two in pairs),
    )


def _differs_from(run_once: LayerRun, decoder: Decoder, *given: Any) -> bool:
    """Whether a layer that is given nothing of earlier layers fails, or returns something else than in another run."""
    try:
        alone = decoder.run(*given)
    except ModelCodeError:
        return True
    return not torch.equal(hidden_of(alone.returned), hidden_of(run_once.returned))


def tail_problem(decoder: Decoder) -> str | None:
    """Why the logits cannot be computed from the last layer's output alone, if they cannot."""
    if decoder.model.get_output_embeddings() is None:
        return None
    edges = made_up_edges(decoder)
    hidden, _ = embed(decoder, torch.zeros(1, 2, dtype=torch.int64), edges)
    try:
        of_head = head_input(decoder, hidden, {name: edges[name] for name in decoder.tail_tensors})
        if not of_head.isnan().any():
            return None
        why = "it needs those of earlier layers too"
    except ModelCodeError as error:
        why = first_line(error.__cause__ or error)
    problem = f"it cannot compute its logits from the output of its last decoder layer alone ({why})"
    return f"'level: model' does not apply to {decoder.name}: {problem}. Use 'level: layer'."


# What a layer makes of its children's outputs


def of_each_layer(decoder: Decoder, find: Callable[[Decoder, int], Found]) -> tuple[Found, ...]:
    """What ``find`` says of each layer; layers of the same kind are traced once, on the CPU: it is deterministic."""
    if find not in decoder.found:
        device = decoder.device
        on_device(decoder, "cpu")
        try:
            of_kind = {layer: find(decoder, layer) for layer in decoder.one_of_each_kind}
        finally:
            on_device(decoder, device)
        decoder.found[find] = tuple(of_kind[first] for first in decoder.first_of_kind)
    return decoder.found[find]


@torch.no_grad()
def find_writers(decoder: Decoder, layer: int) -> dict[str, Writer]:
    """The layer's writers by their paths, if its trace shows them; of those that write side by side, the last."""
    try:
        trial = _Trial(decoder, layer)
        reads = trial.reads()
        return trial.writers(reads, trial.summands(reads[OUTPUT]) or {})
    except ModelCodeError as error:  # as where modules return other values than they do in the model
        LOG.info("What layers like layer %d add to the residual stream is not known: %s", layer, error)
        return {}


@torch.no_grad()
def find_structure(decoder: Decoder, layer: int) -> LayerStructure:
    """What the layer makes of its children's outputs, and how it splits into branches, if its trace shows it."""
    structure = LayerStructure()
    try:
        trial = _Trial(decoder, layer)
        tokens = trial.base.output.shape[:2]
        of_some = (name for name, inputs in trial.base.inputs.items() if takes_some_tokens(name, inputs[0], tokens))
        structure = LayerStructure(of_some_tokens=next(of_some, ""))
        reads = trial.reads()
        whole = replace(structure, summands=trial.summands(reads[OUTPUT]))
        split = trial.split(reads, whole)
        structure = split if trial.confirms(split) else whole
    except ModelCodeError as error:
        LOG.warning("Layers like this one are not split further, because its trace fails: %s", error)
    return structure


class _Trial:
    """A layer with made-up weights, its input and the outputs of its children, which can be changed."""

    def __init__(self, decoder: Decoder, layer: int) -> None:
        self._decoder, self._layer = decoder, layer
        self._tensors, self._hidden, self._call = made_up_layer(decoder, layer)
        self._other_tensors = random_numbers(decoder.layers[layer].state_dict(), decoder.device, seed=1)
        modules = [one.module for one in linear_maps(decoder.layers[layer]) if one.mixture_expert is None]
        self.base = self._run(self._tensors, {}, inputs_of=modules, outputs_of=modules)
        self.outputs = {name: output for name, output in self.base.outputs.items() if "." not in name}
        self._values = {INPUT: self._hidden, **self.outputs}

    def _run(self, tensors: Tensors, values: Mapping[str, Any], **settings: Any) -> LayerRun:
        """Run the layer; the children whose outputs are not given compute them."""
        hidden = values.get(INPUT, self._hidden)
        return self._decoder.run(self._layer, tensors, hidden, self._call, replay=values, **settings)

    def reads(self) -> dict[str, Nodes]:
        """By child, in the order of the calls, what its arguments are made from; last, what ``OUTPUT`` is made from.

        These are the outputs of other children, and ``INPUT``.
        """
        reads = {}
        for node in (*self.outputs, OUTPUT):
            made = {}
            for name in (INPUT, *self.outputs, None):
                values = {**self._values, name: _other(self._values[name])} if name else self._values
                run = self._run(self._tensors, values, until=node)
                made[name] = run.inputs.get(node, run.output)
            reads[node] = frozenset(name for name in self._values if not _equal(made[name], made[None]))
        return reads

    def summands(self, sources: Collection[str]) -> dict[str, float] | None:
        """The constants of ``LayerStructure.summands``."""
        constants, zeros = [], tree_map_only(torch.Tensor, torch.zeros_like, self._values)
        replayed = self._run(self._other_tensors, self._values).output
        for tensors, whole in ((self._tensors, self.base.output), (self._other_tensors, replayed)):
            # In the order of the calls.
            values = {name: value for name, value in self._values.items() if name in sources}
            terms = {name: self._run(tensors, {**zeros, name: value}).output for name, value in values.items()}
            if not terms or not close(sum(terms.values()), whole):
                return None
            factors = {name: ratio(term, hidden_of(values[name])) for name, term in terms.items()}
            constants.append({name: factor / factors.get(INPUT, 1.0) for name, factor in factors.items()})
        first, second = constants
        same = all(math.isclose(factor, second[name], rel_tol=1e-4) for name, factor in first.items())
        return first if same else None

    def writers(self, reads: Mapping[str, Nodes], summands: Mapping[str, float]) -> dict[str, Writer]:
        """The writers, from the ``summands``: what multiplies an output with any weights."""
        modules, before = list(self.base.inputs), ancestors(reads)
        sources = [INPUT, *(child for child in self.outputs if child in summands)]  # in the order of the calls
        if self._hidden.ndim != 3 or {*sources} != summands.keys():
            return {}
        runs = self.base, self._run(self._other_tensors, {}, outputs_of=modules)
        last = {module.partition(".")[0]: module for module in modules}  # by child, the last that it calls
        writers = {}
        for place, child in enumerate(sources[1:], 1):
            if not all(child in before[later] for later in sources[place + 1 :]):
                continue
            norm = child if (giver := self._given_to_norm(child, reads)) else None
            child = giver or child
            if (module := last.get(child)) is None:
                continue
            outputs = [(hidden_of(run.outputs[child]), run.outputs.get(module)) for run in runs]
            first, second = (ratio(*pair) for pair in outputs)  # nan where there is no constant
            if outputs[0][0].shape == self._hidden.shape and math.isclose(first, second, rel_tol=1e-4):
                factor = summands[norm] if norm else summands[child] * first
                writers[module] = Writer(factor, {source: summands[source] for source in sources[:place]}, norm)
        return writers

    def _given_to_norm(self, child: str, reads: Mapping[str, Nodes]) -> str | None:
        """The child whose output alone a child reads, right after it, if it multiplies it by no more than a vector."""
        previous = dict(zip([*self.outputs][1:], self.outputs, strict=False)).get(child)
        tensors = [tensor for name, tensor in self._tensors.items() if name.partition(".")[0] == child]
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
        """Whether the layer's input reaches its output only through the hidden states that a child returns."""
        value = self.outputs[child]
        if isinstance(value, (tuple, list)):
            value = type(value)([value[0], *_other(value[1:])])
        return _equal(self._run(self._tensors, {INPUT: _other(self._hidden), child: value}).output, self.base.output)

    def confirms(self, split: LayerStructure) -> bool:
        """Whether a branch alone makes of the layer what all together do, and another thing with other weights."""
        for branch in split.branches:
            for tensors, others in ((self._tensors, False), (self._other_tensors, True)):
                run = self._run(tensors, split.others_of(branch, self.base))
                if bool(split.change(branch, run, self.base).any()) != others:
                    return False
        return True

    def split(self, reads: Mapping[str, Nodes], whole: LayerStructure) -> LayerStructure:
        """Sort the children that the output depends on; ``whole`` where attention and MLP cannot be told apart.

        What the residual stream holds after the first children that mix tokens is either a sum with what it held
        before, which the MLP branch reads and adds to, or the output of a child through which everything goes (a norm
        of the sum).
        """
        decoder, layer = self._decoder, self._layer
        owners = frozenset(key.partition(".")[0] for key in decoder.layer_tensors[layer])
        # Only one call of a child is known, and none where the layer calls the child's parts one by one; a module that
        # layers share may work differently in each of them.
        unknown = (self.base.repeated | self.base.opened - self.outputs.keys()) & owners
        if unknown or decoder.shared_tensors & {*decoder.layer_tensors[layer].values()}:
            return whole
        before = ancestors(reads)
        live = before[OUTPUT] - {INPUT, OUTPUT}
        mixed = {node for node in live if self.has_mixed(node)}
        first = {node for node in mixed if not before[node] & mixed - {node}}
        leading = set().union(*(before[node] for node in first)) - {INPUT}
        after = {node for node in reads if before[node] & first}
        # A child that the whole layer goes through, and after which nothing is left, ends both branches.
        closing = live & after if INPUT not in reads[OUTPUT] else set()
        ends = [node for node in self.outputs if node in closing and first <= before[node] and live - before[node]]
        boundary = next(filter(self.is_gate, ends), None)
        if boundary is not None:
            attention = before[boundary] - {INPUT}
        elif first:
            earlier = leading - first | {INPUT}
            merged = {node for node in after if reads[node] & after and reads[node] & earlier}
            if OUTPUT not in merged:
                return whole
            attention = leading | {node for node in live & after if not before[node] & merged}
        else:
            attention = set()
        mlp = live - attention
        mlp |= set().union(*(before[node] for node in mlp - after)) - {INPUT}  # what is parallel to the attention
        # Children whose tensors the layer uses by itself, or never, and its own tensors, are in both.
        unseen = owners - attention - mlp | owners & self.base.opened
        parts = {"attn": attention, "mlp": mlp}
        branches = {branch: frozenset(part | unseen) for branch, part in parts.items() if part & owners}
        boundary = boundary if len(branches) > 1 else None
        return replace(whole, branches=branches, mixers=frozenset(first), boundary=boundary)


def ancestors(reads: Mapping[str, Nodes]) -> dict[str, set[str]]:
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
    factor = (product * output).sum() / output.square().sum()
    return float(factor) if factor and close(factor * output, product) else math.nan


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5 * float(two.abs().max()))


def _equal(one: Any, two: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=True)
    return all(a is b or not isinstance(a, torch.Tensor) or torch.equal(a, b) for a, b in pairs)


def _other(values: Any) -> Any:
    """Other values, which are no multiples of the given ones; of indices the first two, whatever there is to choose."""
    return tree_map_only(torch.Tensor, lambda t: t.cos() if t.is_floating_point() else (t == 0).to(t.dtype), values)


# Heads


@torch.enable_grad()
def find_heads(decoder: Decoder, layer: int) -> Heads | str:
    """The heads of a layer's attention, or why there are none to be told apart."""
    try:
        return _heads_of(decoder, layer, of_each_layer(decoder, find_structure)[layer].mixers)
    except ModelCodeError as error:  # the model's own code may fail when its norms return what they are given
        LOG.info("The heads of layers like layer %d are not known: %s", layer, error)
        return INSEPARABLE


def _heads_of(decoder: Decoder, layer: int, mixers: Nodes) -> Heads | str:
    kinds = {name: type(decoder.layers[layer].get_submodule(name)).__name__ for name in sorted(mixers)}
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
    outputs = decoder.run(layer, *made_up, outputs_of={m.module for m in maps.values()}).outputs
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
    # The last token's features depend on what the projections make of other tokens; those of an MLP after the attention
    # in the same module do not. Keys may also come from an earlier layer.
    last = features.flatten(0, -2)[-1].square().sum()
    seen = torch.autograd.grad(last, leaves, retain_graph=True, allow_unused=True)
    mixed = any(bool(gradient.flatten(0, -2)[:-1].any()) for gradient in seen if gradient is not None)
    count = config_entry(decoder.model.config.get_text_config(), "num_attention_heads")
    if count is None or not (mixed or decoder.form.state):
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
