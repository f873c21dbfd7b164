"""Calibration data: the samples drawn from a source as token ids, in an order that only the seed decides."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mergekit_slta.data.records import Record, record_text
from mergekit_slta.data.sources import read_records
from mergekit_slta.errors import SltaError, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationData:
    """The samples drawn from one source.

    Attributes:
        source: the source as the recipe spells it.
        template: the template of the expert, or "".
        token_ids: one row of token ids per sample, in the order drawn; no padding.
        records: each row's index in the source.
        skipped: how many records were passed over because they are empty.
    """

    source: str
    template: str
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[int, ...]
    skipped: int

    @property
    def sha256(self) -> str:
        """Hex digest of the token ids: per row its length and its ids, all as little-endian int64."""
        digest = hashlib.sha256()
        for row in self.token_ids:
            digest.update(np.array((len(row), *row), dtype="<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class CalibrationSource:
    """A source's records, and how they become samples.

    Attributes:
        source: what the recipe gives as ``calibration``.
        template: a ``str.format`` string over a record's fields, or "" to go by the shape of the record.
        tokenizer: the base model's; it tokenizes everything.
        expert_tokenizer: loads the expert's tokenizer, or raises an SltaError; called only for a chat template that
            the base does not have.
        max_tokens: how many tokens of a sample to keep, from its beginning.
        seed: decides the order in which records are taken, ``random.Random(seed).sample(range(n), n)``.
    """

    source: str
    template: str
    tokenizer: PreTrainedTokenizerBase
    expert_tokenizer: Callable[[], PreTrainedTokenizerBase]
    max_tokens: int
    seed: int

    def draw(self, samples: int) -> CalibrationData:
        """Draw calibration samples.

        Records are taken in the seed's order until enough are usable; empty ones are skipped. Records that are not
        needed are not tokenized. Fewer than ``samples`` are a warning.

        Raises:
            SltaError: the source cannot be read, a record cannot be turned into text, or no record is usable.
        """
        records = read_records(self.source)
        drawn = self._draw(records, self._order(len(records)), samples)
        if not drawn.records:
            raise SltaError(f"Calibration source {self.source!r} has no usable record: all {len(records)} are empty.")
        if drawn.skipped:
            LOG.warning("Calibration source %r: skipped %d empty records.", self.source, drawn.skipped)
        if len(drawn.records) < samples:
            usable = len(drawn.records)
            LOG.warning("Calibration source %r has %d usable records of %d asked.", self.source, usable, samples)
        return drawn

    def held_out(self, samples: int, used: CalibrationData) -> CalibrationData:
        """Draw records that calibration did not use: the next usable ones in the order that it took them in.

        A record that repeats a calibration sample, token by token, is passed over too. Fewer than ``samples`` are a
        warning.

        Raises:
            SltaError: as for ``draw``, and when calibration left no usable record.
        """
        records = read_records(self.source)
        seen = set(used.records)
        order = [index for index in self._order(len(records)) if index not in seen]
        drawn = self._draw(records, order, samples, exclude=set(used.token_ids))
        if not drawn.records:
            raise SltaError(
                f"Calibration source {self.source!r} has no record to hold out: calibration used every usable one. "
                "Add records to it, or calibrate with fewer 'samples'."
            )
        if len(drawn.records) < samples:
            LOG.warning(
                "Calibration source %r has only %d records that calibration did not use, %d were asked for.",
                self.source,
                len(drawn.records),
                samples,
            )
        return drawn

    def _order(self, count: int) -> list[int]:
        return random.Random(self.seed).sample(range(count), count)

    def _draw(
        self,
        records: Sequence[Record],
        order: Iterable[int],
        samples: int,
        exclude: Collection[tuple[int, ...]] = (),
    ) -> CalibrationData:
        rows: list[tuple[int, ...]] = []
        indices: list[int] = []
        skipped = 0
        for index in order:
            if len(rows) == samples:
                break
            row = self._encode(index, records[index])
            if not row:
                skipped += 1
            elif row not in exclude:
                rows.append(row)
                indices.append(index)
        return CalibrationData(self.source, self.template, tuple(rows), tuple(indices), skipped)

    def _encode(self, index: int, record: Record) -> tuple[int, ...]:
        """The record's token ids, or an empty tuple for one that has no text or no token but the special ones."""
        where = f"Record {index + 1} of calibration source {self.source!r}"
        text, is_chat = record_text(record, self.template, where=where, render_chat=self._render_chat)
        if not text.strip():
            return ()
        with reading(f"The tokenizer of {self.tokenizer.name_or_path}", f"fails at {where[0].lower()}{where[1:]}"):
            # A chat template writes the special tokens itself; adding them again would double the first one.
            encoding = self.tokenizer(
                text, add_special_tokens=not is_chat, padding=False, truncation=False, verbose=False
            )
            special = 0 if is_chat else self.tokenizer.num_special_tokens_to_add()
            token_ids = encoding["input_ids"]
        # The tokenizer's own truncation may cut at the beginning, so the cut is made here.
        return tuple(token_ids[: self.max_tokens]) if len(token_ids) > special else ()

    def _render_chat(self, turns: list[dict[str, Any]]) -> str:
        return str(self.tokenizer.apply_chat_template(turns, chat_template=self._chat_template, tokenize=False))

    @cached_property
    def _chat_template(self) -> str:
        template = _chat_template_of(self.tokenizer)
        if template is None:
            template = _chat_template_of(self._load_expert_tokenizer())
        if template is None:
            raise SltaError(
                f"Calibration source {self.source!r} holds conversations, but neither the base model's tokenizer nor "
                "the expert's has a chat template: give the expert a 'template'."
            )
        return template

    def _load_expert_tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            return self.expert_tokenizer()
        except SltaError as error:
            reason = error.message.rstrip(".")
            raise SltaError(
                f"Calibration source {self.source!r} holds conversations, the base model's tokenizer has no chat "
                f"template, and the expert's cannot be loaded ({reason}): give the expert a 'template'."
            ) from error


def _chat_template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    try:
        return tokenizer.get_chat_template()
    except (ValueError, NotImplementedError):
        return None
