"""Calibration sources: the records of the file or dataset that a recipe names, and the samples drawn from them.

Samples are token ids, in an order that depends on the seed alone. Local files are read whole; data that do not fit into
memory can be read as ``hf:FOLDER``. CSV and JSON are not left to ``datasets``, which turns text into dates and numbers,
adds fields, and drops one where the first row has too many.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import glob
import gzip
import hashlib
import json
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

from mergekit_slta.data.records import MARK, Record, Span, Text, Turns, UnfitRecord, record_text
from mergekit_slta.errors import (
    MachineError,
    SltaError,
    first_line,
    is_disk_full,
    is_out_of_memory,
    one_line,
    printable,
    reading,
)
from mergekit_slta.files import published_path
from mergekit_slta.words import counted, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)

DATASET_PREFIX = "hf:"
CHARACTERS_PER_TOKEN = 64  # more than the tokens of any text have on average
SEARCHED = 100  # for each held-out sample, at most so many rows whose answers lie beyond ``max_tokens``
# Chat templates that ask for the date get this one, so that the tokens are the same every day. It is the date that
# Llama 3.2's chat template writes when it is given none.
CHAT_DATE = datetime.datetime(2024, 7, 26)
MARKER = re.compile("<[|\uff5c][^<>|\uff5c{}\\s]+[|\uff5c]>")  # control tokens of most chat templates
THOUGHTLESS = re.compile(r"<think>(\s|\\n)*</think>")  # also in JSON
NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


@dataclass(frozen=True)
class CalibrationData:
    """The samples drawn from one source."""

    source: str  # as the recipe spells it
    token_ids: tuple[tuple[int, ...], ...]  # a row per sample, in the order drawn; no padding
    records: tuple[int, ...]  # each row's index in the source
    # The place of the record's answer in each row: the index of its first token, and of the one after its last, which
    # is beyond the row if the answer is cut off. None for a record without a known answer, or one beyond the row.
    answers: tuple[Span | None, ...]
    revision: str = ""  # of a dataset from the Hub: the commit, or "" if it is not known
    has_chats: bool = False  # a chat template wrote some

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the token ids: per row its length and its ids, all as little-endian int64."""
        digest = hashlib.sha256()
        for row in self.token_ids:
            digest.update(np.array((len(row), *row), dtype="<i8").tobytes())
        return digest.hexdigest()


class _Sample(NamedTuple):
    """A record that is drawn; its answer may lie beyond ``max_tokens``."""

    record: int
    row: tuple[int, ...]
    answer: Span | None
    text: Text


