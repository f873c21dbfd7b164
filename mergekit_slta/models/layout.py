"""A model without weights, and how a checkpoint stores it: under which names, and in which pieces.

The model is transformers' own, on the meta device. transformers loads checkpoints that call a model's tensors otherwise
than the model does (those of its older releases, a language model saved without the towers around it), and that store
them in other pieces (a mixture's experts one by one, or query, key and value in one matrix). `Layout` asks its
list of conversions what each stored tensor is to the model, reads the model's tensors from the stored ones, and
makes stored ones from the model's.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from mergekit.common import get_auto_cls
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter, WeightRenaming, WeightTransform
from transformers.initialization import no_init_weights

from mergekit_slta.errors import SltaError, reading

# Buffers that checkpoints of old releases hold, and that the model computes by itself today.
OLD_BUFFER = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|attn(ention)?\.bias)$")
# The beginnings of the names of a language tower's tensors, in checkpoints of multimodal models by several releases of
# transformers and of the language model alone. The longer ones come first.
_TOWERS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")

Load = Callable[[str], torch.Tensor]  # a stored tensor by its name
Values = Callable[[str, int | None], torch.Tensor]  # the model's tensor by its name, or of a mixture's expert its part


def meta_model(config: transformers.PretrainedConfig, trust_remote_code: bool = False) -> transformers.PreTrainedModel:
    """Build the model that ``config`` describes on the meta device, in evaluation mode and with tied weights tied.

    It is built from a copy, because transformers changes the configuration.
    """
    if not config.architectures:
        raise SltaError(f"The config of model type '{config.model_type}' names no architecture: add 'architectures'.")
    source = f" from the config.json of {config._name_or_path}" if config._name_or_path else ""
    with (
        reading("transformers", f"cannot build {config.architectures[0]}{source}", "change or complete that file"),
        torch.device("meta"),
        no_init_weights(),
    ):
        model = get_auto_cls(config.architectures[0]).from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code, dtype=torch.float32
        )
        model.tie_weights()
    return model.eval()


@contextlib.contextmanager
def silenced(level: int) -> Iterator[None]:
    """No log up to a level, and no progress bars of transformers, until the end of the block."""
    log, disabled = transformers.utils.logging, logging.root.manager.disable
    shown = log.is_progress_bar_enabled()
    try:
        logging.disable(level)
        log.disable_progress_bar()
        yield
    finally:
        logging.disable(disabled)
        (log.enable_progress_bar if shown else log.disable_progress_bar)()


def language_names(model: transformers.PreTrainedModel) -> frozenset[str]:
    """The names of the tensors of a model's language tower and output head, tied ones by all their names."""
    if model.config.get_text_config() is model.config:
        return frozenset(model.state_dict())
    parts = (model.get_decoder(), model.get_output_embeddings())
    paths = [name for name, module in model.named_modules() if any(module is part for part in parts)]
    return frozenset(name for name in model.state_dict() if any(name.startswith(f"{path}.") for path in paths))


def spellings(name: str, base_model_prefix: str) -> Iterator[str]:
    """The names that a tensor may have in checkpoints of one model, its own first.

    There it may lack or carry the base model's prefix, and that of a multimodal model around the language model.
    """
    prefix = base_model_prefix + "."
    inside = next(name.removeprefix(tower) for tower in _TOWERS if name.startswith(tower))
    yield from dict.fromkeys((name, prefix + name, name.removeprefix(prefix), *(tower + inside for tower in _TOWERS)))


def model_tensor_name(name: str, names: Collection[str], base_model_prefix: str) -> str | None:
    """Find a tensor among ``names`` by any of its ``spellings``; None if it is missing."""
    return next((spelling for spelling in spellings(name, base_model_prefix) if spelling in names), None)


class Piece(NamedTuple):
    """A stored tensor of the model."""

    stored: str  # its name in the checkpoint
    targets: tuple[str, ...]  # the model's names of the tensors that it is a part of, or that are parts of it
    mixture_expert: int | None = None  # whose matrix it is, where a checkpoint has them one by one
    pattern: str | None = None  # transformers' pattern of such names; None where the stored tensor is the model's
    renamed: str = ""  # its name where transformers begins to convert it


@dataclass
class _Source:
    """What the model's tensors ``targets`` are made from; without a converter, one stored tensor is the only target."""

    targets: tuple[str, ...]
    converter: WeightConverter | None
    pieces: list[Piece] = field(default_factory=list)
    loosely: bool = False  # by another spelling of the model's name


