"""A model's decoder: what is known of its layers, and the function that runs one of them with given weights.

The layers are transformers' own modules on the meta device. Nothing here knows an architecture by name: ``trace`` makes
a decoder from what layers do with made-up weights, once. A run then calls ``embed`` (``calls.py``) and ``Decoder.run``.

``watch`` wraps the ``forward`` of a layer's modules once. They then report to the ``LayerRun`` that is under way, which
records their inputs and outputs, and may also replace a module's output, or end at a module's call.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from torch.utils._pytree import tree_map_only
from transformers.integrations import hub_kernels

from mergekit_slta.errors import SltaError, first_line
from mergekit_slta.layers.attention import attend
from mergekit_slta.layers.maps import LinearMap
from mergekit_slta.models.checkpoint import Tensors
from mergekit_slta.models.layout import language_names

EXPORTING: Any = hub_kernels.is_torchdynamo_exporting

# Tensors [B, ...] that layers have passed to later layers. Their keys are the argument's position or name; for an
# argument that is a dictionary also the key in it and, for a tuple of tensors, the index.
State = Mapping[tuple[Any, ...], torch.Tensor]


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a model's call of a layer, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> dict[Any, Any]:
        """All arguments, by position or name."""
        return dict(enumerate(self.args)) | self.kwargs

    def with_state(self, state: State) -> LayerCall:
        """The same call with copies of the dictionaries, to which ``state`` is added.

        Arguments that are None stay so: the first layer is given nothing of earlier layers.
        """
        arguments = self.arguments
        for argument, value in arguments.items():
            if isinstance(value, MutableMapping):
                arguments[argument] = copy.copy(value)
        for (argument, *rest), tensor in state.items():
            value = arguments[argument]
            if len(rest) == 2:  # the parts of a tuple, in their order
                value[rest[0]] = (*value.get(rest[0], ())[: rest[1]], tensor)
            elif rest:
                value[rest[0]] = tensor
            elif value is not None:
                arguments[argument] = tensor
        args = tuple(arguments.pop(position) for position in range(len(self.args)))
        return LayerCall(args, arguments)

    def entered(self, before: LayerCall) -> State:
        """The tensors that the layer has added to the dictionaries of this call, compared with the call ``before``."""
        added: dict[tuple[Any, ...], torch.Tensor] = {}
        earlier = before.arguments
        tables = {name: value for name, value in self.arguments.items() if isinstance(value, MutableMapping)}
        for argument, table in tables.items():
            for key, entry in table.items():
                if earlier[argument].get(key) is entry:
                    continue
                parts = [((n,), part) for n, part in enumerate(entry)] if isinstance(entry, tuple) else [((), entry)]
                for rest, part in parts:
                    if not isinstance(part, torch.Tensor):
                        raise SltaError(
                            f"A layer passes a {type(part).__name__} to later layers in '{argument}', which cannot be "
                            "handed from layer to layer, so slta and featcal cannot run it: use 'merge_method: actmat'."
                        )
                    added[argument, key, *rest] = part
        return added


def hidden_of(returned: Any) -> Any:
    """The hidden states in a layer's return value, which may be a tuple with more values."""
    return returned[0] if isinstance(returned, (tuple, list)) else returned


@dataclass(frozen=True)
class LayerForm:
    """How a model calls its layers, and what they return."""

    # Whether layers are given several hidden states per token as [n, B, S, D]; everywhere else they are [B, S, n, D].
    stacked: bool = False
    # By argument of a layer, the position in the return value of the layer before where it comes from.
    handed: Mapping[int | str, int] = field(default_factory=dict)
    returned: Sequence[Any] = ()  # for each layer, what the first layer of its kind returns for two tokens
    state: State = field(default_factory=dict)  # what layers pass on beside hidden states, for one sample of two tokens
    causal: bool = False  # whether no token sees a later one


class Reached(Exception):
    """Ends a run at the module that it was to reach; this is not a failure."""


class ModelCodeError(RuntimeError):
    """What a model's own code has raised, which may be anything, with the part of the model that raised it."""