@dataclass(frozen=True)
class CalibrationSource:
    """A source to draw samples from."""

    source: str  # what the recipe gives as ``calibration``
    records: Sequence[Record] = field(repr=False)  # of the source; see ``read_records``
    template: str  # a ``str.format`` string over a record's fields, or "" to choose the fields by their names
    tokenizer: PreTrainedTokenizerBase  # which tokenizes everything
    # Called only if that one lacks a chat template; may raise an SltaError.
    load_expert_tokenizer: Callable[[], PreTrainedTokenizerBase]
    max_tokens: int  # of a sample, from its beginning
    seed: int  # decides the order in which records are taken, ``random.Random(seed).sample(range(n), n)``

    def draw(
        self, samples: int, used: Sequence[CalibrationData] = (), *, seed: int | None = None, quiet: bool = False
    ) -> CalibrationData:
        """Draw samples: records in the seed's order, without the empty and the unfit ones, until there are enough.

        What is skipped, left out or cut is logged as a warning, in a sentence each; so is a lack of records.

        Args:
            used: samples drawn before; records with the same tokens as one of them, or as one that is drawn now, are
                left out, and none may be left; so are those whose answer lies beyond ``max_tokens``, if others are
                left. If they are of this source, nothing is said of the others.
            seed: another one than the source's own.
        """
        records = self.records
        fields = getattr(records, "column_names", None) or dict.fromkeys(name for record in records for name in record)
        source = f"Calibration source {self.source!r}"
        # Fields that no record has are refused before each one is looked at.
        record_text(dict.fromkeys(fields), self.template, where=source, render_chat=self._render_chat)
        repeated = {row for data in used for row in data.token_ids}
        drawn, unanswered = list[_Sample](), list[_Sample]()
        empty, unfit = 0, list[str]()
        for index in random.Random(self.seed if seed is None else seed).sample(range(len(records)), len(records)):
            if len(drawn) == samples or len(unanswered) == SEARCHED * samples:
                break
            try:
                where = f"row {index + 1}"
                text = record_text(self.record(index), self.template, where=where, render_chat=self._render_chat)
            except UnfitRecord as error:
                unfit.append(str(error))
                continue
            row, answer = self._encode(text)
            if not row:
                empty += 1
            elif row not in repeated:
                lacks_answer = used and answer and answer[0] >= self.max_tokens
                (unanswered if lacks_answer else drawn).append(_Sample(index, row, answer, text))
                if used:
                    repeated.add(row)
        described = quiet or any(data.source == self.source for data in used)
        if not (drawn or unanswered) and (not used or (unfit and not described)):
            all_empty = f"all {empty} are empty. Name another source, or give a 'template' of fields with text."
            none_fits = f"{len(unfit)} do not fit and {empty} are empty, the first because {next(iter(unfit), '')}"
            raise SltaError(f"{source} has no usable row: {none_fits if unfit else all_empty}")
        for sentence in [] if described else self._notes([*drawn, *unanswered], empty, unfit):
            LOG.warning("%s: %s", source, sentence)
        drawn = drawn or unanswered[:samples]
        if 0 < len(drawn) < samples and not quiet:
            which = "prompts that calibration did not use" if used else "prompts that 'samples' sets"
            LOG.warning("%s has only %d of the %d %s.", source, len(drawn), samples, which)
        rows, numbers = tuple(sample.row for sample in drawn), tuple(sample.record for sample in drawn)
        answers = tuple(s.answer if s.answer and s.answer[0] < self.max_tokens else None for s in drawn)
        has_chats = any(sample.text.is_chat for sample in drawn)
        return CalibrationData(self.source, rows, numbers, answers, _revision(records), has_chats)

    def record(self, index: int) -> Record:
        """A row, which of a dataset is read now."""
        with reading(f"Calibration source {self.source!r}", fix="save it in another form"):
            row: Record = self.records[index]
            return row

    def _notes(self, drawn: list[_Sample], empty: int, unfit: list[str]) -> Iterator[str]:
        """What the prompts lack of the rows, a sentence each."""
        if empty:
            yield f"skipped {counted(empty, 'empty row')}."
        if unfit:
            yield f"skipped {counted(len(unfit), 'row')}, the first because {unfit[0]}"
        if blank := sum(sample.text.is_pair and not sample.text.answer for sample in drawn):
            yield f"{blank} of {len(drawn)} prompts have an empty answer: write it, or remove the prompt."
        if copies := len(drawn) - len({sample.row for sample in drawn}):
            yield f"{copies} of {len(drawn)} prompts repeat another, as far as 'max_tokens' goes: remove copies."
        left_out = Counter(("the chat template", part) for sample in drawn for part in sample.text.left_out)
        left_out.update(("calibration", f"the field {name!r}") for sample in drawn for name in sample.text.unread)
        for (who, part), count in left_out.items():
            fix = "write it in a 'template' or in the field 'text'"
            yield f"{who} leaves out {part} of {count} of {len(drawn)} prompts: {fix}."
        yield from self.control_tokens([sample.text.conversation for sample in drawn])
        texts = [sample.text for sample in drawn]
        markers = {
            marker
            for text in texts
            for marker in (self._template_markers if text.is_chat else MARKER.findall(text.text))
            if marker in text.text
        }
        if split := markers - self.tokenizer.get_vocab().keys():
            yield (
                f"the tokenizer of {self.tokenizer.name_or_path} splits {printable(' and '.join(sorted(split)))} into "
                "pieces: add 'tokenizer: {source: EXPERT}' to the recipe if the expert has the base model's ids, or "
                "give the expert a 'template' or rows without them."
            )
        # In rows that are written for a chat model; some tokenizers add blanks, too.
        written = [*filter(str.strip, self.tokenizer.get_added_vocab()), "[INST]"]
        pairs = [text for text in texts if text.is_pair and not any(marker in text.text for marker in written)]
        with contextlib.suppress(SltaError):  # no model has a chat template
            if pairs and self._chat_tokenizer:
                fix = "for experts that were trained on chats, give them as 'messages'"
                yield f"{len(pairs)} of {len(texts)} prompts reach the models without a chat template: {fix}."
        if "\\n" in self.template:
            yield "the template has a backslash and an n: for a new line, write it in double quotes."
        chats = [(text.text, text.conversation) for text in texts if text.is_chat]
        if thoughts := sum(bool(THOUGHTLESS.search(text) and not THOUGHTLESS.search(chat)) for text, chat in chats):
            fix = "for a merge that thinks, take answers with their reasoning, such as those of `ask`"
            yield f"the chat template writes an empty thought before {thoughts} of {len(texts)} answers: {fix}."
        if not self.tokenizer.is_fast and any(text.answer for text in texts):
            name = self.tokenizer.name_or_path
            yield f"the tokenizer of {name} does not tell where answers begin: `featcal` counts all tokens alike."
        answers = [sample.answer for sample in drawn if sample.answer]
        if beyond := [answer for answer in answers if answer[1] > self.max_tokens]:
            cut = sum(begin < self.max_tokens for begin, _ in beyond)
            said = f"{len(beyond)} of {len(drawn)} answers lie beyond max_tokens {self.max_tokens}"
            said += f", {cut} of them in part" * bool(cut)
            yield f"{said}: raise 'max_tokens' to {max(end for _, end in beyond)}."

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

    def _render_chat(self, turns: Turns, tools: list[Any] | None = None, asks: bool = False, **switches: Any) -> str:
        template = str(self._chat_tokenizer.get_chat_template(tools=tools))
        template = NOW.sub(lambda call: repr(CHAT_DATE.strftime(call[2])), template)
        how: dict[str, Any] = {"chat_template": template, "add_generation_prompt": asks, "tokenize": False}
        return str(self.tokenizer.apply_chat_template(turns, tools, **how, **switches))

    def asked(self, record: Record, where: object, apart: bool = True) -> tuple[Text, tuple[int, ...]]:
        """A record of ``messages`` as a model is given it that is to answer: as text, and the text's token ids.

        Without a chat template it is the contents of the turns, a line each, the last one's ended if the answer is to
        stand ``apart``. An UnfitRecord if the template refuses it.
        """
        is_chat, as_chat = has_chat_template(self.tokenizer), partial(self._render_chat, asks=True)
        render = as_chat if is_chat else lambda turns, **_: "\n".join(turn["content"] for turn in turns) + "\n" * apart
        text = record_text(record, "", where=where, render_chat=render)
        ids, _ = self._encode(Text(text.text, is_chat))
        return text, ids if is_chat or ids[-1:] != (self.tokenizer.eos_token_id,) else ids[:-1]

    def control_tokens(self, prompts: Sequence[str]) -> Iterator[str]:
        """A sentence where somebody's words in prompts would become special tokens."""
        special = sorted(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        tokens = [next((token for token in special if token in words), "") for words in prompts]
        if first := next(filter(None, tokens), ""):
            number = f"{len(tokens) - tokens.count('')} of {counted(len(tokens), 'prompt')}"
            yield f"{number} hold control tokens such as {first!r}, which the model takes as its own: remove them."

    def tokens(self, record: Record) -> tuple[int, ...]:
        """The token ids of a record; none if it does not fit."""
        with contextlib.suppress(UnfitRecord):
            return self._encode(record_text(record, self.template, where="it", render_chat=self._render_chat))[0]
        return ()

    @cached_property
    def _template_markers(self) -> set[str]:
        """The control tokens of the chat template."""
        owner = self._chat_tokenizer
        return {*owner.get_added_vocab(), *MARKER.findall(str(owner.get_chat_template()))}

    @cached_property
    def _chat_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that calibrates if it has a chat template, or else the expert's."""
        tokenizer = self.tokenizer if has_chat_template(self.tokenizer) else self.load_expert_tokenizer()
        if not has_chat_template(tokenizer):
            raise SltaError(
                f"Calibration source {self.source!r} holds conversations, but neither the base model's tokenizer nor "
                "the expert's has a chat template: give the expert a 'template'."
            )
        return tokenizer


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    with contextlib.suppress(ValueError, NotImplementedError):
        return bool(tokenizer.get_chat_template())
    return False


def probe(tokenizer: Any) -> str:
    """A short conversation as a tokenizer's chat template writes it, with MARK as the answer; "" if it cannot."""
    turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as error:  # without a template, or of any kind that the template raises
        LOG.info("%s writes no conversation: %s", tokenizer.name_or_path, first_line(error))
        return ""


def end_of_turn(tokenizer: Any) -> str | None:
    """The token that a tokenizer's chat template writes after an assistant's turn; None if it shows none."""
    after = probe(tokenizer).partition(MARK)[2].lstrip()
    return max((token for token in tokenizer.get_added_vocab() if after.startswith(token)), key=len, default=None)


# The records of a source


def read_records(source: str) -> Sequence[Record]:
    """Read the records of a file (see ``READERS``), or of ``hf:DATASET[?config=...&split=...]``, in their order.

    DATASET is a repository or a local folder; of a dataset each record is read when it is used.
    """
    path = os.path.expanduser(source)
    extension = os.path.splitext(path.removesuffix(".gz"))[1].lower()
    if is_dataset(source):
        records = _read_dataset(source)
    elif extension not in READERS:
        fix = f"write '{DATASET_PREFIX}{source}' if it is a dataset or a folder"
        known = f"it must be {', '.join(READERS)}"
        raise SltaError(f"Calibration source {source!r} has no known extension: {known}; {fix}.")
    elif not os.path.isfile(path):
        problem = "is not an ordinary file" if os.path.exists(path) else "does not exist"
        asked = problem == "does not exist" and path.endswith(".jsonl")
        fix = "correct its name" + ", or write it with 'mergekit-slta ask'" * asked
        raise SltaError(f"Calibration file {source!r} {problem} (the current directory is {os.getcwd()!r}): {fix}.")
    else:
        with reading(f"Calibration file {source!r}", fix="correct it, and save it as UTF-8"):
            records = READERS[extension](path)
    if not len(records):
        raise SltaError(f"Calibration source {source!r} has no rows: add some, or name another source.")
    return records


def _opened(path: str | Path, newline: str | None = None) -> TextIO:
    """A text file, also one that gzip has packed."""
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return cast(TextIO, (gzip.open if is_packed else open)(path, "rt", encoding="utf-8-sig", newline=newline))


def _read_json(path: str) -> list[Record]:
    """A list of objects, or objects one after the other, each on a line or on several, as jq writes them."""
    decoder, values, end = json.JSONDecoder(parse_constant=lambda _: None), list[Any](), 0  # pandas writes NaN
    with _opened(path) as file:
        text = file.read()
    while begin := re.compile(r"\S").search(text, end):
        try:
            value, end = decoder.raw_decode(text, begin.start())
        except ValueError as error:
            line = 1 + text.count("\n", 0, begin.start())
            raise ValueError(f"no JSON object in line {line}: {error}") from error
        values.append(value)
    records: list[Record] = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if len(records) == 1 and isinstance(only := records[0], dict) and {*map(type, only.values())} == {dict}:
        raise ValueError(f"it is a table by columns, {listed(only)}, not by rows, as pandas writes by orient='records'")
    if odd := [number for number, record in enumerate(records, 1) if not isinstance(record, dict)]:
        raise ValueError(f"row {odd[0]} is no object; it must hold JSON objects, one after the other or in a list")
    return records


def _read_text(path: str) -> list[Record]:
    with _opened(path) as file:
        return [{"text": line.removesuffix("\n")} for line in file if line.strip()]


def _read_csv(path: str) -> list[Record]:
    csv.field_size_limit(2**31 - 1)  # the default is 128 KiB, and a document may be longer
    with _opened(path, newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = [*(reader.fieldnames or ())]
        if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), "")):
            raise ValueError(f"its fields are separated by {other!r}, not by commas")
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise ValueError(f"its first line names {twice[0]!r} twice")
        records: list[Record] = [*reader]
    if more := next((number for number, record in enumerate(records, 1) if None in record), None):
        raise ValueError(f"row {more} has more fields, separated by commas, than the first line names")
    return records


