"""Run one decoder layer at a time, with whichever weights, and see what each of its branches adds.

The layers are transformers' own modules on the meta device; the arguments that they are called with are captured from
the model's own forward pass. Nothing here knows an architecture by name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from torch.utils._pytree import tree_leaves, tree_map

from mergekit_slta.errors import SltaError, first_line
from mergekit_slta.layers.fresh import Fresh
from mergekit_slta.layers.residual import INPUT, ResidualStream, Term, plain, sources
from mergekit_slta.models.skeleton import meta_model

Weights = Mapping[str, torch.Tensor]
# What layers have handed to later layers in a dictionary that the model gives to all of them: tensors [B, ...] by the
# argument that the dictionary is (its position or name), the key in it, and, for a tuple of tensors, the index.
State = Mapping[tuple[Any, ...], torch.Tensor]
Found = TypeVar("Found")

# Of the largest number: what rounding may change of a token's hidden state.
CAUSAL_TOLERANCE = 1e-3
PREFIX_TOLERANCE = 1e-5
# So many different ones a random tensor has, a number without small divisors.
RANDOM_NUMBERS = 1_000_003


@dataclass(frozen=True)
class LayerCall:
    """How the model's forward pass called one layer: everything but the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def own(self, state: State) -> LayerCall:
        """The same call with dictionaries of its own, in which ``state`` is entered."""
        arguments = self._arguments()
        for argument, value in arguments.items():
            if isinstance(value, MutableMapping):
                arguments[argument] = copy.copy(value)
        for path in sorted(state, key=lambda path: path[2:]):
            argument, key, *index = path
            before = arguments[argument].get(key, ())[: index[0]] if index else ()
            arguments[argument][key] = (*before, state[path]) if index else state[path]
        args = tuple(arguments.pop(position) for position in range(len(self.args)))
        return LayerCall(args, arguments)

    def entered(self, before: LayerCall) -> State:
        """What the layer has entered into the dictionaries of its call, which was ``before``.

        Raises:
            SltaError: it is neither a tensor nor a tuple of tensors.
        """
        found: dict[tuple[Any, ...], torch.Tensor] = {}
        earlier = before._arguments()
        for argument, value in self._arguments().items():
            if not isinstance(value, MutableMapping):
                continue
            for key, entry in value.items():
                if key in earlier[argument] and earlier[argument][key] is entry:
                    continue
                parts: dict[tuple[Any, ...], Any] = {(argument, key): entry}
                if isinstance(entry, tuple):
                    parts = {(argument, key, index): part for index, part in enumerate(entry)}
                for path, part in parts.items():
                    if not isinstance(part, torch.Tensor):
                        raise SltaError(
                            f"A layer hands a {type(part).__name__} to later layers, in '{argument}', which cannot be "
                            "kept between layers: use 'merge_method: sftm'."
                        )
                    found[path] = plain(part)
        return found

    def _arguments(self) -> dict[Any, Any]:
        return dict(enumerate(self.args)) | self.kwargs


# Makes what a layer returns of its index, its hidden states and its call.
LayerForward = Callable[[int, torch.Tensor, LayerCall], Any]


@dataclass(frozen=True)
class LayerStructure:
    """How a decoder layer splits into an attention (or other token mixing) and an MLP branch.

    Attributes:
        branches: the direct children of the layer in each branch, ``attn`` and ``mlp``, norms included; a child that
            feeds both stands in both.
        mlp_reads: the children whose outputs the residual stream holds where the MLP branch reads it.
        mixer: the child in the attention branch that lets tokens see each other.
    """

    branches: dict[str, frozenset[str]]
    mlp_reads: frozenset[str]
    mixer: str


@dataclass
class LayerRun:
    """What one run of a layer on a batch gave; hidden states are [B, S, D].

    Attributes:
        output: the layer's output.
        terms: the summands of the output by the child that made them, without the input; None where the layer does
            not keep its residual stream as a sum.
        outputs: each direct child's output, and in a trace those of the modules that were asked for.
        reads: the sources of the residual stream that each child was given.
        mixers: the children that let tokens see each other.
        mlp_input: the residual stream that the MLP branch read.
        inputs: what the modules that were asked for were called with, in the order of the calls.
        changed: the modules that were asked for whose outputs others changed in place.
        state: what the layer hands to later layers.
    """

    output: torch.Tensor
    terms: dict[str, torch.Tensor] | None
    outputs: dict[str, Any]
    reads: dict[str, frozenset[str]]
    mixers: frozenset[str]
    mlp_input: torch.Tensor | None
    inputs: dict[str, tuple[Any, ...]]
    changed: frozenset[str]
    state: State


