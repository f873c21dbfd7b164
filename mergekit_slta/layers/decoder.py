"""Run one decoder layer at a time with given weights.

The layers are transformers' own modules on the meta device. Nothing here knows an architecture by name. ``ends`` runs
what comes before and after the layers; ``structure`` splits a layer into branches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.calls import LayerCall, Weights, handed_on, hidden_of
from mergekit_slta.layers.fresh import Fresh
from mergekit_slta.layers.recording import LayerRun, Reached, watch
from mergekit_slta.layers.residual import INPUT, ResidualStream, Term
from mergekit_slta.models.skeleton import meta_model
from mergekit_slta.tables import as_size

Found = TypeVar("Found")

# The ends of the names of classes that make text from text; the last one's may take more than text.
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Bytes of the buffers that no checkpoint holds, of the whole model; those of released models take a few megabytes.
MOST_BUFFERS = 2**31


class Decoder:
    """The decoder of one architecture, without weights.

    Args:
        config: the base model's configuration.
        trust_remote_code: mergekit's flag of that name.
        device: where layers run.

    Attributes:
        name: the architecture's name.
        model: the whole model on the meta device.
        body: the model without its output head, or the language tower where that cannot run without images;
            ``body_path`` begins the names of its tensors in the model.
        tower: the language tower of a multimodal model, or the whole of another one.
        layers: the decoder layers, and ``layers_path`` their path in the model.
        fresh: restores the model to the state in which it was built.
        handed: by argument of a layer, the position in the return value of the layer before where it comes from; empty
            as long as no layer was called.
        stacked: whether the model's layers are given several hidden states per token as [n, B, S, D]; here they are
            [B, S, n, D] everywhere else. None as long as no layer was called.

    Raises:
        SltaError: the model is not a decoder-only language model, or its layers cannot be found.
    """

    def __init__(
        self, config: transformers.PretrainedConfig, trust_remote_code: bool = False, device: str = "cpu"
    ) -> None:
        refuse_unless_decoder(config)
        self.device = _numbered(device)
        self.model = meta_model(config, trust_remote_code)
        # One expert of a mixture after the other: the other ways compute the same, but gather copies of the weights.
        if self.model._can_set_experts_implementation():
            self.model.set_experts_implementation("eager")
        self.name = type(self.model).__name__
        self.body = self.model.base_model
        self.tower = self.model.get_decoder() if is_multimodal(config) else self.model
        paths = {module: name for name, module in self.model.named_modules() if name}
        self.body_path = _inside(paths.get(self.body, ""))
        self.layers = _find_layers(self.model, self.tower, config)
        self.layers_path = paths[self.layers]
        self._give_buffers()
        self._known: dict[Hashable, Any] = {}
        self._run: LayerRun | None = None
        self.stacked: bool | None = None
        self.handed: dict[int | str, int] = {}
        for layer in self.layers:
            watch(layer, lambda: self._run)
        self.fresh = Fresh(self.model)

    def __len__(self) -> int:
        return len(self.layers)

    def leave_wrapper(self) -> None:
        """Take the language tower alone from now on, for a model that cannot run on text without images."""
        self.body = self.tower
        self.body_path = _inside(next(name for name, module in self.model.named_modules() if module is self.tower))

    def to(self, device: torch.device | str) -> Decoder:
        """Run layers on another device from now on, and forget what ``once`` has found."""
        device = _numbered(device)
        if device != self.device:
            self.fresh.restore()
            self.device = device
            for module in self.model.modules():
                for name in module._non_persistent_buffers_set & module._buffers.keys():
                    if (buffer := module._buffers[name]) is not None:
                        module._buffers[name] = buffer.to(self.device)
            self.fresh = Fresh(self.model)
            self._known.clear()
        return self

    @property
    def base_model_prefix(self) -> str:
        return self.model.base_model_prefix

    @functools.cached_property
    def tensor_names(self) -> frozenset[str]:
        """The model's names of all its tensors."""
        return frozenset(self.model.state_dict())

    def layer_tensors(self, layer: int) -> dict[str, str]:
        """The names of a layer's tensors inside the layer, and in the model: one that layers share has the first's."""
        names = {name: f"{self.layers_path}.{layer}.{name}" for name in self.layers[layer].state_dict()}
        return {name: self.first_names.get(full, full) for name, full in names.items()}

    @functools.cached_property
    def first_names(self) -> dict[str, str]:
        """By the model's names of its parameters, the first name of each, under which checkpoints have tied ones."""
        first: dict[torch.Tensor, str] = {}
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(parameter, name) for name, parameter in named}

    @functools.cached_property
    def language_tensors(self) -> frozenset[str]:
        """The model's names of the tensors of its language tower and its output head, tied ones by all their names."""
        parts = [self.tower, self.model.get_output_embeddings()]
        paths = [name for name, module in self.model.named_modules() if any(module is part for part in parts)]
        return frozenset(name for name in self.tensor_names if any(name.startswith(_inside(path)) for path in paths))

    def is_language(self, name: str) -> bool:
        """Whether a tensor, by the model's name, does not belong to a multimodal model's other towers."""
        return self.tower is self.model or name in self.language_tensors

    @functools.cached_property
    def edge_tensors(self) -> tuple[str, ...]:
        """The model's names of the language tensors outside the decoder layers (embeddings, final norm, output head).

        Tied tensors are named once.
        """
        outside = [name for name in self.model.state_dict() if not name.startswith(self.layers_path + ".")]
        outside = [name for name in outside if self.first_names.get(name, name) == name]
        return tuple(name for name in outside if name in self.language_tensors)

    def run(self, layer: int, weights: Weights, hidden: torch.Tensor, call: LayerCall, **settings: Any) -> LayerRun:
        """Run a layer on hidden states, to its end or until it calls a module.

        Args:
            layer: the layer's index.
            weights: the layer's tensors by their names inside the layer.
            hidden: [B, S, D], the layer's input.
            call: the layer's other arguments.
            settings: those of ``LayerRun``.
        """
        run = LayerRun(**settings)
        self.fresh.restore()
        with contextlib.suppress(Reached):
            run.finish(hidden_of(self.call(run, layer, weights, hidden, call)))
            run.output = self.tokens_first(run.output)
            if run.terms is not None:
                run.terms = {name: self.tokens_first(term) for name, term in run.terms.items()}
        return run

    def tokens_first(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states as [B, S, ...], from what the model's own code gives to its layers."""
        return hidden.movedim(0, 2) if self.stacked else hidden

    def as_called(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, ...] as the model's own code gives them to its layers."""
        return hidden.movedim(2, 0) if self.stacked else hidden

    def call(self, run: LayerRun, layer: int, weights: Weights, hidden: torch.Tensor, call: LayerCall) -> Any:
        """Call a layer's module on a residual stream while its modules report to ``run``."""
        own = call.own({})
        self._run = run
        try:
            hidden = self.as_called(hidden)
            stream = ResidualStream.of(hidden, (Term(INPUT, hidden),))
            arguments = stream, *own.args
            returned = torch.func.functional_call(self.layers[layer], dict(weights), arguments, own.kwargs)
            run.state = handed_on(returned, self.handed)
            return returned
        finally:
            self._run = None
            run.state = {**own.entered(call), **run.state}

    def once(self, find: Callable[..., Found], *arguments: Hashable) -> Found:
        """``find(self, *arguments)``, computed once."""
        key = find, arguments
        if key not in self._known:
            self._known[key] = find(self, *arguments)
        found: Found = self._known[key]
        return found

    def once_per_kind(self, layer: int, find: Callable[[Decoder, int], Found]) -> Found:
        """``find(self, layer)``, computed once for all layers with the same modules and shapes."""
        return self.once(find, self.first_of_kind[layer])

    def one_of_each_kind(self) -> list[int]:
        """The first layer of each kind."""
        return sorted(set(self.first_of_kind))

    @functools.cached_property
    def first_of_kind(self) -> list[int]:
        """For each layer, the first layer with the same modules and shapes, which behaves alike.

        A layer that shares modules with an earlier one is like no other: it may call those of their parts that are for
        its number.
        """
        kinds = [
            (
                tuple((name, type(module)) for name, module in layer.named_modules()),
                tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
                None if self._owns_its_tensors(number) else number,
            )
            for number, layer in enumerate(self.layers)
        ]
        return [kinds.index(kind) for kind in kinds]

    def _owns_its_tensors(self, layer: int) -> bool:
        """Whether no earlier layer has any of a layer's tensors."""
        return all(name.startswith(f"{self.layers_path}.{layer}.") for name in self.layer_tensors(layer).values())

    def _give_buffers(self) -> None:
        """Fill the buffers that no checkpoint holds (rotary frequencies and the like) from the configuration.

        accelerate's ``init_empty_weights`` would fill them too, but it makes every parameter on the host before it
        drops it: one fused tensor of a large mixture is more than the memory of many machines.
        """
        size = sum(buffer.nbytes for _, buffer in self.model.named_non_persistent_buffers())
        if size > MOST_BUFFERS:
            source = self.model.config._name_or_path or self.name
            raise SltaError(
                f"The config.json of {source} describes rotary frequencies and the like of {as_size(size)}: correct "
                "its sizes, such as head_dim and max_position_embeddings."
            )
        for name, buffer in list(self.model.named_non_persistent_buffers()):
            owner, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(owner)
            module._buffers[leaf] = torch.empty_like(buffer, device="cpu")
        # Another module than its owner may fill a buffer, so the whole model initializes; meta weights get no values.
        self.model.initialize_weights()
        for name, buffer in list(self.model.named_non_persistent_buffers()):
            owner, _, leaf = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[leaf] = buffer.to(self.device)


def _numbered(device: torch.device | str) -> torch.device:
    """A device with its number: "cuda" is the current GPU, which may be another one in another thread."""
    return torch.empty(0, device=device).device


def is_multimodal(config: transformers.PretrainedConfig) -> bool:
    """Whether a model has towers for images, video or sound beside the one for language."""
    return config.get_text_config() is not config


def refuse_unless_decoder(config: transformers.PretrainedConfig) -> None:
    """Refuse a model without a single stack of causal decoder layers, and say which method to use instead.

    Raises:
        SltaError: the model is an encoder, an encoder-decoder, or makes no text.
    """
    if not config.architectures:  # building the model will report it
        return
    architecture = config.architectures[0]
    if config.is_encoder_decoder or config.get_text_config().is_encoder_decoder:
        kind = "is an encoder-decoder"
    elif not architecture.endswith(WRITERS) and architecture not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        kind = "is not a decoder-only language model"
    else:
        return
    raise SltaError(f"{architecture} {kind}, which calibration does not cover: use 'merge_method: actmat' instead.")


def _find_layers(
    model: transformers.PreTrainedModel, tower: torch.nn.Module, config: transformers.PretrainedConfig
) -> torch.nn.ModuleList:
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in tower.modules() if isinstance(module, torch.nn.ModuleList)]
    if found := [module for module in lists if len(module) == depth]:
        return found[0]
    # Some configurations count attention layers, of which a decoder layer may have several.
    kinds = set(getattr(tower, "_no_split_modules", None) or ())
    if len(found := [module for module in lists if kinds.issuperset(type(layer).__name__ for layer in module)]) == 1:
        return found[0]
    raise SltaError(
        f"Cannot find the decoder layers of {type(model).__name__}: it has no single stack of them, so no level "
        "applies to it; it can be merged with 'merge_method: actmat'."
    )


def _inside(path: str) -> str:
    """What the names of a module's tensors begin with."""
    return f"{path}." if path else ""