def _read_parquet(path: str) -> list[Record]:
    import datasets  # slow to import

    # Streaming leaves no copy of the file in the user's cache.
    stream = partial(datasets.load_dataset, "parquet", data_files=glob.escape(path), split="train", streaming=True)
    return list(stream(columns=_text_columns(path, stream().features)))


READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet, ".txt": _read_text}


def _saved_files(folder: Path) -> dict[str, str]:
    """The files of each split in a folder that ``save_to_disk`` wrote; none in another folder."""
    splits = {"train": folder} if (folder / "state.json").is_file() else {}
    if (listing := folder / "dataset_dict.json").is_file():
        splits = {split: folder / split for split in json.loads(listing.read_text(encoding="utf-8"))["splits"]}
    return {split: f"{glob.escape(str(part))}/*.arrow" for split, part in splits.items()}


def _text_columns(source: str, features: Mapping[str, Any]) -> list[str]:
    """The columns without pictures, sound and the like, which take further libraries and memory to decode."""
    kinds = {name: repr(kind).replace("Json(decode=True)", "") for name, kind in features.items()}
    names = [name for name, kind in kinds.items() if "decode=True" not in kind]
    if left := [name for name in features if name not in names]:
        LOG.warning("Calibration source %r: pictures and sound are left out, the fields %s.", source, listed(left))
    return names