@dataclass(frozen=True)
class Passage:
    """What a run of a layer up to some module gave.

    Attributes:
        inputs: what the modules that were asked for were called with, and what that module would have been.
        outputs: the outputs of the layer's direct children and of the modules that were asked for.
        output: [B, S, D], the layer's output, for a run to the end.
        state: what the layer hands to later layers, as far as it ran.
    """

    inputs: dict[str, tuple[Any, ...]]
    outputs: dict[str, Any]
    output: torch.Tensor | None
    state: State


@dataclass
class _Run:
    """The run that the wrapped modules of a layer report to."""

    mlp_reads: frozenset[str] | None = None
    mlp_input: torch.Tensor | None = None
    replay: Mapping[str, Any] = field(default_factory=dict)
    capture: Collection[str] = ()
    keep: Collection[str] = ()
    copy: Collection[str] = ()
    until: str | None = None
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    mixers: set[str] = field(default_factory=set)
    versions: dict[str, int] = field(default_factory=dict)
    read_by_mlp: torch.Tensor | None = None
    state: State = field(default_factory=dict)

    @property
    def changed(self) -> frozenset[str]:
        return frozenset(name for name, version in self.versions.items() if self.outputs[name]._version != version)

    def leave(self, name: str, output: Any) -> Any:
        """Note what a module below a child returns; what goes on may be a copy, for others to change."""
        if name in self.keep:
            self.outputs[name] = output
            if isinstance(output, torch.Tensor):
                self.versions[name] = output._version
        return output.clone() if name in self.copy else output

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a module is called with, and go no further if that was all that is wanted."""
        if name in self.capture or name == self.until:
            self.inputs[name] = tuple(map(plain, (*args, *kwargs.values())))
        if name == self.until:
            raise _Reached(self.inputs[name])


@dataclass(frozen=True)
class _Probe:
    """What a model does to tokens, by trial.

    Attributes:
        causal: whether no token sees a later one.
        state: what layers hand to later layers, for one sample of two tokens.
    """

    causal: bool
    state: State


class _Reached(Exception):
    """A layer has come to the module that it was to run up to; unlike other exceptions no failure."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs


