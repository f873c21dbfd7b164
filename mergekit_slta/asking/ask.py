"""Have a model answer prompts: its own answers, as calibration data that gives the very same tokens again."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import click
import torch
import transformers
from mergekit.common import get_auto_cls

from mergekit_slta import files
from mergekit_slta.data.prompts import general_prompts
from mergekit_slta.data.records import (
    CHAT_FIELDS,
    Record,
    Turns,
    UnfitRecord,
    decoded,
    is_blank,
    is_turns,
    refuse_halves,
    shared,
    turns_of,
    unread,
    with_system,
)
from mergekit_slta.data.sources import CalibrationSource, end_of_turn, has_chat_template, read_records
from mergekit_slta.engine.loop import progress_bar
from mergekit_slta.engine.memory import LIBRARIES, MASK
from mergekit_slta.errors import MachineError, SltaError, is_out_of_memory, reading, whole_number
from mergekit_slta.layers.decoder import few_queries, without_kernels
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.headers import Model, config_entry, refuse_adapter_in
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.tables import as_size
from mergekit_slta.words import counted, listed

LOG = logging.getLogger(__name__)

LOOP = 24  # an answer loops if it ends in at least this many tokens of one phrase, three times or more
BATCH, BATCH_TOKENS = 16, 2**15  # prompts that are answered together, and their tokens with the answers'
WHOLE = 2**40  # tokens: more than any prompt has
PROMPT_FIELDS = (*zip(CHAT_FIELDS), ("prompt",), ("question",), ("instruction", "input"), ("text",))


class _Prompt(NamedTuple):
    record: dict[str, Any]  # its turns and tools, without an answer
    text: str  # what the model is given
    ids: tuple[int, ...]


class _Answer(NamedTuple):
    record: dict[str, Any]  # with the answer; {} if that is empty or a loop
    cut: bool = False
    differs: bool = False  # the record does not give just the tokens that the model was given and produced
    loops: bool = False  # its end is one phrase over and over
    thinks: bool = False  # it is cut off in its reasoning


def ask(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    prompts: str | os.PathLike[str] = "",
    *,
    topics: Sequence[str] = (),
    samples: int = 100,
    max_new_tokens: int = 512,
    **options: Unpack[Options],
) -> Path:
    """Write a model's own answers to prompts, always the likeliest next token, as calibration data.

    The whole model is in memory, in the type that it is stored in, an adapter's in float32. A run that was killed
    resumes where it ended. The numbers of answers that are cut off or empty, and of skipped prompts, are logged.

    Args:
        model: a folder or a Hub id; an adapter after its base model, ``BASE+ADAPTER``.
        out: the ``.jsonl`` file to write, of rows with ``messages``, or with ``prompt`` and ``completion`` if the
            model has no chat template; also with ``text`` where its template would write something else.
        prompts: a file or dataset in a form that ``calibration`` takes, whose answers are ignored; by default the
            general prompts that come with the package.
        topics: the topics of the general prompts; by default all.
        samples: the most prompts to answer.
        max_new_tokens: the most tokens of an answer.
        options: see ``Options``.

    Returns:
        The path of the file.

    Raises:
        SltaError: the file already exists, the model or the prompts cannot be used, or no prompt is answered.
    """
    samples, max_new_tokens = whole_number("samples", samples), whole_number("max_new_tokens", max_new_tokens)
    path = files.new_file(out, ".jsonl")
    recipe = Recipe({"merge_method": "linear", "models": [{"model": os.fspath(model)}], "dtype": "float32"})
    experiment, (reference,) = opened(recipe, options), recipe.references
    opened_model, tokenizer = experiment.model(reference), experiment.tokenizer(reference)
    positions = getattr(opened_model.text_config, "max_position_embeddings", None)
    general = [{"prompt": prompt} for prompt in general_prompts(topics)]
    records: Sequence[Record] = read_records(os.fspath(prompts)) if prompts else general
    source = CalibrationSource(os.fspath(prompts), records, "", tokenizer, lambda: tokenizer, WHOLE, 0)
    asked = _asked(source, topics, samples, (positions or WHOLE) - max_new_tokens)
    checkpoint, beside = Checkpoint(opened_model), path.with_name(f"{path.name}.partial")
    run = files.digest([checkpoint.fingerprint, [prompt.ids for prompt in asked], max_new_tokens])
    answered = _finished(beside, run)
    files.write(beside, _lines(run, *answered.items()).encode())
    # Prompts of about one length are answered together, and in the same batches when the run is started again.
    order = sorted(range(len(asked)), key=lambda number: len(asked[number].ids))
    batches = list[list[int]]()
    while order:
        longest = len(asked[order[:BATCH][-1]].ids) + max_new_tokens
        count = max(1, min(BATCH, BATCH_TOKENS // longest))
        batches, order = [*batches, order[:count]], order[count:]
    batches = [batch for batch in batches if not answered.keys() >= {*batch}]
    if batches and not experiment.quiet:
        longest_rows = ((len(asked[batch[-1]].ids), len(batch)) for batch in batches)
        nbytes = max(answer_bytes(checkpoint.model, n, n + max_new_tokens, rows) for n, rows in longest_rows)
        click.echo(f"Memory: about {as_size(nbytes)}", err=True)
    with progress_bar("Answering", [reference], sum(map(len, batches)), experiment.quiet) as progress:
        loaded = _loaded(experiment, checkpoint, source) if batches else None
        progress("the first prompts", 0)
        for batch in batches:
            produced = _produced(loaded, [asked[number].ids for number in batch], max_new_tokens)
            finished = {n: _answer(source, asked[n], *ids) for n, ids in zip(batch, produced, strict=True)}
            with beside.open("a", encoding="utf-8") as file:
                file.write(_lines(*finished.items()))
            answered |= finished
            progress(f"{len(answered)} of {counted(len(asked), 'prompt')}", len(batch))
    answers = [answered[number] for number in range(len(asked))]
    if not any(answer.record for answer in answers):
        raise SltaError(f"{reference} answers none of {counted(len(answers), 'prompt')}: give other prompts.")
    total, loops = counted(len(answers), "answer"), sum(answer.loops for answer in answers)
    thoughts = sum(answer.thinks for answer in answers)
    fix = "delete the file, ask for it with --max-new-tokens 4096, and set 'max_tokens: 4608' in the recipe"
    for count, what in (
        (thoughts, f"end in the reasoning after {max_new_tokens} tokens: {fix}"),
        (sum(not answer.record for answer in answers) - loops, "are empty and left out"),
        (loops, f"repeat one phrase until they are cut off after {max_new_tokens} tokens, and are left out"),
        (
            sum(answer.cut for answer in answers) - thoughts,
            f"are cut off after {max_new_tokens} tokens, and have no end token",
        ),
        (sum(answer.differs for answer in answers), "change their tokens when their text is tokenized again"),
    ):
        if count:
            LOG.warning("%s: %d of %s %s.", path, count, total, what)
    files.write(path, _lines(*(answer.record for answer in answers if answer.record)).encode())
    beside.unlink()
    return path


def _asked(source: CalibrationSource, topics: Sequence[str], samples: int, longest: int) -> list[_Prompt]:
    """The prompts that a model is asked, with at most ``longest`` tokens; what is skipped is counted and logged."""
    if topics and source.source:
        raise SltaError("PROMPTS replaces the package's prompts, from which topics choose: give only one of the two.")
    numbers = range(len(source.records))
    asked, unfit, ignored = list[_Prompt](), list[str](), set[str]()
    is_chat = has_chat_template(source.tokenizer)
    for number in random.Random(0).sample(numbers, len(numbers)) if source.source else numbers:
        if len(asked) == samples:
            break
        row, where = source.record(number), f"row {number + 1}"
        tools, answer = row.get("tools"), row.get("completion") or row.get("response")
        try:
            record = {"messages": _turns(row, where, is_chat)} | ({"tools": tools} if tools else {})
            around = str(record["messages"][-1]["content"])[-1:], str(answer)[:1]
            apart = not any(map(str.isspace, around))  # as ``calibration`` reads them
            text, ids = source.asked(record, where, apart)
            prompt = _Prompt(record, text.text, ids)
            refuse_halves(_lines(record), where)  # also in what the template does not write
            if len(prompt.ids) > longest:
                raise UnfitRecord(f"{where} leaves no room for an answer: lower max_new_tokens (--max-new-tokens).")
            asked.append(prompt)
            ignored |= {f"the field {name!r}" for name in unread(row)} | {*text.left_out}
        except UnfitRecord as error:
            unfit.append(str(error))
    if unfit:
        skipped = f"Skipped {counted(len(unfit), 'prompt')}, the first because {unfit[0]}"
        if not asked:
            raise SltaError(skipped)
        LOG.warning("%s", skipped)
    if ignored:
        LOG.warning("The prompts leave out %s: write what the model needs into them.", " and ".join(sorted(ignored)))
    for sentence in source.control_tokens([_lines(prompt.record) for prompt in asked]):
        LOG.warning("%s", sentence)
    return asked


def _turns(record: Record, where: str, is_chat: bool) -> Turns:
    """A record as a conversation that ends before the answer; where no chat is made of it, with its blanks."""
    for fields in PROMPT_FIELDS:
        values = [record[field] for field in fields if not is_blank(record.get(field))]
        if values and (fields[0] in CHAT_FIELDS or is_turns(decoded(values[0]))):
            turns = turns_of(values[0], f"{fields[0]!r} of {where}")
            while turns and turns[-1]["role"] == "assistant":
                turns.pop()
            if turns:
                return with_system(turns, record)
        elif values and not any(isinstance(value, (list, dict)) for value in values):
            text = "\n".join(str(value).strip() if is_chat else str(value) for value in values)
            return with_system([{"role": "user", "content": text}], record)
    raise UnfitRecord(
        f"{where} has no prompt: its fields are {listed(map(str, record)) or 'none'}; name one of them 'prompt'."
    )


def answer_bytes(model: Model, prompt: int, answered: int, rows: int) -> int:
    """The bytes of a whole model as it is stored, and of keys, values and features of rows with so many tokens."""
    headers = model.tensors.values()
    stored, count = sum(header.nbytes for header in headers), sum(header.shape.numel() for header in headers)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    width, layers, heads = (config_entry(model.text_config, name) or 1 for name in names)
    keys = layers * width * (config_entry(model.text_config, "num_key_value_heads") or heads) // heads
    widest = max(header.shape[-1] for header in headers if len(header.shape) > 1)
    numbers = rows * (2 * keys * answered + (6 * width + 3 * widest) * prompt)
    mask = (1 + MASK) * rows * prompt**2 * (rows > 1)  # of rows that differ in length, and a copy
    return LIBRARIES + stored + stored // max(count, 1) * numbers + mask


def _loaded(experiment: Experiment, checkpoint: Checkpoint, source: CalibrationSource) -> Any:
    """The whole model, which generates the likeliest tokens up to an end token.

    End tokens are its own, its tokenizer's, and the one by which its chat template ends a turn.
    """
    loader = get_auto_cls(experiment.model(checkpoint.reference).architecture)
    refuse_adapter_in(Path(checkpoint.folder))
    with reading(checkpoint, "cannot be loaded"):
        trusted, folder = experiment.options.trust_remote_code, checkpoint.folder  # where an adapter is merged
        model: Any = loader.from_pretrained(folder, dtype="auto", trust_remote_code=trusted)
    if model.config.is_encoder_decoder or not model.can_generate():
        raise SltaError(f"{checkpoint} is not a decoder-only language model: only these can answer prompts.")
    own, tokenizer = model.generation_config.eos_token_id, source.tokenizer
    ends = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id}
    ends |= {tokenizer.convert_tokens_to_ids(end) for end in [end_of_turn(tokenizer)] if end}
    # The model's other settings may sample, or count the padding among the tokens that are not to be repeated.
    model.generation_config = transformers.GenerationConfig(eos_token_id=sorted(ends - {None}), pad_token_id=0)
    model.name_or_path = str(checkpoint)
    try:
        return model.to(experiment.device).eval()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fix = "let it answer on the CPU (the same `ask` without --cuda or --device)"
        raise MachineError(f"{checkpoint} does not fit into the memory of {experiment.device}: {fix}.") from error


def _produced(model: Any, rows: Sequence[Sequence[int]], limit: int) -> list[tuple[list[int], list[int]]]:
    """What a model adds to each row: at most ``limit`` tokens, and the end token, [] if none is reached.

    Rows that do not fit into memory together are taken in halves, and rows of several lengths one length after the
    other where padding would change them: layers carry something from token to token, or count positions by tokens.
    """
    needs_one_length = any(
        getattr(module, "_is_stateful", False) or hasattr(module, "create_position_ids_from_input_ids")
        for module in model.modules()
    )
    if needs_one_length and len({*map(len, rows)}) > 1:
        return [answer for _, same in groupby(rows, len) for answer in _produced(model, [*same], limit)]
    width, ends = max(map(len, rows)), model.generation_config.eos_token_id
    padded = torch.tensor([[0] * (width - len(row)) + [*row] for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    try:
        checks = transformers.LogitsProcessorList([partial(_finite, model)])
        kernels = without_kernels() if model.device.type == "cpu" else nullcontext()
        with torch.inference_mode(), few_queries(), kernels:
            tokens = model.generate(
                padded, attention_mask=mask, do_sample=False, max_new_tokens=limit, logits_processor=checks
            )[:, width:]
        words = [[*takewhile(lambda token: token not in ends, row)] for row in tokens.tolist()]
        return [(word, row[len(word) : len(word) + 1]) for word, row in zip(words, tokens.tolist(), strict=True)]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if len(rows) == 1:
            fix = "answer on another device, which goes on from here, or ask for shorter answers (max_new_tokens)"
            raise MachineError(f"One answer does not fit into the memory of {model.device}: {fix}.") from error
    gc.collect()
    torch.cuda.empty_cache()
    half = len(rows) // 2
    return [*_produced(model, rows[:half], limit), *_produced(model, rows[half:], limit)]


def _finite(model: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The logits of the next tokens; an SltaError if the model has overflowed, so that every token is the likeliest."""
    if (scores.isnan() | scores.isposinf()).any():
        dtype = str(model.dtype).removeprefix("torch.")
        raise SltaError(
            f"{model.name_or_path} computes numbers that are not finite in {dtype}: in its config.json, set 'dtype' to "
            "bfloat16 or float32."
        )
    return scores


