"""Calibration data: samples drawn from a source as token ids, in an order that depends on the seed alone."""

from __future__ import annotations

import datetime
import hashlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mergekit_slta.data.records import Span, Text, record_text
from mergekit_slta.data.sources import read_records
from mergekit_slta.errors import SltaError, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 64  # more than tokens have but for long runs of blanks
# Chat templates that ask for the date get this one, so that the tokens are the same every day. It is the date that
# Llama 3.2's chat template writes when it is given none.
CHAT_DATE = datetime.datetime(2024, 7, 26)
DATE_CODES = (*"aAbBcdDeFHIjmMpRSTuUVwWxXyYzZ", *(f"-{code}" for code in "dHIjmMSy"))
# A macro in place of transformers' function strftime_now, which gives today's date; a chat template takes no functions.
# Jinja drops the newline after the block, so the template that follows still begins a line.
CLOCK = "{%- macro strftime_now(format) -%}{{ format"
CLOCK += "".join(f"|replace('%{code}', {CHAT_DATE.strftime(f'%{code}')!r})" for code in DATE_CODES)
CLOCK += "|replace('%%', '%') }}{%- endmacro %}\n"


@dataclass(frozen=True)
class CalibrationData:
    """The samples drawn from one source.

    Attributes:
        source: the source as the recipe spells it.
        template: the template of the expert, or "".
        token_ids: one row of token ids per sample, in the order drawn; no padding.
        records: each row's index in the source.
        answers: the place of the record's answer in each row: the index of its first token, and of the one after its
            last, which is beyond the row if the answer is cut off. None for a record without a known answer.
        skipped: how many empty records were skipped.
    """

    source: str
    template: str
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[int, ...]
    answers: tuple[Span | None, ...]
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
    """Draws samples from the records of one source.

    Attributes:
        source: what the recipe gives as ``calibration``.
        template: a ``str.format`` string over a record's fields, or "" to choose the fields by their names.
        tokenizer: the base model's tokenizer, which tokenizes everything.
        expert_tokenizer: loads the expert's tokenizer, or raises an SltaError; called only if the base model's
            tokenizer lacks a chat template that is needed.
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
        """Draw calibration samples: records in the seed's order, without the empty ones, until there are enough.

        If there are fewer than ``samples``, a warning is logged.

        Raises:
            SltaError: the source cannot be read, a record cannot be turned into text, or no record is usable.
        """
        return self._draw(samples)

    def held_out(self, samples: int, used: CalibrationData) -> CalibrationData:
        """Draw the next records in the seed's order that calibration did not use.

        A record with the same tokens as a calibration sample is skipped too. If there are fewer than ``samples``, a
        warning is logged.

        Raises:
            SltaError: as for ``draw``, or calibration left no usable record.
        """
        return self._draw(samples, used)

    def _draw(self, samples: int, used: CalibrationData | None = None) -> CalibrationData:
        records = read_records(self.source)
        passed, repeated = (set(used.records), set(used.token_ids)) if used else (set(), set())
        rows: dict[int, tuple[int, ...]] = {}
        answers = []
        skipped = 0
        for index in random.Random(self.seed).sample(range(len(records)), len(records)):
            if len(rows) == samples:
                break
            if index in passed:
                continue
            where = f"Record {index + 1} of calibration source {self.source!r}"
            text = record_text(records[index], self.template, where=where, render_chat=self._render_chat)
            row, answer = self._encode(text)
            if not row:
                skipped += 1
            elif row not in repeated:
                rows[index] = row
                answers.append(answer)
        if used and not rows:
            raise SltaError(
                f"Calibration source {self.source!r} has no record to hold out: calibration used every usable one. "
                "Add records to it, or calibrate with fewer 'samples'."
            )
        if not rows:
            raise SltaError(
                f"Calibration source {self.source!r} has no usable record: all {len(records)} are empty, or the "
                f"tokenizer of {self.tokenizer.name_or_path} makes no token of their text; name another source, or a "
                "'template' of fields with text."
            )
        if skipped and not used:
            LOG.warning("Calibration source %r: skipped %d empty records.", self.source, skipped)
        if len(rows) < samples:
            which = "records that calibration did not use" if used else "usable records that 'samples' asks for"
            LOG.warning("Calibration source %r has only %d of the %d %s.", self.source, len(rows), samples, which)
        token_ids, indices = tuple(rows.values()), tuple(rows)
        return CalibrationData(self.source, self.template, token_ids, indices, tuple(answers), skipped)

    def _encode(self, text: Text) -> tuple[tuple[int, ...], Span | None]:
        """A text's token ids, none if all are special, and which of them are its answer."""
        if not text.text.strip():
            return (), None
        shown = self._prefix(text.text)
        # A chat template writes the special tokens itself; the tokenizer would write the first one again.
        ids, places = self._tokenize(shown, special=not text.is_chat)
        special = 0 if text.is_chat else self.tokenizer.num_special_tokens_to_add()
        begins = ids[:2] == [self.tokenizer.bos_token_id] * 2
        ends = ids[-2:] == [self.tokenizer.eos_token_id] * 2
        if special and (begins or ends):  # the text already holds a token that the tokenizer adds
            own, _ = self._tokenize(shown, special=False)
            begins = begins and ids[1 : 1 + len(own)] == own
            ends = ends and ids[-1 - len(own) : -1] == own
            ids, places = ids[begins : len(ids) - ends], places[begins:]
        if len(ids) <= special:
            return (), None
        row = tuple(ids[: self.max_tokens])  # the tokenizer's own truncation may cut at the beginning
        first, last = text.answer or (0, 0)
        inside = [i for i, (begin, end) in enumerate(places) if max(begin, first) < min(end, last)]
        # Its first token must be predicted from another, and be in the row.
        return row, (inside[0], inside[-1] + 1) if inside and 0 < inside[0] < len(row) else None

    def _prefix(self, text: str) -> str:
        """A prefix long enough to hold ``max_tokens`` tokens: a book would take minutes to tokenize."""
        length = CHARACTERS_PER_TOKEN * self.max_tokens
        while len(text) > length and len(self._tokenize(text[:length], special=False)[0]) < 2 * self.max_tokens:
            length *= 4
        return text[:length]

    def _tokenize(self, text: str, special: bool) -> tuple[list[int], list[Span]]:
        """A text's token ids, and the characters that each stands for, which a slow tokenizer does not tell."""
        fast = self.tokenizer.is_fast
        with reading(f"The tokenizer of {self.tokenizer.name_or_path}", f"fails at calibration source {self.source!r}"):
            encoding = self.tokenizer(
                text,
                add_special_tokens=special,
                padding=False,
                truncation=False,
                return_offsets_mapping=fast,
                verbose=False,
            )
            return list(encoding["input_ids"]), list(encoding["offset_mapping"]) if fast else []

    def _render_chat(self, turns: list[dict[str, Any]]) -> str:
        template = self._chat_template
        if "strftime_now" in template:
            template = CLOCK + template
        return str(self.tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False))

    @cached_property
    def _chat_template(self) -> str:
        """The base model's chat template, or else the expert's.

        Raises:
            SltaError: neither has one.
        """
        template, why = _chat_template_of(self.tokenizer), ""
        if template is None:
            try:
                template = _chat_template_of(self.expert_tokenizer())
            except SltaError as error:
                why = f" ({error.message.rstrip('.')})"
        if template is None:
            raise SltaError(
                f"Calibration source {self.source!r} holds conversations, but neither the base model's tokenizer nor "
                f"the expert's has a chat template{why}: give the expert a 'template'."
            )
        return template


def _chat_template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    try:
        return tokenizer.get_chat_template()
    except (ValueError, NotImplementedError):
        return None