class Decoder:
    """The decoder of one architecture, without weights.

    Args:
        config: the base model's configuration.
        trust_remote_code: mergekit's flag of that name.
        device: where layers run.

    Raises:
        SltaError: the model is no decoder-only language model, or its layers cannot be found.
    """

    def __init__(
        self, config: transformers.PretrainedConfig, trust_remote_code: bool = False, device: str = "cpu"
    ) -> None:
        refuse_unless_decoder(config)
        self.device = torch.device(device)
        self.model = meta_model(config, trust_remote_code)
        self.body = self.model.base_model
        self._body_path = _path_in_model(self.model, self.body)
        self.layers, self.layers_path = _find_layers(self.model, config)
        self._give_buffers()
        self._found: dict[Hashable, Any] = {}
        self._run: _Run | None = None
        for layer in self.layers:
            self._watch(layer)
        self._fresh = Fresh(self.model)

    def __len__(self) -> int:
        return len(self.layers)

    def to(self, device: torch.device | str) -> Decoder:
        """Run layers on another device from now on; what was found out by running them is found anew there."""
        if torch.device(device) != self.device:
            self._fresh.restore()
            self.device = torch.device(device)
            for module in self.model.modules():
                for name in module._non_persistent_buffers_set & module._buffers.keys():
                    if (buffer := module._buffers[name]) is not None:
                        module._buffers[name] = buffer.to(self.device)
            self._fresh = Fresh(self.model)
            self._found.clear()
            for found in ("_returned", "_probe"):
                self.__dict__.pop(found, None)
        return self

    @property
    def base_model_prefix(self) -> str:
        return self.model.base_model_prefix

    @functools.cached_property
    def tensor_names(self) -> frozenset[str]:
        """The model's names of all its tensors."""
        return frozenset(self.model.state_dict())

    def layer_tensors(self, layer: int) -> dict[str, str]:
        """The names of a layer's tensors inside the layer, and in the model."""
        return {name: f"{self.layers_path}.{layer}.{name}" for name in self.layers[layer].state_dict()}

    def edge_tensors(self) -> list[str]:
        """The model's names of the tensors outside the decoder layers (embeddings, final norm, output head).

        Tied tensors are named once: what is given for one counts for all.
        """
        tied = set(self.model.state_dict()) & set(dict(self.model.named_parameters(remove_duplicate=False)))
        tied -= set(dict(self.model.named_parameters()))
        return [
            name for name in self.model.state_dict() if not name.startswith(self.layers_path + ".") and name not in tied
        ]

    def embedding_tensors(self) -> list[str]:
        """The model's names of the edge tensors that the body of the model has, which is all but the output head."""
        return [name for name in self.edge_tensors() if name.startswith(self._body_path)]

    def tail_tensors(self) -> list[str]:
        """The model's names of the edge tensors that ``head_input`` needs: all but the embedding and the head."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        left_out = {id(embedding.weight), *(id(tensor) for tensor in head.parameters())}
        state = self.model.state_dict(keep_vars=True)
        return [name for name in self.edge_tensors() if id(state[name]) not in left_out]

    def embed(self, token_ids: torch.Tensor, edges: Weights) -> tuple[torch.Tensor, list[LayerCall]]:
        """Run everything before the first layer, and capture how the model calls each layer.

        Right padding needs no mask where ``padding_matters`` denies it.

        Args:
            token_ids: [B, S] int64.
            edges: tensors outside the layers, by the model's names.

        Returns:
            The first layer's input [B, S, D] and one call per layer.
        """
        inputs: list[torch.Tensor] = []
        calls: list[LayerCall] = []
        weights = {name.removeprefix(self._body_path): edges[name] for name in self.embedding_tensors()}
        handed: list[torch.Tensor] = []
        returned = self._returned

        def hand_on(layer: int, hidden: torch.Tensor, call: LayerCall) -> Any:
            inputs.append(hidden.as_subclass(torch.Tensor))
            calls.append(call)
            if not handed:  # values that show any change of them
                handed.append(torch.arange(1.0, hidden.numel() + 1, device=self.device).view(hidden.shape))
            return _returned_like(returned[layer], handed[0])

        self._run_body(token_ids, weights, hand_on)
        if len(calls) != len(self.layers):
            raise SltaError(
                f"{type(self.model).__name__} does not call its decoder layers one after the other "
                f"({len(calls)} calls for {len(self.layers)} layers); it can be merged with 'merge_method: sftm'."
            )
        if inputs[0].ndim != 3:
            raise SltaError(
                f"{type(self.model).__name__} hands its decoder layers more than one hidden state per token; it can be "
                "merged with 'merge_method: sftm'."
            )
        if inputs[0].shape[:2] != token_ids.shape:
            raise SltaError(
                f"{type(self.model).__name__} hands its decoder layers other positions than the tokens', so no level "
                "applies to it; it can be merged with 'merge_method: sftm'."
            )
        if any(isinstance(leaf, _Made) for call in calls for leaf in tree_leaves((call.args, call.kwargs))):
            raise SltaError(
                f"{type(self.model).__name__} hands its decoder layers more of earlier layers than the hidden states, "
                "so no level applies to it; it can be merged with 'merge_method: sftm'."
            )
        if not all(torch.equal(given, handed[0]) for given in inputs[1:]):
            raise SltaError(
                f"{type(self.model).__name__} changes the hidden states between its decoder layers, so no level "
                "applies to it; it can be merged with 'merge_method: sftm'."
            )
        return inputs[0], calls

    def _run_body(self, token_ids: torch.Tensor, weights: Weights, layer: LayerForward) -> None:
        """Run the body of the model on tokens [B, S], with ``layer`` in place of its layers."""
        kwargs = {"input_ids": token_ids.to(self.device), "use_cache": False}
        self._fresh.restore()
        with _replaced(self.layers, layer), torch.no_grad():
            torch.func.functional_call(self.body, dict(weights), kwargs=kwargs)

    @functools.cached_property
    def _returned(self) -> list[Any]:
        """What each layer returns, be it the hidden states or more; one layer of each kind runs, on zeros."""
        found: dict[Hashable, Any] = {}

        def run(layer: int, hidden: torch.Tensor, call: LayerCall) -> Any:
            kind = self._kinds[layer]
            if kind not in found:
                weights = self._zeros(self.layers[layer].state_dict())
                found[kind] = torch.func.functional_call(
                    self.layers[layer], dict(weights), (hidden, *call.args), call.kwargs
                )
            return _returned_like(found[kind], hidden)

        state = self._zeros(self._edge_state())
        weights = {name.removeprefix(self._body_path): state[name] for name in self.embedding_tensors()}
        self._run_body(torch.zeros(1, 2, dtype=torch.int64), weights, run)
        return [found.get(kind) for kind in self._kinds]

    def logits(self, hidden: torch.Tensor, edges: Weights) -> torch.Tensor:
        """Run everything after the last layer on its output [B, S, D]; returns [B, S, V]."""
        return self._run_tail(hidden, edges).logits.as_subclass(torch.Tensor)

    def head_input(self, hidden: torch.Tensor, edges: Weights) -> torch.Tensor:
        """What the output head is given for the last layer's output [B, S, D]; returns [B, S, D].

        Args:
            hidden: [B, S, D].
            edges: the tensors that ``tail_tensors`` names.
        """
        head = self.model.get_output_embeddings()
        embedding: Any = self.model.get_input_embeddings()
        name = next(name for name, weight in self.model.named_parameters() if weight is embedding.weight)
        rows, columns = embedding.weight.shape
        edges = {**edges, name: torch.full((1, columns), torch.nan, device=self.device).expand(rows, columns)}

        def stop(states: torch.Tensor) -> torch.Tensor:
            raise _Reached((states,))

        head.forward = stop
        try:
            self._run_tail(hidden, edges)
        except _Reached as reached:
            found: torch.Tensor = reached.inputs[0].as_subclass(torch.Tensor)
        else:
            raise SltaError(f"{type(self.model).__name__} does not call its output head: set 'head: false'.")
        finally:
            del head.forward
        if found.isnan().any() and not hidden.isnan().any():
            raise SltaError(
                f"{type(self.model).__name__} computes its logits from more than the output of its last decoder layer: "
                "use 'level: layer', or 'head: false' for featcal."
            )
        return found

    @functools.cached_property
    def tail_problem(self) -> str | None:
        """Why the logits cannot be computed from the last layer's output alone."""
        if self.model.get_output_embeddings() is None:
            return None
        names = set(self.tail_tensors())
        edges = self._zeros({name: tensor for name, tensor in self._edge_state().items() if name in names})
        inputs, _ = self.embed(torch.zeros(1, 2, dtype=torch.int64), self._zeros(self._edge_state()))
        try:
            self.head_input(inputs, edges)
        except SltaError as error:
            return error.message
        except Exception as error:  # a model's own code may raise anything
            return (
                f"{type(self.model).__name__} cannot compute its logits from the output of its last decoder layer "
                f"({first_line(error)}): use 'level: layer', or 'head: false' for featcal."
            )
        return None

    def _run_tail(self, hidden: torch.Tensor, edges: Weights) -> Any:
        token_ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
        returned, last = self._returned, len(self.layers) - 1

        def output(layer: int, given: torch.Tensor, call: LayerCall) -> Any:
            return _returned_like(returned[layer], hidden if layer == last else torch.full_like(hidden, torch.nan))

        with _replaced(self.layers, output), torch.no_grad():
            return torch.func.functional_call(
                self.model, dict(edges), kwargs={"input_ids": token_ids, "use_cache": False}
            )

    def run(
        self,
        layer: int,
        weights: Weights,
        hidden: torch.Tensor,
        call: LayerCall,
        *,
        mlp_reads: frozenset[str] | None = None,
        mlp_input: torch.Tensor | None = None,
        replay: Mapping[str, Any] | None = None,
        capture: Collection[str] = (),
    ) -> LayerRun:
        """Run a layer on hidden states.

        Args:
            layer: the layer's index.
            weights: the layer's tensors by their names inside the layer.
            hidden: [B, S, D], the layer's input.
            call: the layer's other arguments.
            mlp_reads: what the residual stream holds where the MLP branch reads it; without it nobody looks there.
            mlp_input: [B, S, D], given to the MLP branch in place of the residual stream.
            replay: outputs of children that need not run again.
            capture: paths of the modules inside the layer whose inputs are wanted.
        """
        run = _Run(mlp_reads, mlp_input, replay or {}, capture)
        return self._run_layer(run, layer, weights, hidden, call)

    def _run_layer(self, run: _Run, layer: int, weights: Weights, hidden: torch.Tensor, call: LayerCall) -> LayerRun:
        result = self._call(run, layer, weights, hidden, call)
        terms = _summands(result)
        return LayerRun(
            plain(result),
            terms,
            run.outputs,
            run.reads,
            frozenset(run.mixers),
            run.read_by_mlp,
            run.inputs,
            run.changed,
            run.state,
        )

    def run_until(
        self,
        module: str | None,
        layer: int,
        weights: Weights,
        hidden: torch.Tensor,
        call: LayerCall,
        *,
        replay: Mapping[str, Any],
        capture: Collection[str] = (),
        keep: Collection[str] = (),
        copy: Collection[str] = (),
    ) -> Passage:
        """Run a layer on hidden states [B, S, D] until it calls a module, or to its end.

        Args:
            module: the path of the module inside the layer; None for a run to the end.
            layer, weights, hidden, call: as for ``run``.
            replay: outputs of modules that need not run again.
            capture, keep: paths of the modules whose inputs, or outputs, are wanted.
            copy: paths of the modules whose outputs others change in place.
        """
        run = _Run(replay=replay, capture=capture, keep=keep, copy=copy, until=module)
        output = None
        with contextlib.suppress(_Reached):
            output = plain(self._call(run, layer, weights, hidden, call))
        return Passage(run.inputs, run.outputs, output, run.state)

    def _call(self, run: _Run, layer: int, weights: Weights, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Call a layer's module on a residual stream, with everything in it reporting to ``run``."""
        own = call.own({})
        self._fresh.restore()
        self._run = run
        try:
            stream = ResidualStream.of(hidden, (Term(INPUT, hidden),))
            output = torch.func.functional_call(self.layers[layer], dict(weights), (stream, *own.args), own.kwargs)
        finally:
            self._run = None
            run.state = own.entered(call)
        return output[0] if isinstance(output, (tuple, list)) else output

    def trace(self, layer: int, watch: Collection[str] = ()) -> LayerRun:
        """Run a layer on two tokens with weights that are all zero, to see how its modules call each other.

        Args:
            layer: the layer's index.
            watch: paths of the modules inside the layer whose inputs and outputs are wanted.

        Raises:
            SltaError: the model's layers cannot be run one at a time.
        """
        with self._explained():
            return self._trace(layer, watch)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of whatever a model's own code raises that its layers cannot be run one at a time."""
        try:
            yield
        except SltaError:
            raise
        except Exception as error:
            raise SltaError(
                f"The layers of {type(self.model).__name__} cannot be run one at a time ({type(error).__name__}: "
                f"{error}); it can be merged with 'merge_method: sftm'."
            ) from error

    def _trace(self, layer: int, watch: Collection[str]) -> LayerRun:
        hidden, calls = self.embed(torch.zeros(1, 2, dtype=torch.int64), self._zeros(self._edge_state()))
        weights = self._zeros(self.layers[layer].state_dict())
        call = calls[layer]
        if any(isinstance(value, MutableMapping) for value in call._arguments().values()):
            call = call.own(self._probe.state)
        return self._run_layer(_Run(capture=watch, keep=watch), layer, weights, hidden, call)

    def padding_matters(self, lengths: Collection[int]) -> bool:
        """Whether samples of these lengths may get other features side by side, right-padded, than each one alone.

        They do where a token sees later ones, where rotary embeddings depend on the length, and, since nobody knows
        where the padding is in it, where layers hand more than hidden states to later layers.

        Raises:
            SltaError: the model's layers cannot be run one at a time.
        """
        ordered = sorted({max(length, 2) for length in lengths})  # of one token no position shows
        if len(set(lengths)) < 2 or len(ordered) < 2:
            return False
        with self._explained(), torch.no_grad():
            if not self._probe.causal or self._probe.state:
                return True
            # Where frequencies change with the length, they do so beyond some length: the second longest sample shows
            # whether the longest is there too, the shortest whether some are not.
            return any(self._length_matters(short, ordered[-1]) for short in {ordered[0], ordered[-2]})

    def _length_matters(self, short: int, long: int) -> bool:
        """Whether the calls of the layers differ where a short and a long sample have the same tokens."""
        key = Decoder._length_matters, short, long
        if key not in self._found:
            token_ids, edges = torch.zeros(1, long, dtype=torch.int64), self._random(self._edge_state())
            calls = [self.embed(token_ids[:, :length], edges)[1] for length in (short, long)]
            pairs = {(id(own), id(other)): (own, other) for own, other in _pairs(*calls)}
            self._found[key] = not all(_is_prefix(own, other) for own, other in pairs.values())
        found: bool = self._found[key]
        return found

    @functools.cached_property
    def _probe(self) -> _Probe:
        """Run a layer of each type with random weights on two samples that differ in the second of two tokens."""
        config = self.model.config.get_text_config()
        padding = getattr(config, "pad_token_id", None)  # by which some models count positions
        first, second, other = [token for token in range(4) if token != padding][:3]
        causal = True
        state: dict[tuple[Any, ...], torch.Tensor] = {}
        with torch.no_grad():
            hidden, calls = self.embed(
                torch.tensor([[first, second], [first, other]]), self._random(self._edge_state())
            )
            for layer in self._one_of_each_type():
                weights = self._random(self.layers[layer].state_dict())
                run = self._run_layer(_Run(), layer, weights, hidden, calls[layer].own(state))
                one, two = run.output[:, 0]
                causal = causal and bool((one - two).abs().max() <= CAUSAL_TOLERANCE * one.abs().max())
                state |= run.state
        return _Probe(causal, {path: tensor[:1] for path, tensor in state.items()})

    def _one_of_each_type(self) -> list[int]:
        """The first layer of each kind and of each choice among what that kind can do (a window, states to share)."""
        types = getattr(self.model.config.get_text_config(), "layer_types", None) or [None] * len(self)
        keys = [
            (kind, types[layer], tuple(_choices(module) for module in self.layers[layer].modules()))
            for layer, kind in enumerate(self._kinds)
        ]
        return sorted({key: layer for layer, key in reversed(list(enumerate(keys)))}.values())

    def _random(self, state: Weights) -> Weights:
        """Random numbers in place of tensors; most overlap, so that they take little memory."""
        generator = torch.Generator().manual_seed(0)

        def numbers(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
            *stacked, rows, columns = (1, 1, *tensor.shape)
            # A mixture's product wants its matrices in rows that do not overlap, and strides of 64 bytes.
            strides = [16] * len(stacked) + [columns if tensor.ndim > 2 else 1, 1]
            size = 1 + sum(
                stride * (length - 1) for stride, length in zip(strides, (*stacked, rows, columns), strict=True)
            )
            found = torch.randn(min(size, RANDOM_NUMBERS), generator=generator)
            found = found / columns**0.5 if tensor.ndim > 1 else 1 + found / 10
            found = found.repeat(-(-size // len(found))).to(self.device)
            return found.as_strided(tensor.shape, strides[len(strides) - tensor.ndim :])

        return {name: numbers(tensor) for name, tensor in state.items()}

    def structure(self, layer: int) -> LayerStructure:
        """How the layer splits into branches, found by tracing it once.

        Raises:
            SltaError: the layer does not split into an attention and an MLP branch.
        """
        found = self._structure(layer)
        if found is None:
            raise SltaError(f"{self._unsplit(layer)}: use 'level: layer'.")
        return found

    def split_problem(self, layer: int) -> str | None:
        """That the layer does not split into an attention and an MLP branch, without what to do about it.

        Raises:
            SltaError: the model's layers cannot be run one at a time.
        """
        return self._unsplit(layer) if self._structure(layer) is None else None

    def _structure(self, layer: int) -> LayerStructure | None:
        return self.once_per_kind(layer, Decoder._find_structure)

    @torch.no_grad()
    def _find_structure(self, layer: int) -> LayerStructure | None:
        found = _branches(self.trace(layer))
        owners = {name.partition(".")[0] for name in self.layers[layer].state_dict()}
        return found if found is not None and owners <= found.branches["attn"] | found.branches["mlp"] else None

    def _unsplit(self, layer: int) -> str:
        kind = type(self.layers[layer]).__name__
        return f"Layer {layer} ({kind}) does not split into an attention and an MLP branch"

    def _zeros(self, state: Weights) -> Weights:
        """Zeros in place of tensors; on the host they take no memory, since numpy leaves their pages unmapped."""
        return {
            name: torch.from_numpy(np.zeros(tuple(tensor.shape), np.float32)).to(
                self.device, torch.float32 if tensor.is_floating_point() else tensor.dtype
            )
            for name, tensor in state.items()
        }

    def _edge_state(self) -> dict[str, torch.Tensor]:
        names = set(self.edge_tensors())
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in names}

    def once_per_kind(self, layer: int, find: Callable[[Decoder, int], Found]) -> Found:
        """What ``find`` makes of a layer, found once for all layers of the same modules and shapes."""
        key = find, self._kinds[layer]
        if key not in self._found:
            self._found[key] = find(self, layer)
        found: Found = self._found[key]
        return found

    def one_of_each_kind(self) -> list[int]:
        """The first layer of each kind."""
        return sorted({kind: layer for layer, kind in reversed(list(enumerate(self._kinds)))}.values())

    @functools.cached_property
    def _kinds(self) -> list[Hashable]:
        """What layers have in common that behave alike, for each of them."""
        return [
            (
                tuple((name, type(module)) for name, module in layer.named_modules()),
                tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
            )
            for layer in self.layers
        ]

    def _give_buffers(self) -> None:
        """Fill the buffers that no checkpoint holds (rotary frequencies and the like) from the configuration."""
        for name, buffer in list(self.model.named_non_persistent_buffers()):
            owner, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(owner)
            module._buffers[leaf] = torch.empty_like(buffer, device="cpu")
        # A buffer may be filled by another module than its owner, so all are asked; meta weights stay without values.
        self.model.initialize_weights()
        for name, buffer in list(self.model.named_non_persistent_buffers()):
            owner, _, leaf = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[leaf] = buffer.to(self.device)

    def _watch(self, layer: torch.nn.Module) -> None:
        for name, child in layer.named_children():
            if not isinstance(child, torch.nn.Dropout):  # it may serve both branches, and lets the sum pass
                child.forward = self._watched(name, child.forward)
        for name, module in layer.named_modules():
            if "." in name and any(True for _ in module.parameters(recurse=False)):
                module.forward = self._watched_inside(name, module.forward)

    def _watched_inside(self, name: str, forward: Any) -> Any:
        """Wrap the forward of a module with parameters below a child, for what may be asked of any module."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None:
                return forward(*args, **kwargs)
            run.enter(name, args, kwargs)
            return run.leave(name, run.replay[name] if name in run.replay else forward(*args, **kwargs))

        return watched

    def _watched(self, name: str, forward: Any) -> Any:
        """Wrap a child's forward: it sees plain tensors, and what it returns enters the residual stream by its name."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None:
                return forward(*args, **kwargs)
            run.enter(name, args, kwargs)
            streams = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, ResidualStream)]
            read = frozenset().union(*(sources(stream) for stream in streams))
            run.reads[name] = read
            if _mixes_tokens(args, kwargs):
                run.mixers.add(name)
            if read == run.mlp_reads and INPUT in read:
                run.read_by_mlp = plain(streams[0])
                if run.mlp_input is not None:
                    args = tuple(run.mlp_input if isinstance(arg, ResidualStream) else arg for arg in args)
                    kwargs = {k: run.mlp_input if isinstance(v, ResidualStream) else v for k, v in kwargs.items()}
            if name in run.replay:
                output = run.replay[name]
            else:
                output = forward(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})
            run.outputs[name] = output
            if isinstance(output, (tuple, list)):
                return type(output)([_as_stream(name, output[0]), *output[1:]])
            return _as_stream(name, output)

        return watched