def _read_dataset(source: str) -> Sequence[Record]:
    import datasets  # slow to import

    name, config, split = parse_dataset(source)

    def load(name: str) -> Any:
        files, place = _saved_files(Path(name)), os.path.abspath(name) if os.path.isdir(name) else name
        return datasets.load_dataset("arrow" if files else place, config, data_files=files or None, split=split)

    try:
        try:
            loaded = load(name)
        except (ConnectionError, HTTPError):
            # ``hf download`` puts a dataset where ``datasets`` does not look without a network.
            loaded = load(huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True))
    except Exception as error:  # datasets lets the errors of its readers and of the Hub pass
        if is_out_of_memory(error):
            raise
        unreached = isinstance(error, (LocalEntryNotFoundError, ConnectionError))
        kind = MachineError if unreached or is_disk_full(error) else SltaError
        raise kind(f"Calibration source {source!r} cannot be read ({one_line(error)}).") from error
    if not split:
        split = "train" if len(loaded) > 1 else next(iter(loaded))
        if split not in loaded:
            splits = ", ".join(map(str, loaded))
            raise SltaError(f"Calibration source {source!r} has several splits: choose with '?split=' from {splits}.")
        if split != "train":
            LOG.warning("Calibration source %r has only the split %s, which is read.", source, split)
        loaded = loaded[split]
    return loaded.select_columns(_text_columns(source, loaded.features))


