"""Calibration data: samples drawn from a source as token ids, in an order that depends on the seed alone."""

from __future__ import annotations

import datetime
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mergekit_slta.data.records import Record, record_text
from mergekit_slta.data.sources import Place, read_records
from mergekit_slta.errors import SltaError, logger, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logger(__name__)

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
        answers: where in each row its record's answer is: the first token, and the one after the last, which is beyond
            the row if the answer is cut off; None for a record that has no answer by its shape, or whose answer cannot
            be told from the text around it.
        skipped: how many empty records were skipped.
        complete: how many texts already hold the special token that the tokenizer would add.
    """

    source: str
    template: str
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[int, ...]
    answers: tuple[tuple[int, int] | None, ...]
    skipped: int
    complete: int = 0

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
        records = read_records(self.source)
        drawn = self._draw(records, samples)
        if not drawn.records:
            raise SltaError(
                f"Calibration source {self.source!r} has no usable record: all {len(records)} are empty, or the "
                f"tokenizer of {self.tokenizer.name_or_path} makes no token of their text; name another source, or a "
                "'template' of fields with text."
            )
        if drawn.skipped:
            LOG.warning("Calibration source %r: skipped %d empty records.", self.source, drawn.skipped)
        if drawn.complete:
            LOG.warning(
                "Calibration source %r: %d texts already hold the tokenizer's special token; it is not added again.",
                self.source,
                drawn.complete,
            )
        if (usable := len(drawn.records)) < samples:
            LOG.warning(
                "Calibration source %r has only %d of the %d usable records that 'samples' asks for.",
                self.source,
                usable,
                samples,
            )
        return drawn

    def held_out(self, samples: int, used: CalibrationData) -> CalibrationData:
        """Draw the next records in the seed's order that calibration did not use.

        A record with the same tokens as a calibration sample is skipped too. If there are fewer than ``samples``, a
        warning is logged.

        Raises:
            SltaError: as for ``draw``, or calibration left no usable record.
        """
        drawn = self._draw(read_records(self.source), samples, used)
        if not drawn.records:
            raise SltaError(
                f"Calibration source {self.source!r} has no record to hold out: calibration used every usable one. "
                "Add records to it, or calibrate with fewer 'samples'."
            )
        if (usable := len(drawn.records)) < samples:
            LOG.warning(
                "Calibration source %r has only %d records that calibration did not use, not %d.",
                self.source,
                usable,
                samples,
            )
        return drawn

    def _draw(self, records: Sequence[Record], samples: int, used: CalibrationData | None = None) -> CalibrationData:
        passed, repeated = (set(used.records), set(used.token_ids)) if used else (set(), set())
        drawn: dict[int, tuple[int, ...]] = {}
        answers = []
        skipped = complete = 0
        for index in random.Random(self.seed).sample(range(len(records)), len(records)):
            if len(drawn) == samples:
                break
            if index in passed:
                continue
            place = Place(self.source, index)
            text = record_text(records[index], self.template, where=place, render_chat=self._render_chat)
            row, is_complete = self._encode(text.text, text.is_chat)
            if not row:
                skipped += 1
            elif row not in repeated:
                drawn[index] = row
                answers.append(self._answer(*text, row))
                complete += is_complete
        rows, indices = tuple(drawn.values()), tuple(drawn)
        return CalibrationData(self.source, self.template, rows, indices, tuple(answers), skipped, complete)

    def _answer(self, text: str, is_chat: bool, answer: str, row: tuple[int, ...]) -> tuple[int, int] | None:
        """Where the answer of a record is among its tokens, as ``CalibrationData.answers`` says it.

        The answer is the last place in the text that spells it, before what a chat template writes after it.
        """
        if not answer or not self.tokenizer.is_fast:  # only these tell which characters a token stands for
            return None
        shown = self._beginning(text)
        found = self.tokenizer(shown, add_special_tokens=not is_chat, return_offsets_mapping=True, verbose=False)
        ids, spans = found["input_ids"], found["offset_mapping"]
        end, special = len(text), set(self.tokenizer.all_special_ids)
        for token, (begin, stop) in zip(ids[::-1], spans[::-1], strict=True):
            if len(shown) < len(text) or (token not in special and text[begin:stop].strip()):
                break
            end = min(end, begin) if stop > begin else end
        first = text.rfind(answer, 0, end)
        last = first + len(answer)
        spans = spans if tuple(ids[: len(row)]) == row else spans[1:]  # the row lacks a doubled special token
        inside = [i for i, (begin, stop) in enumerate(spans) if max(begin, first) < min(stop, last)]
        if first < 0 or not inside or inside[0] == 0 or inside[0] >= len(row):
            return None
        return inside[0], inside[-1] + 1

    def _encode(self, text: str, is_chat: bool) -> tuple[tuple[int, ...], bool]:
        """A text's token ids, empty if all are special, and whether the text already held a special token."""
        if not text.strip():
            return (), False
        # A chat template writes the special tokens itself; the tokenizer would write the first one again.
        token_ids = self._tokenize(self._beginning(text), special=not is_chat)
        special = 0 if is_chat else self.tokenizer.num_special_tokens_to_add()
        begins = special > 0 and token_ids[:2] == [self.tokenizer.bos_token_id] * 2
        ends = special > 0 and token_ids[-2:] == [self.tokenizer.eos_token_id] * 2
        if begins or ends:
            own = self._tokenize(self._beginning(text), special=False)
            begins = begins and token_ids[1 : 1 + len(own)] == own
            ends = ends and token_ids[-1 - len(own) : -1] == own
        token_ids = token_ids[begins : len(token_ids) - ends]
        # The tokenizer's own truncation may cut at the beginning, so the end is cut here.
        return tuple(token_ids[: self.max_tokens]) if len(token_ids) > special else (), begins or ends

    def _beginning(self, text: str) -> str:
        """So much of a text that all tokens that are kept are decided; a text of megabytes would fill the memory."""
        length = CHARACTERS_PER_TOKEN * self.max_tokens
        while len(text) > length:
            if len(self._tokenize(text[:length], special=False)) >= 2 * self.max_tokens:
                return text[:length]
            length *= 4
        return text

    def _tokenize(self, text: str, special: bool) -> list[int]:
        with reading(f"The tokenizer of {self.tokenizer.name_or_path}", f"fails at calibration source {self.source!r}"):
            encoding = self.tokenizer(text, add_special_tokens=special, padding=False, truncation=False, verbose=False)
            return list(encoding["input_ids"])

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
        problem = f"Calibration source {self.source!r} holds conversations"
        template = _chat_template_of(self.tokenizer)
        if template is not None:
            return template
        try:
            template = _chat_template_of(self.expert_tokenizer())
        except SltaError as error:
            raise SltaError(
                f"{problem}, the base model's tokenizer has no chat template, and the expert's cannot be loaded "
                f"({error.message.rstrip('.')}): give the expert a 'template'."
            ) from error
        if template is None:
            raise SltaError(
                f"{problem}, but neither the base model's tokenizer nor the expert's has a chat template: "
                "give the expert a 'template'."
            )
        return template


def _chat_template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    try:
        return tokenizer.get_chat_template()
    except (ValueError, NotImplementedError):
        return None