def refuse_unless_decoder(config: transformers.PretrainedConfig) -> None:
    """Refuse what has no single stack of causal decoder layers, and say what to use instead.

    Raises:
        SltaError: the model is an encoder, an encoder-decoder, or has several modules (vision, audio).
    """
    if not config.architectures:  # which building the model will say
        return
    architecture = config.architectures[0]
    if config.is_encoder_decoder:
        kind = "is an encoder-decoder"
    elif config.get_text_config() is not config:
        kind = "has several modules"
    elif not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        kind = "is no decoder-only language model"
    else:
        return
    raise SltaError(f"{architecture} {kind}, which calibration does not cover: use 'merge_method: sftm' instead.")


def _find_layers(
    model: transformers.PreTrainedModel, config: transformers.PretrainedConfig
) -> tuple[torch.nn.ModuleList, str]:
    depth = config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth:
            return module, name
    raise SltaError(f"Cannot find the {depth} decoder layers of {type(model).__name__}: use 'merge_method: sftm'.")


def _path_in_model(model: torch.nn.Module, body: torch.nn.Module) -> str:
    return next((name + "." for name, module in model.named_modules() if module is body and name), "")


@contextlib.contextmanager
def _replaced(layers: torch.nn.ModuleList, forward: LayerForward) -> Iterator[None]:
    """Let every layer return what ``forward`` makes of its index, its hidden states and its call."""

    def stand_in(index: int, *args: Any, **kwargs: Any) -> Any:
        hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        del layers[index].forward  # ``forward`` may run the layer
        try:
            return forward(index, plain(hidden), LayerCall(args[1:], kwargs))
        finally:
            layers[index].forward = functools.partial(stand_in, index)

    for index, layer in enumerate(layers):
        layer.forward = functools.partial(stand_in, index)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _Made(torch.Tensor):
    """Something that a layer returned, or that was computed from it."""


