"""Calibration data: samples drawn from a source as token ids, in an order that depends on the seed alone."""

from __future__ import annotations

import datetime
import hashlib
import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mergekit_slta.data.records import Span, Text, record_text, require_fields
from mergekit_slta.data.sources import read_records
from mergekit_slta.errors import SltaError, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 64  # more than the tokens of any text have on average
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
    """

    source: str
    template: str
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[int, ...]
    answers: tuple[Span | None, ...]

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
        tokenizer: the tokenizer of the base or merged model, which tokenizes everything.
        expert_tokenizer: loads the expert's tokenizer, or raises an SltaError; called only if ``tokenizer`` lacks a
            chat template that is needed.
        max_tokens: how many tokens of a sample to keep, from its beginning.
        seed: decides the order in which records are taken, ``random.Random(seed).sample(range(n), n)``.
    """

    source: str
    template: str
    tokenizer: PreTrainedTokenizerBase
    expert_tokenizer: Callable[[], PreTrainedTokenizerBase]
    max_tokens: int
    seed: int

    def draw(self, samples: int, used: CalibrationData | None = None) -> CalibrationData:
        """Draw samples: records in the seed's order, without the empty ones, until there are enough.

        If there are fewer than ``samples``, a warning is logged.

        Args:
            samples: how many.
            used: samples drawn before; records with the same tokens as one of them are left out.

        Raises:
            SltaError: the source cannot be read, a record cannot be turned into text, or no record is usable.
        """
        records = read_records(self.source)
        fields = getattr(records, "column_names", None) or dict.fromkeys(name for record in records for name in record)
        require_fields(fields, self.template, self.source)
        repeated = set(used.token_ids) if used else set()
        rows: dict[int, tuple[int, ...]] = {}
        answers = []
        skipped, split = 0, set[str]()
        for index in random.Random(self.seed).sample(range(len(records)), len(records)):
            if len(rows) == samples:
                break
            where = f"Record {index + 1} of calibration source {self.source!r}"
            text = record_text(records[index], self.template, where=where, render_chat=self._render_chat)
            row, answer = self._encode(text)
            split |= {marker for marker in self._split_markers if marker in text.text} if text.is_chat else set()
            if not row:
                skipped += 1
            elif row not in repeated:
                rows[index] = row
                answers.append(answer)
        if not rows:
            raise SltaError(
                f"Calibration source {self.source!r} has no record to hold out: calibration used every usable one. Add "
                "records to it, or calibrate with fewer 'samples'."
                if used
                else f"Calibration source {self.source!r} has no usable record: all {len(records)} are empty. Name "
                "another source, or a 'template' of fields with text."
            )
        if skipped and not used:
            LOG.warning("Calibration source %r: skipped %d empty records.", self.source, skipped)
        if split and not used:
            LOG.warning(
                "Calibration source %r: the tokenizer of %s splits %s of the chat template into pieces: add "
                "'tokenizer: {source: EXPERT}' to the recipe if the expert has the base model's ids, or give the "
                "expert a 'template' without them.",
                *(self.source, self.tokenizer.name_or_path, " and ".join(sorted(split))),
            )
        if len(rows) < samples:
            which = "records that calibration did not use" if used else "usable records that 'samples' asks for"
            LOG.warning("Calibration source %r has only %d of the %d %s.", self.source, len(rows), samples, which)
        return CalibrationData(self.source, self.template, tuple(rows.values()), tuple(rows), tuple(answers))

    def _encode(self, text: Text) -> tuple[tuple[int, ...], Span | None]:
        """A text's token ids, none if all are special, and which of them are its answer."""
        if not text.text.strip():
            return (), None
        prefix = text.text[: CHARACTERS_PER_TOKEN * self.max_tokens]  # a book would take minutes to tokenize
        with reading(f"The tokenizer of {self.tokenizer.name_or_path}", f"fails at calibration source {self.source!r}"):
            encoding = self.tokenizer(
                prefix,
                add_special_tokens=not text.is_chat,  # a chat template writes them itself
                padding=False,
                truncation=False,  # which may cut at the beginning
                return_offsets_mapping=self.tokenizer.is_fast,
                verbose=False,
            )
        ids: list[int] = encoding["input_ids"]
        places: list[Span] = encoding.get("offset_mapping", [])  # a slow tokenizer does not tell each token's place
        special = 0 if text.is_chat else self.tokenizer.num_special_tokens_to_add()
        begins = ids[:2] == [self.tokenizer.bos_token_id] * 2
        ends = ids[-2:] == [self.tokenizer.eos_token_id] * 2
        if special:  # the text may already hold a token that the tokenizer adds
            ids, places = ids[begins : len(ids) - ends], places[begins:]
        if len(ids) <= special:
            return (), None
        row = tuple(ids[: self.max_tokens])
        first, last = text.answer or (0, 0)
        inside = [i for i, (begin, end) in enumerate(places) if max(begin, first) < min(end, last)]
        # Its first token must be predicted from another, and be in the row.
        return row, (inside[0], inside[-1] + 1) if inside and 0 < inside[0] < len(row) else None

    def _render_chat(self, turns: list[dict[str, Any]]) -> str:
        template = self._chat_template
        if "strftime_now" in template:
            template = CLOCK + template
        return str(self.tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False))

    @cached_property
    def _chat_owner(self) -> PreTrainedTokenizerBase:
        """The tokenizer whose chat template is used."""
        return self.tokenizer if _chat_template_of(self.tokenizer) else self.expert_tokenizer()

    @cached_property
    def _split_markers(self) -> set[str]:
        """The control tokens of the chat template that the tokenizer does not know."""
        markers = {*self._chat_owner.get_added_vocab(), *re.findall(r"<\|[^<>|{}\s]+\|>", self._chat_template)}
        return markers - self.tokenizer.get_vocab().keys()

    @cached_property
    def _chat_template(self) -> str:
        """The tokenizer's chat template, or else the expert's.

        Raises:
            SltaError: neither has one.
        """
        template = _chat_template_of(self._chat_owner)
        if template is None:
            raise SltaError(
                f"Calibration source {self.source!r} holds conversations, but neither the base model's tokenizer nor "
                "the expert's has a chat template: give the expert a 'template'."
            )
        return template


def _chat_template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    try:
        return tokenizer.get_chat_template()
    except (ValueError, NotImplementedError):
        return None