class Layout:
    """The tensors that a checkpoint stores, as pieces of a model."""

    def __init__(
        self,
        # On the meta device; None if transformers cannot build it: then nothing is known but names.
        model: transformers.PreTrainedModel | None,
        stored: Iterable[str],  # the names of the checkpoint's tensors
        # Of those that the checkpoint may store with rows and columns exchanged.
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.model = model
        self.pieces: dict[str, Piece] = {}  # the stored tensors of the model, by their names
        self.outside: list[str] = []  # those that the model does not have, such as a head for multi-token prediction
        self._shapes = shapes or {}
        self._sources: dict[str, _Source] = {}  # by each target
        self._tensors = {} if model is None else model.state_dict(keep_vars=True)
        self._tied: dict[int, list[str]] = {}  # the names of one tensor of the model
        for name, tensor in self._tensors.items():
            self._tied.setdefault(id(tensor), []).append(name)
        conversions = [] if model is None else get_model_conversion_mapping(model)
        self._renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        prefix = "" if model is None else model.base_model_prefix
        ordered = sorted(stored, key=loading.dot_natural_key)  # the order in which transformers converts them
        respelled = [name for name in ordered if not self._enter(name, [name], loosely=False)]
        for name in respelled:  # what has the model's own name comes first
            if not self._enter(name, spellings(name, prefix), loosely=True) and not OLD_BUFFER.search(name):
                self.outside.append(name)

    def _enter(self, name: str, names: Iterable[str], loosely: bool) -> bool:
        """Find out what a stored tensor is to the model, by any of these names; false if it is none of the model's."""
        if self.model is None:
            self.pieces[name] = Piece(name, (name,))
            self._sources[name] = _Source((name,), None, [self.pieces[name]])
            return True
        if (entry := self._piece(name, names, loosely)) is None:
            return False
        piece, converter = entry
        source = self._sources.get(piece.targets[0])
        if source is not None and (converter is None or source.converter is None or source.loosely != loosely):
            return False
        if source is None:
            source = _Source(piece.targets, copy.deepcopy(converter), loosely=loosely)
            self._sources |= dict.fromkeys(piece.targets, source)
        source.pieces.append(piece)
        self.pieces[name] = piece
        return True

    def _piece(self, name: str, names: Iterable[str], loosely: bool) -> tuple[Piece, WeightConverter | None] | None:
        """What a stored tensor is to the model, and how it is converted; None if it is none of the model's."""
        assert self.model is not None
        prefix = self.model.base_model_prefix if loosely else None  # which transformers adds or takes away
        for spelling in names:
            key, pattern = loading.rename_source_key(spelling, self._renamings, self._converters, prefix, self._tensors)
            if key not in self._tensors and spelling in self._tensors:
                key, pattern = spelling, None  # a name that should not have been renamed
            if key not in self._tensors:
                continue
            if pattern is None:
                return Piece(name, (key,)), None
            renamed = loading.apply_renamings(spelling, self._renamings)
            converter = next(each for each in self._converters if each.rename_source_key(renamed)[1] == pattern)
            head = converter.target_patterns[0]
            targets = tuple(key.replace(head, target, 1) for target in converter.target_patterns)
            number = re.search(_numbered(pattern), renamed) if _by_expert(converter) else None
            expert = int(number["expert"]) if number else None
            return Piece(name, targets, expert, pattern, renamed), converter
        return None

    def _source(self, target: str) -> _Source | None:
        """Where a tensor of the model comes from: by its own name, or by another one of the same tensor."""
        tied = self._tied.get(id(self._tensors.get(target)), ())
        return next((self._sources[name] for name in (target, *tied) if name in self._sources), None)

    def __contains__(self, target: str) -> bool:
        """Whether the checkpoint has all of a tensor of the model, by the model's name."""
        source = self._source(target)
        if source is None or source.converter is None:
            return source is not None
        counts = Counter(piece.pattern for piece in source.pieces)
        wanted = len(self._tensors[source.targets[0]]) if _by_expert(source.converter) else 1
        return all(counts[pattern] >= wanted for pattern in source.converter.source_patterns)

    def parted(self, kept: Layout, load: Load) -> list[str]:
        """The names of a tensor of the model, if it is stored as several that differ, and in ``kept`` as fewer."""
        for names in self._tied.values():
            own = {name: self._sources[name].pieces[0].stored for name in names if name in self._sources}
            if len(own) > 1 and not own.keys() <= kept._sources.keys():
                first, *others = map(load, own.values())
                if not all(torch.equal(first, other) for other in others):
                    return [*own]
        return []

    def in_parts(self, target: str) -> bool:
        """Whether the parts of a mixture's tensor can be read one expert at a time."""
        source = self._source(target)
        assert source is not None
        return source.converter is None or _by_expert(source.converter) or _may_turn(source.converter)

    def read(self, target: str, load: Load, mixture_expert: int | None = None) -> torch.Tensor:
        """Read a tensor of the model, which must be there, or the part of a mixture's expert, from the stored ones."""
        source = self._source(target)
        assert source is not None
        if source.converter is None or (mixture_expert is not None and _may_turn(source.converter)):
            whole, turned = load(source.pieces[0].stored), self.turned(source.pieces[0].stored)
            part = whole if mixture_expert is None else whole[mixture_expert]
            return part.mT if turned else part
        one = mixture_expert is not None and _by_expert(source.converter)
        wanted = (None, mixture_expert)
        parts = [piece for piece in source.pieces if mixture_expert is None or piece.mixture_expert in wanted]
        pieces = [(piece.pattern, piece.stored, partial(load, piece.stored)) for piece in parts]
        tensors = self._converted(source.converter, source.targets[0], pieces)
        whole = tensors[next(name for name in (target, *source.targets) if name in tensors)]
        return whole if mixture_expert is None else whole[0 if one else mixture_expert]

    def restore(self, stored: str, values: Values) -> torch.Tensor:
        """Make one of the stored ``pieces`` from the model's tensors: what ``read`` would make these from."""
        piece = self.pieces[stored]
        converter = self._sources[piece.targets[0]].converter
        if converter is None:
            return values(piece.targets[0], None)
        reverse = converter.reverse_transform()
        parts, first = [], ""
        for target in piece.targets:
            renamed, pattern = reverse.rename_source_key(target)
            tensor = values(target, piece.mixture_expert)
            parts.append((pattern, target, tensor if piece.mixture_expert is None else tensor[None]))
            first = first or renamed
        pieces = self._converted(reverse, first, parts)
        wanted = piece.renamed
        if piece.mixture_expert is not None:
            assert piece.pattern is not None
            number = re.search(_numbered(piece.pattern), wanted)
            assert number is not None
            start, end = number.span("expert")
            wanted = f"{wanted[:start]}0{wanted[end:]}"  # the only one of ``parts``
        assert self.model is not None
        key = model_tensor_name(wanted, pieces, self.model.base_model_prefix)
        assert key is not None, (stored, wanted, list(pieces))
        # Reversing the conversion tells by the shapes alone, too, and sees the model's own.
        exchanged = self.turned(stored) and self._shapes[stored] != tuple(pieces[key].shape)
        return pieces[key].mT if exchanged else pieces[key]

    def turned(self, stored: str) -> bool:
        """Whether a matrix is stored with its rows and columns exchanged."""
        piece = self.pieces.get(stored)
        converter = self._sources[piece.targets[0]].converter if piece else None
        if piece is None or converter is None or not any(isinstance(each, Transpose) for each in converter.operations):
            return False
        return stored in self._shapes and self._shapes[stored] != tuple(self._tensors[piece.targets[0]].shape)

    def _converted(
        self, converter: WeightTransform, first: str, parts: Iterable[tuple[str | None, str, Any]]
    ) -> dict[str, torch.Tensor]:
        """The results of a conversion by their names; ``parts`` has a pattern, a name, and a tensor or its loader."""
        conversion: Any = copy.deepcopy(converter)
        for pattern, name, tensor in parts:
            assert pattern is not None
            conversion.add_tensor(first, name, pattern, tensor)
        assert self.model is not None
        tensors = conversion.convert(first, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in tensors.items()}

    def may_lack(self, other: Layout) -> set[str]:
        """The stored tensors that another checkpoint may lack: the base model's then stand for them.

        They are those that the model does not have; and those of its other towers, if the other checkpoint is a
        language model saved alone.
        """
        language = frozenset() if self.model is None else language_names(self.model)
        targets = {name: piece.targets for name, piece in self.pieces.items()}
        towers = {name: names for name, names in targets.items() if language and not language.issuperset(names)}
        alone = not any(target in other for names in towers.values() for target in names)
        return {*self.outside, *(towers if alone else ())}


def _by_expert(converter: WeightConverter) -> bool:
    """Whether a conversion stacks the matrices of a mixture's experts."""
    operation = converter.operations[0]
    return isinstance(operation, MergeModulelist) and operation.dim == 0


def _may_turn(converter: WeightConverter) -> bool:
    """Whether a conversion exchanges the rows and columns of all matrices in a stack, if its shape says so."""
    operations = converter.operations
    return all(isinstance(one, Transpose) and one.check_dims and {one.dim0, one.dim1} == {1, 2} for one in operations)


def _numbered(pattern: str) -> str:
    """A pattern of transformers' that finds the number of an expert."""
    return pattern.replace("*.", r"(?P<expert>\d+)\.", 1)