def _returned_like(returned: Any, hidden: torch.Tensor) -> Any:
    """What a layer returns in the form of ``returned``, with other hidden states."""
    made = hidden.as_subclass(_Made)
    if not isinstance(returned, (tuple, list)):
        return made
    rest = [tree_map(lambda v: v.as_subclass(_Made) if isinstance(v, torch.Tensor) else v, v) for v in returned[1:]]
    return type(returned)([made, *rest])


def _pairs(own: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """What stands in the same places of two layers' calls."""
    if isinstance(own, LayerCall):
        own, other = own._arguments(), other._arguments()
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        own, other = list(own.values()), list(other.values())
    if isinstance(own, list | tuple) and isinstance(other, list | tuple) and len(own) == len(other):
        for parts in zip(own, other, strict=True):
            yield from _pairs(*parts)
    else:
        yield own, other


def _is_prefix(own: Any, other: Any) -> bool:
    """Whether a tensor is what stands at the beginning of another one, in each dimension.

    What is no number does not matter: where a mask is left out, or has more than one sample would need.
    """
    if not any(isinstance(value, torch.Tensor) and value.dtype not in _WHOLE for value in (own, other)):
        return True
    if not isinstance(own, torch.Tensor) or not isinstance(other, torch.Tensor) or own.ndim != other.ndim:
        return False
    other = other[tuple(map(slice, own.shape))]
    return own.shape == other.shape and torch.allclose(own, other, rtol=PREFIX_TOLERANCE, atol=PREFIX_TOLERANCE)


_WHOLE = (torch.bool, torch.int32, torch.int64)


def _choices(module: torch.nn.Module) -> tuple[Any, ...]:
    """What a module is told to do by flags and names."""
    return tuple(
        (name, value if isinstance(value, bool | str) else type(value))
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, bool | str | int | None)
    )