def _answer(source: CalibrationSource, prompt: _Prompt, words: list[int], end: list[int]) -> _Answer:
    """The record that gives the most of the tokens that the model was given and produced."""
    ids = [*prompt.ids, *words, *end]
    pieces = ([*prompt.ids], [*prompt.ids, *words], words, end)
    decode = partial(source.tokenizer.decode, clean_up_tokenization_spaces=False)
    given, whole, text, stop = (str(decode(piece)) for piece in pieces)
    if whole.startswith(given):  # the answer alone may lack the space that it begins with
        text = whole.removeprefix(given)
    text = text if end else text.rstrip("\ufffd")  # half of a character
    if not text.strip():
        return _Answer({})
    if not end and _loops(words):
        return _Answer({}, loops=True)
    pair = {"prompt": prompt.text, "completion": text}
    forms: list[dict[str, Any]] = [pair, pair | {"completion": text + stop}]
    if has_chat_template(source.tokenizer):
        turns = [*prompt.record["messages"], {"role": "assistant", "content": text}]
        forms = [prompt.record | {"messages": turns}]
    forms.append(pair | {"text": prompt.text + text + stop})

    def fit(form: dict[str, Any]) -> tuple[int, int]:
        """How many tokens are the same, and below zero how many are added to an answer that has no end."""
        tokens = source.tokens(form)
        return shared(tokens, ids), 0 if end else min(0, len(ids) - len(tokens))

    best = max(forms, key=fit)
    said = prompt.text + text
    thinks = not end and said.rfind("<think>") > said.rfind("</think>")
    return _Answer(best, not end, fit(best) != (len(ids), 0), thinks=thinks)


def _loops(words: list[int]) -> bool:
    """Whether an answer ends with one phrase over and over."""
    for length in range(1, len(words) // 3 + 1):
        end = words[-max(3 * length, LOOP) :]
        if len(end) >= LOOP and end[length:] == end[:-length]:
            return True
    return False


def _lines(*entries: Any) -> str:
    return "".join(json.dumps(entry, ensure_ascii=False, default=str) + "\n" for entry in entries)


def _finished(beside: Path, run: str) -> dict[int, _Answer]:
    """The answers of a run that was killed, by their prompts' numbers."""
    entries: list[Any] = []
    for line in beside.read_bytes().splitlines() if beside.is_file() else []:
        with suppress(ValueError):  # the last one may be cut off
            entries.append(json.loads(line))
    if entries and entries[0] != run:
        raise SltaError(f"{beside} holds answers of another model, to other prompts or of another length: delete it.")
    return {number: _Answer(*answer) for number, answer in entries[1:]}
