"""Calibration data: samples drawn from a source as token ids, in an order that depends on the seed alone."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mergekit_slta.data.chats import Span, Turns, UnfitRecord
from mergekit_slta.data.records import Text, record_text
from mergekit_slta.data.sources import read_records
from mergekit_slta.errors import SltaError, reading
from mergekit_slta.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)

SHOWN = 150  # characters at the beginning and at the end of a sample that ``check`` shows
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
        example: the first sample as the model sees it, in a sentence.
    """

    source: str
    template: str
    token_ids: tuple[tuple[int, ...], ...]
    records: tuple[int, ...]
    answers: tuple[Span | None, ...]
    example: str = ""

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
        """Draw samples: records in the seed's order, without the empty and the unfit ones, until there are enough.

        What is skipped, left out or cut is logged as a warning, in a sentence each; so is a lack of records.

        Args:
            samples: how many.
            used: samples drawn before; records with the same tokens as one of them are left out, none may be left, and
                nothing is said of the others.

        Raises:
            SltaError: the source cannot be read, or no record is usable.
        """
        records = read_records(self.source)
        fields = getattr(records, "column_names", None) or dict.fromkeys(name for record in records for name in record)
        source = f"Calibration source {self.source!r}"
        # Fields that no record has are refused before each one is looked at.
        record_text(dict.fromkeys(fields), self.template, where=source, render_chat=self._render_chat)
        repeated = set(used.token_ids) if used else set()
        rows: dict[int, tuple[int, ...]] = {}
        answers: list[Span | None] = []
        left_out, split = Counter[str](), set[str]()
        empty, unfit, reason = 0, 0, ""
        for index in random.Random(self.seed).sample(range(len(records)), len(records)):
            if len(rows) == samples:
                break
            try:
                text = record_text(
                    records[index], self.template, where=f"record {index + 1}", render_chat=self._render_chat
                )
            except UnfitRecord as error:
                unfit, reason = unfit + 1, reason or str(error)
                continue
            row, answer = self._encode(text)
            split |= {marker for marker in self._split_markers if marker in text.text} if text.is_chat else set()
            if not row:
                empty += 1
            elif row not in repeated:
                rows[index] = row
                answers.append(answer)
                left_out.update(text.left_out)
        if not (rows or used):
            all_empty = f"all {empty} are empty. Name another source, or a 'template' of fields with text."
            none_fits = f"{unfit} do not fit and {empty} are empty, the first because {reason}"
            raise SltaError(f"{source} has no usable record: {none_fits if unfit else all_empty}")
        for sentence in [] if used else self._notes(empty, unfit, reason, left_out, split, answers):
            LOG.warning("%s: %s", source, sentence)
        if 0 < len(rows) < samples:
            which = "records that calibration did not use" if used else "usable records that 'samples' asks for"
            LOG.warning("%s has only %d of the %d %s.", source, len(rows), samples, which)
        reached = tuple(answer if answer and answer[0] < self.max_tokens else None for answer in answers)
        example = self._example(*next(iter(rows.items())), answers[0]) if rows else ""
        return CalibrationData(self.source, self.template, tuple(rows.values()), tuple(rows), reached, example)

    def _example(self, index: int, row: tuple[int, ...], answer: Span | None) -> str:
        def shown(begin: int, end: int) -> str:
            text = str(self.tokenizer.decode([*row[begin:end]], clean_up_tokenization_spaces=False))
            return repr(text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} … {text[-SHOWN:]}")

        sees = f"Record {index + 1} of {self.source!r} as the model sees it: {shown(0, len(row))}"
        if not answer:
            return f"{sees}; no answer is known."
        return f"{sees}; its answer {f'is {shown(*answer)}' if answer[0] < len(row) else 'lies beyond max_tokens'}."

    def _notes(
        self,
        empty: int,
        unfit: int,
        reason: str,
        left_out: Counter[str],
        split: set[str],
        answers: list[Span | None],
    ) -> Iterator[str]:
        """What of the records is not in the samples, a sentence each."""
        if empty:
            yield f"skipped {counted(empty, 'empty record')}."
        if unfit:
            yield f"skipped {counted(unfit, 'record')}, the first because {reason}"
        for part, count in left_out.items():
            yield (
                f"the chat template leaves out {part} of {count} of {len(answers)} records: write it by a 'template', "
                "or as the record's 'text'."
            )
        if split:
            yield (
                f"the tokenizer of {self.tokenizer.name_or_path} splits {' and '.join(sorted(split))} of the chat "
                "template into pieces: add 'tokenizer: {source: EXPERT}' to the recipe if the expert has the base "
                "model's ids, or give the expert a 'template' without them."
            )
        if beyond := [answer for answer in answers if answer and answer[1] > self.max_tokens]:
            cut = sum(begin < self.max_tokens for begin, _ in beyond)
            yield (
                f"{len(beyond)} of {len(answers)} answers lie beyond max_tokens {self.max_tokens}"
                f"{f', {cut} of them in part' * bool(cut)}: raise it to {max(end for _, end in beyond)}."
            )

    def _encode(self, text: Text) -> tuple[tuple[int, ...], Span | None]:
        """A text's token ids, none if all are special, and which of them are its answer, also beyond ``max_tokens``."""
        if not text.text.strip():
            return (), None
        first, last = text.answer or (0, 0)
        # A book would take minutes to tokenize; what is before an answer is counted.
        prefix = text.text[: max(CHARACTERS_PER_TOKEN * self.max_tokens, last if self.tokenizer.is_fast else 0)]
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
        inside = [i for i, (begin, end) in enumerate(places) if max(begin, first) < min(end, last)]
        # Its first token must be predicted from another.
        return tuple(ids[: self.max_tokens]), (inside[0], inside[-1] + 1) if inside and inside[0] else None

    def _render_chat(self, turns: Turns, tools: list[Any] | None = None) -> str:
        template = str(self._chat_tokenizer.get_chat_template(tools=tools))
        if "strftime_now" in template:
            template = CLOCK + template
        return str(self.tokenizer.apply_chat_template(turns, tools, chat_template=template, tokenize=False))

    @cached_property
    def _split_markers(self) -> set[str]:
        """The control tokens of the chat template that the tokenizer does not know."""
        owner = self._chat_tokenizer
        markers = {*owner.get_added_vocab(), *re.findall(r"<\|[^<>|{}\s]+\|>", str(owner.get_chat_template()))}
        return markers - self.tokenizer.get_vocab().keys()

    @cached_property
    def _chat_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that calibrates if it has a chat template, or else the expert's.

        Raises:
            SltaError: neither has one.
        """
        for load in (lambda: self.tokenizer, self.expert_tokenizer):
            tokenizer = load()
            with contextlib.suppress(ValueError, NotImplementedError):
                tokenizer.get_chat_template()
                return tokenizer
        raise SltaError(
            f"Calibration source {self.source!r} holds conversations, but neither the base model's tokenizer nor "
            "the expert's has a chat template: give the expert a 'template'."
        )
