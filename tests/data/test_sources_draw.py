"""Calibration data: which token ids are drawn, in which order, and how problems are worded."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.calibration_samples import (
    BOS,
    CHARACTERS,
    EOS,
    TURNS,
    load,
    refused,
    source_of,
    spelled,
    with_special,
    write_jsonl,
    write_tokenizer,
)
from transformers import PreTrainedTokenizerBase

from mergekit_slta.data.sources import CalibrationData

pytestmark = pytest.mark.usefixtures("dataset_cache")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return write_tokenizer(tmp_path_factory.mktemp("chat"), CHAT_TEMPLATE)


def hold_out(
    source: str, tokenizer: PreTrainedTokenizerBase, used: CalibrationData, samples: int, **settings: Any
) -> CalibrationData:
    return source_of(source, tokenizer, **settings).draw(samples, [used])


def test_text_gets_special_tokens_and_keeps_its_beginning(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    for text, most in (("abcdefgh" * 20, 500), ("abcdefgh" * 20, 6), ("abcdefgh" * 25_000, 100)):
        source = write_jsonl(tmp_path / "a.jsonl", [{"text": text}])
        assert load(source, plain_tokenizer, samples=1, max_tokens=most).token_ids == (with_special(text)[:most],)


@pytest.mark.parametrize("text", ["<s>ab", "<s>ab</s>", "<s>[INST] a</s>b"])
def test_a_text_with_its_own_special_tokens_gets_no_second_ones(
    text: str, tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text}] * 2)
    inside = text.removeprefix("<s>").removesuffix("</s>")
    own = plain_tokenizer(inside, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    assert load(source, plain_tokenizer, samples=2).token_ids == ((BOS, *own, EOS),) * 2


def test_expert_chat_template_is_loaded_once_and_only_if_the_base_has_none(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}, {"text": "a"}, {"messages": TURNS[:1]}])
    loads = []

    def expert() -> PreTrainedTokenizerBase:
        loads.append(1)
        return chat_tokenizer

    rows = load(source, plain_tokenizer, load_expert_tokenizer=expert, samples=3).token_ids
    assert rows == load(source, chat_tokenizer, samples=3).token_ids
    assert (BOS, *spelled("[user]hi\n[assistant]ho\n")) in rows  # the beginning of a text once, by the template
    assert len(loads) == 1


def test_a_chat_template_that_asks_for_the_date_gets_the_same_one_every_day(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "dated", "{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}")
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
    expected = tokenizer("26 Jul 2024hi", add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    assert load(source, tokenizer, samples=1).token_ids == (tuple(expected),)


def expected_order(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


def test_order_is_the_seeds_and_empty_records_are_counted(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    seed = 1
    empty = expected_order(26, seed)[1::3]
    nothing = [" ", None, "\u00e9", "<s>"]  # the tokenizer knows no accents: the last two are only <s> and </s>
    records = [{"text": nothing[i % 4] if i in empty else CHARACTERS[i]} for i in range(26)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    drawn = load(source, plain_tokenizer, samples=5, seed=seed)
    usable = [index for index in expected_order(26, seed) if index not in empty]
    assert drawn.records == tuple(usable[:5])
    assert drawn.token_ids == tuple(with_special(CHARACTERS[index]) for index in usable[:5])
    assert source in caplog.text and "2 empty" in caplog.text  # at places 1 and 4 of the first seven
    assert load(source, plain_tokenizer, samples=5, seed=seed) == drawn


def test_a_record_that_does_not_fit_is_skipped_counted_and_the_first_one_named(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    order = expected_order(6, 0)
    bad = {order[1]: {"q": 1}, order[2]: {"messages": [{"role": "alien", "content": "x"}]}, order[4]: {"text": " "}}
    records = [bad.get(index, {"text": CHARACTERS[index]}) for index in range(6)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    assert load(source, plain_tokenizer, samples=1).records == (order[0],) and not caplog.text  # no other is looked at
    assert load(source, plain_tokenizer, samples=6).records == (order[0], order[3], order[5])
    skipped = f"Calibration source {source!r}: skipped 2 rows, the first because row {order[1] + 1} "
    assert sum(message.startswith(skipped) for message in caplog.messages) == 1
    held_out = hold_out(source, plain_tokenizer, load(source, plain_tokenizer, samples=1), samples=5)
    assert held_out.records == (order[3], order[5])
    alone = write_jsonl(tmp_path / "alone.jsonl", [record for _, record in sorted(bad.items())])
    message = refused(load, alone, plain_tokenizer)
    assert "no usable row: 2 do not fit and 1 are empty, the first because " in message


def test_fewer_than_asked_is_a_warning(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("a", "", "b")])
    load(source, plain_tokenizer, samples=2)
    assert "has only" not in caplog.text
    assert sorted(load(source, plain_tokenizer, samples=30).records) == [0, 2]
    assert f"{source!r} has only 2 of the 30 prompts that 'samples' sets." in caplog.text
    caplog.clear()
    used = load(source, plain_tokenizer, samples=1)
    assert len(hold_out(source, plain_tokenizer, used, samples=3).records) == 1
    assert f"{source!r} has only 1 of the 3 prompts that calibration did not use." in caplog.text


def marked(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, folder: Path, template: str = "") -> str:
    """The text of a record with what is found to be its answer in angle brackets."""
    data = load(write_jsonl(folder / "a.jsonl", [record]), tokenizer, samples=1, max_tokens=500, template=template)
    parts = [CHARACTERS[token - 3] if token >= 3 else "" for token in data.token_ids[0]]
    if data.answers[0]:
        begin, end = data.answers[0]
        parts[begin] = "<" + parts[begin]
        parts[end - 1] += ">"
    return "".join(parts)


TAILED = {"question": "ab", "answer": "d"}


@pytest.mark.parametrize(
    ("record", "template", "text"),
    [
        ({"prompt": "cd", "completion": " cd "}, "", "cd <cd> "),
        ({"prompt": "cd\n", "response": "cd"}, "", "cd\n<cd>"),
        ({"question": "cd ", "answer": "cd"}, "", "cd \n<cd>"),
        ({"prompt": "ab", "completion": ""}, "", "ab"),
        ({"question": "ab", "answer": 42}, "", "ab\n<42>"),
        ({"instruction": "ab", "input": "i", "output": "d"}, "", "ab\ni\n<d>"),
        ({"instruction": "ab", "input": " ", "output": "d"}, "", "ab\n<d>"),
        ({"text": None, "messages": None, "question": "ab", "answer": "d"}, "", "ab\n<d>"),
        ({"text": "ab", "prompt": "b", "completion": "c"}, "", "ab"),
        ({"text": "ab", "q": "a", "a": 5}, "Q: {q}\nA: {a:03d}", "Q: a\nA: <005>"),
        ({"messages": TURNS, "q": "a"}, "{messages[0][content]}{{}} {q!r}", "hi{} <a>"),  # no token for quotes
        ({"q": "cd\nab", "a": "cd\n"}, "{q}{a}", "cd\nab<cd>\n"),
        ({"q": "ab", "a": "cd"}, "{q} {a}.", "ab cd."),
        ({"q": "ab", "a": "cd"}, "{q}\n{a} \n", "ab\n<cd> \n"),
        ({"q": "ab", "a": "cd"}, "<|u|>{q}\n{a}<|im_end|>\n", "<|u|>ab\n<cd><|im_end|>\n"),
        ({"q": "ab", "a": "cd"}, "{q}{a}<|assistant|>", "abcd<|assistant|>"),
        ({"a": "cd"}, "{a}", "cd"),
        ({"question": "ab", "answers": {"text": ["cd", "ef"]}}, "{question} {answers[text][0]}", "ab <cd>"),
        ({"q": "2.512 pounds", "a": 2.512}, "{q} {a:.1f}", "2.512 pounds <2.5>"),
        ({"text": "b ab: b.", "question": "ab", "answer": " b\n"}, "", "b ab: <b>."),
        ({"text": "cd: ab", "question": "ab", "answer": "cd"}, "", "cd: ab"),  # the answer before the question
        ({"text": "ab: cd", "answer": "cd"}, "", "ab: cd"),  # without a question, which tells where it ends
        ({"text": "ab: cd", "instruction": "ab", "input": "no", "output": "cd"}, "", "ab: <cd>"),
        (TAILED, "Q {question} A {answer}</d>", "Q ab A <d></d>"),
        ({"question": "ab", "answer": 7}, "q: {question} a: {answer} end", "q: ab a: <7> end"),
        (TAILED, "Q {question} A {answer}. Turn 2 ended.", "Q ab A <d>. Turn 2 ended."),
        (TAILED | {"text": "Q ab A d<|im_end|>"}, "", "Q ab A <d><|im_end|>"),
        (TAILED | {"text": "Q ab A d</d>"}, "", "Q ab A d</d>"),  # which of the two?
        ({"text": "Q ab A <d>c", "question": "ab", "answer": "<d>"}, "", "Q ab A <<d>>c"),
        ({"question": "ab", "answer": "d"}, "d{answer} Q {question} end", "dd Q ab end"),  # before the question
        ({"instruction": "ab", "input": None, "output": "d"}, "{instruction}{input} {output} end", "ab <d> end"),
    ],
)
def test_the_answer_is_where_the_text_has_it(
    record: dict[str, Any], template: str, text: str, tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    assert marked(record, plain_tokenizer, tmp_path, template) == text


def test_the_answer_in_a_long_text_is_found_in_time_that_grows_with_its_length(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Where parts of the pair are in the text again and again, and the last of them is missing."""
    again = {"instruction": "a", "input": "b", "output": "c", "text": "a" * 20_000}
    inside = {"question": "a", "answer": "b" * 9_000, "text": "a" + "b" * 20_000 + "c"}
    spaced = {"question": " ", "answer": "b", "text": "a b " * 5_000}
    start = time.process_time()
    data = load(write_jsonl(tmp_path / "a.jsonl", [again, inside, spaced]), plain_tokenizer, max_tokens=10)
    assert data.answers == (None,) * 3
    assert time.process_time() - start < 3