def _as_stream(name: str, value: Any) -> Any:
    return ResidualStream.of(value, (Term(name, value),)) if isinstance(value, torch.Tensor) else value


def _mixes_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A module that is told more than the hidden states (positions, a mask) lets tokens see each other."""
    return len(args) + len(kwargs) > 1


def _summands(result: torch.Tensor) -> dict[str, torch.Tensor] | None:
    if INPUT not in sources(result):
        return None
    terms: dict[str, torch.Tensor] = {}
    for term in result.terms:  # type: ignore[attr-defined]
        if term.source != INPUT:
            terms[term.source] = terms[term.source] + term.value if term.source in terms else term.value
    return terms


def _branches(run: LayerRun) -> LayerStructure | None:
    """Follow each summand of the layer's output back to where its branch reads the residual stream.

    Returns ``None`` where these are not an attention and an MLP branch.
    """
    branches: dict[str, frozenset[str]] = {"attn": frozenset(), "mlp": frozenset()}
    entries: dict[str, set[frozenset[str]]] = {"attn": set(), "mlp": set()}
    for source in run.terms or {}:
        chain, entry = _chain(source, run.reads)
        branch = "attn" if chain & run.mixers else "mlp"
        branches[branch] |= chain
        entries[branch].add(entry)
    first, second = entries["attn"], entries["mlp"]
    mixers = branches["attn"] & run.mixers
    added = {source for source in run.terms or {} if source in branches["attn"]}
    if (
        len(mixers) != 1
        or first != {frozenset({INPUT})}
        or second not in ({frozenset({INPUT})}, {frozenset({INPUT, *added})})
    ):
        return None
    return LayerStructure(branches, second.pop(), next(iter(mixers)))


def _chain(source: str, reads: Mapping[str, frozenset[str]]) -> tuple[frozenset[str], frozenset[str]]:
    """The children from ``source`` back to the residual stream, and what the stream holds there."""
    chain = {source}
    frontier = [source]
    entry: frozenset[str] = frozenset()
    while frontier:
        read = reads.get(frontier.pop(), frozenset())
        if INPUT in read or not read:
            entry |= read
            continue
        frontier.extend(read - chain)
        chain |= read
    return frozenset(chain), entry