class OfStandIn(BaseException):
    """Carries an ``error`` of a function that stands in for a layer through the model's own code."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Have transformers call torch, as in an export, not kernels of fla or mamba_ssm: they need a GPU, and round."""
    try:
        hub_kernels.is_torchdynamo_exporting = lambda: True
        yield
    finally:
        hub_kernels.is_torchdynamo_exporting = EXPORTING


@contextlib.contextmanager
def few_queries() -> Iterator[None]:
    """Have transformers call ``attend`` where it would call a model's own attention, whose name is "eager"."""
    table: dict[str, Any] = transformers.AttentionInterface._global_mapping  # in which this name has no function
    before = table.get("eager")  # of another such block, or a user's own
    table["eager"] = attend
    try:
        yield
    finally:
        if before is None:
            table.pop("eager", None)  # another thread's block may have ended
        elif before is not attend:
            table["eager"] = before


@contextlib.contextmanager
def model_code(part: str) -> Iterator[None]:
    """Turn what a part of a model raises while its own code runs into a ModelCodeError; a lack of memory stays one."""
    try:
        with without_kernels(), few_queries():
            yield
    except (Reached, MemoryError, torch.OutOfMemoryError):
        raise
    except OfStandIn as carried:
        raise carried.error from carried.error.__cause__
    except Exception as error:
        raise ModelCodeError(f"{part}: {type(error).__name__}: {first_line(error)}") from error


@dataclass
class LayerRun:
    """The settings of a run of a layer, and its results; hidden states are [B, S, D]."""

    replay: Mapping[str, Any] = field(default_factory=dict)  # the outputs of modules that need not run again
    inputs_of: Collection[str] = ()  # the modules whose inputs are recorded
    outputs_of: Collection[str] = ()  # the modules whose outputs are recorded, as the children's always are
    until: str | None = None  # the module at whose call the run ends

    returned: Any = None  # what the layer returns; None if the run ended before
    output: Any = None  # the hidden states in that
    # The arguments of the modules in ``inputs_of`` and ``until``, and the outputs; each in the order of the calls.
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    # The children and modules in ``inputs_of`` that were called more than once; their inputs are of the last call.
    repeated: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)  # the children whose parts the layer has called by itself
    state: State = field(default_factory=dict)  # what the layer passes to later layers
    running: str = ""  # the child that is at work


def watch(layers: Iterable[torch.nn.Module]) -> list[LayerRun]:
    """Let the modules of layers report to the last run in a list, which is empty unless a run is under way.

    Dropout does not report: it may serve both branches, and changes no sum.
    """
    runs: list[LayerRun] = []
    for layer in layers:
        for name, module in layer.named_modules():
            is_child = "." not in name and not isinstance(module, torch.nn.Dropout)
            if name and (is_child or any(True for _ in module.parameters(recurse=False))):
                module.forward = functools.partial(_report, runs, name, module.forward)
    return runs