def _revision(records: Sequence[Record]) -> str:
    """The commit of a dataset from the Hub, by which ``datasets`` names the folder of its cache; else empty."""
    caches = (Path(file["filename"]).parent.name for file in getattr(records, "cache_files", ()))
    return next((name for name in caches if re.fullmatch("[0-9a-f]{40}", name)), "")


# The names of sources


def is_dataset(source: str) -> bool:
    """Whether a source is a dataset, which may have to be downloaded, rather than a file."""
    return source.startswith(DATASET_PREFIX)


def parse_dataset(source: str) -> tuple[str, str | None, str | None]:
    """The name, configuration and split in ``hf:NAME[?config=...&split=...]``; the name may be a folder's path."""
    name, _, query = source.removeprefix(DATASET_PREFIX).partition("?")
    # urllib's parser would read the plus sign that a split may hold as a space.
    pairs = [setting.partition("=")[::2] for setting in query.split("&") if query]
    settings = dict(pairs)
    valid = len(settings) == len(pairs) and settings.keys() <= {"config", "split"} and all(settings.values())
    if not name or not valid:
        ends = "alone or followed by '?config=NAME', '?split=NAME' or '?config=NAME&split=NAME'"
        raise SltaError(f"Calibration source {source!r} must be '{DATASET_PREFIX}DATASET', {ends}.")
    return os.path.expanduser(name), settings.get("config"), settings.get("split")


def source_key(source: str) -> tuple[str, ...]:
    """Identify a calibration source: the key is equal for two spellings of the same file or dataset."""
    if not is_dataset(source):
        return ("file", os.path.realpath(os.path.expanduser(source)))
    name, config, split = parse_dataset(source)
    name = os.path.realpath(name) if os.path.isdir(name) else name.lower()
    return ("dataset", name, config or "default", split or "train")


def source_name(source: str) -> str:
    """A source's name for published files: the recipe's spelling, but only the last part of a private path."""
    if not is_dataset(source):
        return published_path(source)
    name, mark, query = source.removeprefix(DATASET_PREFIX).partition("?")
    return DATASET_PREFIX + published_path(name) + mark + query