THINKING = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}[think]"
    "{{ m.content.split('[end]')[0] if '[end]' in m.content }}[end]{% endif %}"
    "{{ m.content.split('[end]')[-1] }}{% endfor %}"
)
PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }} {% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "turns", "text"),
    [
        (CHAT_TEMPLATE, ["yes", " yes "], "[user]yes\n[assistant] <yes> \n"),
        (CHAT_TEMPLATE, ["yes", "yes", "yes"], "[user]yes\n[assistant]yes\n[user]yes\n"),
        (CHAT_TEMPLATE + "was it yes?", ["no", "yes"], "[user]no\n[assistant]<yes>\nwas it yes?"),
        ("say: {% for m in messages[:-1] %}{{ m.content }}{% endfor %}", ["yes", "yes"], "say: yes"),
        ("{{ 'say b: ' if messages[1].content == 'b' }}{{ messages[1].content }}", ["a", "b"], "say b: b"),
        (THINKING, ["a", "yes"], "[user]a[assistant][think][end]<yes>"),
        (THINKING, ["a", "why[end]yes"], "[user]a[assistant][think]<why[end]yes>"),
        ("{% for m in messages %}{{ m.content.split('|')[1] + ' ' }}{% endfor %}", ["x|a", "x|b"], "a b "),
        (PARTS, [[{"text": "yes"}], [{"type": "text", "text": "yes"}]], "[user]yes [assistant]<yes> "),
        (PARTS, [[{"text": "a"}], [{"text": "b"}, {"text": "c"}]], "[user]a [assistant]<bc> "),
        (PARTS, ["a", "b"], "[user]a [assistant]<b> "),
    ],
)
def test_the_answer_of_a_conversation_is_its_last_turn_as_the_template_writes_it(
    template: str, turns: list[Any], text: str, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template)
    roles = ["user", "assistant", "user"]
    record = {"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]}
    assert marked(record, tokenizer, tmp_path) == text


@pytest.mark.parametrize("filling", ["", " b" * 600])  # more than is tokenized of a text that has no answer
def test_answers_beyond_max_tokens_are_counted_with_the_number_that_reaches_them(
    filling: str, tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [("a", "b"), ("abcdef" + filling, "cd"), ("ab" + filling, "cdefghi")]
    source = write_jsonl(tmp_path / "a.jsonl", [{"question": question, "answer": answer} for question, answer in pairs])
    needed = 1 + len(filling) + max(len("abcdef\ncd"), len("ab\ncdefghi"))
    cut = "2 of 3 answers lie beyond max_tokens 8" + (", 1 of them in part" if not filling else "")
    load(source, plain_tokenizer, max_tokens=8)
    assert f"Calibration source {source!r}: {cut}: raise 'max_tokens' to {needed}." in caplog.text
    caplog.clear()
    load(source, plain_tokenizer, max_tokens=needed - 1)
    assert f"1 of 3 answers lie beyond max_tokens {needed - 1}, 1 of them in part: raise" in caplog.text
    caplog.clear()
    load(source, plain_tokenizer, max_tokens=needed)
    assert "lie beyond" not in caplog.text


def test_copies_are_counted(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a row, or of a beginning that is as long as ``max_tokens``."""
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("abcd", "abcde", "b", "b")])
    assert len(load(source, plain_tokenizer, samples=4, max_tokens=3).token_ids) == 4
    assert "2 of 4 prompts repeat another, as far as 'max_tokens' goes: remove copies." in caplog.text


@pytest.mark.parametrize("texts", [[CHARACTERS[i] if i % 4 else "" for i in range(26)], ["a", "b", "c", "d"] * 3])
def test_held_out_goes_on_where_calibration_stopped_without_copies_of_its_samples(
    texts: list[str], tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    calibration = load(source, plain_tokenizer, samples=2)
    rest = hold_out(source, plain_tokenizer, calibration, samples=12)
    used = {texts[index] for index in calibration.records}
    order = expected_order(len(texts), 0)
    first = [index for place, index in enumerate(order) if texts[index] not in [texts[i] for i in order[:place]]]
    assert rest.records == tuple(index for index in first if texts[index] and texts[index] not in used)[:12]
    assert rest.token_ids == tuple(with_special(texts[index]) for index in rest.records)


def test_as_many_prompts_are_held_out_as_asked_although_other_answers_lie_beyond_max_tokens(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    short = [{"question": CHARACTERS[index], "answer": "b"} for index in range(20)]
    beyond = [{"question": f"{'a' * 9}{n}", "answer": "b"} for n in range(40)]
    source = write_jsonl(tmp_path / "a.jsonl", [*short, *beyond])
    calibration = load(source, plain_tokenizer, samples=2, max_tokens=9)
    caplog.clear()
    rest = hold_out(source, plain_tokenizer, calibration, samples=15, max_tokens=9)
    assert len(rest.records) == 15 and max(rest.records) < 20 and not caplog.messages


def test_test_data_of_another_source_are_described_and_scored_only_with_whole_answers(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    calibration = load(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]), plain_tokenizer)
    alien: dict[str, Any] = {"messages": [{"role": "alien", "content": "x"}]}
    records = [{"question": "a", "answer": "b"}, {"question": "a" * 20, "answer": "b"}, alien]
    source = write_jsonl(tmp_path / "b.jsonl", records)
    assert hold_out(source, plain_tokenizer, calibration, samples=5, max_tokens=9).records == (0,)
    assert "skipped 1 row" in caplog.text and "1 of 2 answers lie beyond max_tokens 9" in caplog.text
    unfit = write_jsonl(tmp_path / "c.jsonl", records[2:])
    assert "has no usable row: 1 do not fit" in refused(hold_out, unfit, plain_tokenizer, calibration, samples=5)


@pytest.mark.parametrize(
    ("record", "template", "said"),
    [
        (
            {"prompt": "a", "label": "b"},
            "",
            ["none of the known fields: its fields are prompt, label", "'template'", "'messages'"],
        ),
        ({"text": ["a"]}, "", ["'text'", "list"]),
        (
            {"prompt": TURNS, "completion": TURNS},
            "{prompt}{completion}",
            ["list in 'prompt'", "'{prompt[0]}'"],
        ),
        ({"q": {"a": 1}, "b": "c"}, "{b} {q!s}", ["dict in 'q'", "'messages'"]),
        ({"messages": [{"role": "alien", "content": "a"}]}, "", ["unknown role 'alien'", "assistant"]),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": ["f"]}]}, "", ["tool call without a function"]),
        ({"messages": "[{'role': 'user'}]"}, "", ["'messages'", "not a list of turns: save the rows as JSON"]),
        ({"text": "a \ud83d"}, "", ["half of a character"]),
        ({"messages": [{"speaker": "me", "says": "hi"}]}, "", ["its fields are speaker, says"]),
        ({"q": "a", "a": "b"}, "{q} {b}", ["no field 'b', which the template '{q} {b}' names: its fields are q, a"]),
        ({"q": "a"}, "{q[x]}", ["'{q[x]}'"]),
        ({"q": "a"}, "{q:d}", ["'{q:d}'"]),
        *(({"q": "a"}, wrong, [repr(wrong)]) for wrong in ("{q", "{}", "{0}", "no field", "{q.__class__}")),
        *(({"q": "a"}, wrong, [repr(wrong)]) for wrong in ("{q[0].__doc__}", "{q:{q.__class__}}")),
        *(({"q": "a"}, wide, [repr(wide), "below 10000"]) for wide in ("{q:>20000000}", "{q:.20000000f}", "{q:10000}")),
    ],
)
def test_a_record_that_does_not_fit_is_refused_in_words(
    record: dict[str, Any], template: str, said: list[str], tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    message = refused(load, write_jsonl(tmp_path / "a.jsonl", [record]), plain_tokenizer, template=template)
    assert all(words in message for words in said), message