def _report(runs: list[LayerRun], name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module, or replay what it returns, and record it in the run that is under way, if there is one."""
    if not runs:
        return forward(*args, **kwargs)
    run, (child, _, inside) = runs[-1], name.partition(".")
    if name in run.inputs or (name in run.outputs and not inside):
        run.repeated.add(name)
    if name in run.inputs_of or name == run.until:
        run.inputs[name] = (*args, *kwargs.values())
    if name == run.until:
        raise Reached
    if inside and child != run.running:
        run.opened.add(child)
    if name in run.replay:
        output = run.replay[name]
    else:
        caller, run.running = run.running, child
        output = forward(*args, **kwargs)
        run.running = caller
    if inside and name not in run.outputs_of:
        return output
    run.outputs[name] = output
    return tree_map_only(torch.Tensor, torch.clone, output)  # others may change what they are given in place


INPUT = "<input>"  # no child of a layer can be called that
Nodes = frozenset[str]


class Writer(NamedTuple):
    """The module of a linear map whose output, or a norm of it, a layer adds to the residual stream times a constant.

    (A gate or a router's weight multiplies by another number for each token.)
    """

    factor: float  # the constant that its output, or the norm's, is multiplied by
    # What the stream that it adds to is the sum of: ``INPUT`` and outputs of children, each with the constant on it.
    stream: Mapping[str, float]
    norm: str | None = None  # the child that its output goes through


@dataclass(frozen=True)
class LayerStructure:
    """What a decoder layer makes of what its children return, and how it splits into two branches."""

    # The children whose outputs the layer's output is the sum of, and ``INPUT``, each with the constant that it is
    # multiplied by if ``INPUT`` is by 1; None where it is no such sum.
    summands: Mapping[str, float] | None = None
    # The direct children of the layer in each branch, ``attn`` (attention, or other token mixing) and ``mlp``, norms
    # included; a child, or a tensor of the layer's own, that feeds both branches is in both. A layer that only mixes
    # tokens, or never mixes them, has one branch; there is none where the branches cannot be told apart.
    branches: Mapping[str, Nodes] = field(default_factory=dict)
    mixers: Nodes = frozenset()  # the children in the attention branch that let tokens see each other
    # The child whose output is all that the MLP branch reads, where the attention branch ends with a norm of the
    # residual stream; None where its contribution is added to the stream.
    boundary: str | None = None
    of_some_tokens: str = ""  # a linear map whose input rows belong to unknown samples; "" without one

    def others_of(self, branch: str, base: LayerRun) -> dict[str, Any]:
        """The outputs to replay, so that only one branch differs from the base model, whose run is ``base``."""
        others = frozenset().union(*self.branches.values()) - self.branches[branch]
        return {name: base.outputs[name] for name in others if name in base.outputs}

    def change(self, branch: str, run: LayerRun, base: LayerRun) -> torch.Tensor:
        """How a run's residual stream differs from the base model's where a branch, or the layer, ends."""
        ends = {self.boundary: 1.0} if self.boundary is not None and branch == "attn" else self.summands
        if ends is None:
            return run.output - base.output
        change = torch.zeros_like(base.output)
        for name, factor in ends.items():  # one by one: what is the same in both cancels exactly
            if name in run.outputs and run.outputs[name] is not base.outputs[name]:
                part = hidden_of(run.outputs[name]) - hidden_of(base.outputs[name])
                change.add_(part.reshape(change.shape), alpha=factor)
        return change


def fresh(model: torch.nn.Module) -> Callable[[], None]:
    """A function that undoes what calls replace in modules that own buffers outside the model's checkpoint.

    Rotary embeddings whose frequencies depend on the length keep those of the last call in buffers and attributes, so
    that a sample would see the length of the one before it. No model of transformers writes into such a buffer.
    """
    owners = [vars(module) for module in model.modules() if module._non_persistent_buffers_set]
    built = [(owner, dict(owner), dict(owner["_buffers"])) for owner in owners]

    def restore() -> None:
        for owner, attributes, buffers in built:
            owner.clear()
            owner.update(attributes)
            owner["_buffers"].update(buffers)

    return restore


@dataclass(eq=False)
class Decoder:
    """The decoder of one architecture, without weights.

    A tensor has three names: the checkpoint's (``stored``), which a ``Layout`` turns into the model's; the model's
    (``name``), which is the first one of a tensor with several; and the one inside its layer (``key``), the model's
    without the beginning. A submodule's name (``levels.py``) is none of these: it names a part of the model.
    """

    model: transformers.PreTrainedModel  # the whole model on the meta device
    tower: torch.nn.Module  # the language tower of a multimodal model, or the whole of another one
    # What turns token ids into the first layer's input and contains the layers: the model without its output head, or
    # the language tower where the model cannot run without images.
    body: torch.nn.Module
    layers: torch.nn.ModuleList
    device: torch.device  # where layers run
    restore: Callable[[], None]  # puts the model into the state in which it was built
    runs: list[LayerRun]  # the layers' modules report to the last run in it
    form: LayerForm = field(default_factory=LayerForm)
    found: dict[Any, Any] = field(default_factory=dict)  # of each layer, by the function that ``of_each_layer`` called

    def __post_init__(self) -> None:
        model, paths = self.model, {module: path for path, module in self.model.named_modules()}
        self.name = type(model).__name__
        self.layers_path = paths[self.layers]
        self.body_path = f"{paths[self.body]}." if paths[self.body] else ""  # the beginning of its tensors' names
        first, parameters = dict[torch.Tensor, str](), model.named_parameters(remove_duplicate=False)
        # By each name of a parameter its first one, under which checkpoints have what layers share or is tied.
        self.first_names = {name: first.setdefault(parameter, name) for name, parameter in parameters}
        # Of the parameters that several layers, or other parts of the model, share.
        self.shared_tensors = frozenset(name for other, name in self.first_names.items() if other != name)
        # Of each layer's tensors, by the names inside the layer.
        self.layer_tensors = [
            {key: self.first_names.get(name := f"{self.layers_path}.{at}.{key}", name) for key in layer.state_dict()}
            for at, layer in enumerate(self.layers)
        ]
        self.language_tensors = language_names(model)  # of language tower and output head, tied ones by all their names
        # Of those outside the layers, the first names: all, and what ``embed``, ``logits`` and ``head_input`` need.
        outside = [name for name in model.state_dict() if not name.startswith(f"{self.layers_path}.")]
        own = [name for name in outside if self.first_names.get(name, name) == name]
        self.edge_tensors = [name for name in own if name in self.language_tensors]
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.embedding = self.first_names[f"{paths[embedding]}.weight"]  # whose rows are the tokens'
        names = [] if head is None else [f"{paths[head]}.{name}" for name, _ in head.named_parameters()]
        of_head = [self.first_names[name] for name in names]
        self.embed_tensors = [name for name in self.edge_tensors if name.startswith(self.body_path)]
        self.logit_tensors = [name for name in self.edge_tensors if name != self.embedding or name in of_head]
        self.tail_tensors = [name for name in self.logit_tensors if name not in of_head]
        self.head: LinearMap | None = None  # by the model's names; None if it is tied to the embedding or missing
        if names and self.embedding not in of_head:
            path = paths[head]
            bias = f"{path}.bias" if f"{path}.bias" in names else None
            self.head = LinearMap(path, path, f"{path}.weight", bias, transposed=False)
        # For each layer, the first one with the same modules, shapes and settings, which behaves alike. A layer that
        # shares modules with others is like no other: it may call those of their parts that are for its number.
        types, kinds = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(self), []
        for number, layer in enumerate(self.layers):
            shared = self.shared_tensors.intersection(self.layer_tensors[number].values())
            modules = tuple((name, type(module), _choices(module)) for name, module in layer.named_modules())
            shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
            kinds.append((types[number], modules, shapes, number if shared else None))
        self.first_of_kind = [kinds.index(kind) for kind in kinds]
        self.one_of_each_kind = sorted(set(self.first_of_kind))

    def __len__(self) -> int:
        return len(self.layers)

    def run(self, layer: int, tensors: Tensors, hidden: torch.Tensor, call: LayerCall, **settings: Any) -> LayerRun:
        """Run a layer on hidden states [B, S, D] as the model does, to its end or until it calls a module.

        ``tensors`` are by the tensors' names inside the layer, ``settings`` those of ``LayerRun``. Whatever the layer's
        own code raises is a ModelCodeError, but for a lack of memory.
        """
        run, copied = LayerRun(**settings), call.with_state({})
        self.restore()
        arguments = self.as_called(hidden).clone(), *copied.args  # the layer may change its input in place
        self.runs.append(run)
        try:
            with model_code(f"layer {layer} of {self.name}"):
                returned = torch.func.functional_call(self.layers[layer], dict(tensors), arguments, copied.kwargs)
            run.returned, run.output = returned, self.tokens_first(hidden_of(returned))
            run.state = {(argument,): returned[position] for argument, position in self.form.handed.items()}
        except Reached:
            pass
        finally:
            self.runs.pop()
        run.state = {**copied.entered(call), **run.state}
        return run

    def tokens_first(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states as [B, S, ...], from what the model's own code gives to its layers."""
        return hidden.movedim(0, 2) if self.form.stacked else hidden

    def as_called(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, ...] as the model's own code gives them to its layers."""
        return hidden.movedim(2, 0) if self.form.stacked else hidden


def _choices(module: torch.nn.Module) -> tuple[Any, ...]:
    """A module's settings that are flags or names; of a number, such as a window, only its type."""
    return tuple(
        (name, value if isinstance(value, bool | str) else type(value))
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, bool | str | int | None)
    )
