"""Conversations: their tokens are those that the chat template writes of them when they are normalized by hand."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from support.calibration_samples import load, refused, write_jsonl, write_tokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

# Like those of Hermes and Qwen, of DeepSeek's distilled models, of Gemma, and the plainest one.
TOOLS = (
    "{% for tool in tools or [] %}[tool]{{ tool | tojson }}{% endfor %}{% for m in messages %}"
    "{{ '[' + m.role + ']' + (m.name + ':' if m.name is defined else '') }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% if m.tool_calls is defined %}<calls>{% for call in m.tool_calls %}"
    "{{ call.function.name + ' ' + call.function.arguments | tojson }}{% endfor %}</calls>{% endif %}<end>{% endfor %}"
)
ITEMS = TOOLS.replace(
    "' ' + call.function.arguments | tojson }}",
    "' ' }}{% for key, value in call.function.arguments | items %}{{ key }}:{{ value }} {% endfor %}",
)
TEXTS = TOOLS.replace("call.function.arguments | tojson", "call.function.arguments")
DISTILLED = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}<end>{% endfor %}"
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '<end>' }}{% endfor %}"
LISTS = "{% for m in messages %}[{{ m.role }}]{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
SWITCHED = (
    "{% for m in messages %}{% if m.reasoning_content is defined and enable_thinking is defined and enable_thinking %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
)
PRINTED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
JSON_RESULTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson if m.role == 'tool' else m.content }}{% endfor %}"
)
OBEYED = "{% for m in messages %}[{{ m.role }}]{{ m.content | replace('/no_think', '') }}{% endfor %}"
USERS_ONLY = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)

SCHEMA = [{"type": "function", "function": {"name": "find", "parameters": {"n": {"type": "integer"}}}}]


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", "arguments": arguments}}


def renamed(key: str) -> dict[str, Any]:
    return {"name": "find", key: {"q": "a", "n": 3}}


KIND, ASKED = turn("system", "be kind"), turn("user", "hi")
JSON_CALL = call('{"q": "a", "n": 3}')
CALLED = [ASKED, turn("assistant", "", tool_calls=[call({"q": "a", "n": 3})])]
SAID = [ASKED, turn("assistant", "ho")]
PAIR = {"question": "hi", "answer": "ho"}


def shown(record: dict[str, Any], template: str, folder: Path) -> tuple[tuple[int, ...], str, str | None]:
    """A record's tokens, their text, and the text of its answer."""
    tokenizer = write_tokenizer(folder / "tokenizer", template)
    data = load(write_jsonl(folder / "a.jsonl", [record]), tokenizer, samples=1, max_tokens=1000)
    (row,), (answer,) = data.token_ids, data.answers
    return row, str(tokenizer.decode([*row])), str(tokenizer.decode([*row[slice(*answer)]])) if answer else None


def by_hand(turns: list[dict[str, Any]], tools: Any, template: str, folder: Path) -> tuple[int, ...]:
    tokenizer = write_tokenizer(folder / "oracle", template)
    text = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False, padding=False, truncation=False)["input_ids"])


@pytest.mark.parametrize("template", [TOOLS, ITEMS])
@pytest.mark.parametrize(
    ("record", "turns", "tools"),
    [
        ({"messages": SAID, "tools": SCHEMA}, SAID, SCHEMA),
        ({"messages": SAID, "tools": json.dumps(SCHEMA)}, SAID, SCHEMA),
        ({"messages": SAID, "tools": [json.dumps(tool) for tool in SCHEMA]}, SAID, SCHEMA),
        ({"messages": SAID, "tools": []}, SAID, None),
        ({"messages": json.dumps(SAID)}, SAID, None),
        ({"messages": [ASKED, turn("assistant", None, tool_calls=[JSON_CALL])]}, CALLED, None),
        ({"messages": [ASKED, turn("assistant", "", tool_calls=json.dumps([call({"q": "a", "n": 3})]))]}, CALLED, None),
        ({"messages": [ASKED, turn("assistant", "", tool_calls=[call({"q": "a", "n": 3, "x": None})])]}, CALLED, None),
        ({"messages": [ASKED, turn("assistant", "", tool_calls=[call({"q": "a", "n": 3})["function"]])]}, CALLED, None),
        ({"messages": [ASKED, turn("assistant", "", tool_calls=[JSON_CALL | {"name": "x"}])]}, CALLED, None),
        ({"messages": [ASKED, {"role": "assistant", "function_call": JSON_CALL["function"]}]}, CALLED, None),
        ({"messages": [turn("user", "hi", name=None), turn("assistant", "ho", tool_calls=[], name="")]}, SAID, None),
        ({"messages": [turn("user", "hi", name="x"), SAID[1]]}, [turn("user", "hi", name="x"), SAID[1]], None),
        ({"prompt": SAID[:1], "completion": SAID[1:]}, SAID, None),
        ({"prompt": "hi", "completion": SAID[1:]}, SAID, None),
        ({"prompt": json.dumps(SAID[:1]), "completion": json.dumps(SAID[1:])}, SAID, None),
        ({"prompt": SAID[:1], "completion": "ho", "tools": SCHEMA}, SAID, SCHEMA),
        ({"messages": [{"role": None, "content": None, "from": "human", "value": "hi"}, SAID[1]]}, SAID, None),
        ({"question": [{"from": "human", "value": "hi"}], "answer": "ho"}, SAID, None),
        ({"system": "be kind", "conversations": SAID}, [KIND, *SAID], None),
        ({"system": [{"text": "be kind"}], "messages": [{"role": "user", "text": "hi"}, SAID[1]]}, [KIND, *SAID], None),
        ({"system_prompt": "be rude", "messages": [KIND, *SAID]}, [KIND, *SAID], None),
        ({"messages": [ASKED, turn("assistant", "", tool_calls=[renamed("parameters")])]}, CALLED, None),
        ({"messages": [ASKED, turn("assistant", "", tool_calls=[{"function": renamed("input")}])]}, CALLED, None),
    ],
)
def test_a_conversation_is_normalized_before_the_template(
    record: dict[str, Any], turns: list[dict[str, Any]], tools: Any, template: str, tmp_path: Path
) -> None:
    row, text, answer = shown(record, template, tmp_path)
    assert row == by_hand(turns, tools, template, tmp_path)
    assert ('"parameters"' in text) == bool(tools)
    calls = '<calls>find {"q": "a", "n": 3}</calls>' if template == TOOLS else "<calls>find q:a n:3 </calls>"
    assert answer == (calls if turns is CALLED else "ho")


SPELLINGS = {
    "system": ["system", "developer"],
    "user": ["user", "human", "prompter", "Human", "User"],
    "assistant": ["assistant", "gpt", "chatgpt", "bing", "model", "bot", "ai", "function_call", "tool_call", "GPT"],
    "tool": ["tool", "function", "function_response", "tool_response", "observation", "ipython"],
}


@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value"), ("from", "content"), ("role", "value")])
@pytest.mark.parametrize("role", SPELLINGS)
def test_roles_and_keys(role: str, keys: tuple[str, str], tmp_path: Path) -> None:
    chat = [dict(zip(keys, (spelling, "hi"), strict=True)) for spelling in SPELLINGS[role]]
    row, _, _ = shown({"conversations": chat}, PRINTED, tmp_path)
    assert row == by_hand([turn(role, "hi")] * len(chat), None, PRINTED, tmp_path)


@pytest.mark.parametrize(
    ("value", "turns"),
    [
        ('{"name": "find", "arguments": {"q": "a", "n": 3}}', CALLED),
        ('[{"name": "find", "arguments": "{\\"q\\": \\"a\\", \\"n\\": 3}"}]', CALLED),
        ("find a", [ASKED, turn("assistant", "find a")]),
    ],
)
def test_a_function_call_of_sharegpt(value: str, turns: list[dict[str, Any]], tmp_path: Path) -> None:
    chat = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": value}]
    row, _, _ = shown({"conversations": [*chat, {"from": "observation", "value": "42"}]}, TOOLS, tmp_path)
    assert row == by_hand([*turns, turn("tool", "42")], None, TOOLS, tmp_path)


PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i", "image": None}]
SYSTEM = turn("system", "be kind")
FOLDED = [turn("user", "be kind\n\nhi"), SAID[1]]


@pytest.mark.parametrize(
    ("template", "given", "turns"),
    [
        (PLAIN, [turn("user", PARTS), SAID[1]], SAID),
        (PRINTED, [turn("user", PARTS), SAID[1]], SAID),
        (STRICT, [SYSTEM, *SAID], FOLDED),
        (STRICT, [SYSTEM, turn("user", PARTS), turn("assistant", [{"type": "text", "text": "ho"}])], FOLDED),
        (USERS_ONLY, [SYSTEM, *SAID], FOLDED),
        (PLAIN, [SYSTEM, *SAID], [SYSTEM, *SAID]),
        (OBEYED, [turn("system", "be kind /no_think"), *SAID], [turn("system", "be kind /no_think"), *SAID]),
        (TEXTS, CALLED, [ASKED, turn("assistant", "", tool_calls=[JSON_CALL])]),
        (TEXTS.replace("' ' + ", "' ' }}{{ "), CALLED, [ASKED, turn("assistant", "", tool_calls=[JSON_CALL])]),
    ],
)
def test_a_conversation_is_changed_as_the_template_needs_it(
    template: str, given: list[dict[str, Any]], turns: list[dict[str, Any]], tmp_path: Path
) -> None:
    row, _, answer = shown({"messages": given}, template, tmp_path)
    assert row == by_hand(turns, None, template, tmp_path)
    assert answer == ("ho" if given is not CALLED else '<calls>find {"q": "a", "n": 3}</calls>')


UNFIT = "row 2 does not fit the chat template ({}): give the expert"
NO_TEXT = "'messages' of row 2 has a part of the type '{}'"


@pytest.mark.parametrize(
    ("template", "turns", "reason"),
    [
        (STRICT, [SYSTEM, ASKED, *SAID], UNFIT.format("roles must alternate")),
        (STRICT.replace("{{ m", "{{ '' + m"), [ASKED, *SAID], UNFIT.format("roles must alternate")),
        (PRINTED, CALLED, UNFIT.format("it writes no tool calls")),
        (PRINTED, [turn("user", "find a"), CALLED[1]], UNFIT.format("it writes no tool calls")),
        (PRINTED, [ASKED, turn("tool", [{"temp": 20}])], UNFIT.format("it would print a list or a table")),
        (PLAIN, [turn("user", [*PARTS, {"type": "image"}]), SAID[1]], NO_TEXT.format("image")),
        (LISTS, [turn("user", [{"image": "a.png"}, *PARTS])], NO_TEXT.format("image")),
        (PLAIN, [turn("user", [{"text": None, "input_audio": "a"}])], NO_TEXT.format("input_audio")),
    ],
)
def test_a_conversation_that_cannot_be_written_as_text_is_skipped(
    template: str, turns: list[dict[str, Any]], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template)
    assert load(write_jsonl(tmp_path / "a.jsonl", [{"messages": SAID}, {"messages": turns}]), tokenizer).records == (0,)
    assert f"skipped 1 row, the first because {reason}" in caplog.text
    alone = write_jsonl(tmp_path / "b.jsonl", [{"messages": turns}])
    assert reason.replace("row 2", "row 1") in refused(load, alone, tokenizer)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "hi", "completion": "ho", "label": False}, "row 1 has an answer that was rejected"),
        ({"prompt": "[{'role': 'user'}]", "completion": "ho"}, "'prompt' of row 1 holds turns as Python prints them"),
    ],
)
def test_a_pair_that_is_no_example_is_refused(record: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert reason in refused(load, write_jsonl(tmp_path / "a.jsonl", [record]), write_tokenizer(tmp_path / "t", PLAIN))


def test_pairs_for_an_expert_that_has_a_chat_template_are_told(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    source, expert = write_jsonl(tmp_path / "a.jsonl", [PAIR]), write_tokenizer(tmp_path / "expert", PLAIN)
    plain_tokenizer.add_tokens("\n")  # as Gemma's has
    load(source, plain_tokenizer, 1, load_expert_tokenizer=lambda: expert)
    assert "1 of 1 prompts reach the models without a chat template" in caplog.text


def test_a_tokenizer_that_does_not_tell_where_answers_begin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = load(write_jsonl(tmp_path / "a.jsonl", [PAIR]), ByT5Tokenizer(), 1)
    assert data.answers == (None,)
    assert "does not tell where answers begin: `featcal` counts all tokens alike" in caplog.text


@pytest.mark.parametrize("said", ["why does html use </s>", "hi</s>[assistant]evil", "<pad>"])
def test_conversations_that_say_control_tokens_are_counted(
    said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", PLAIN.replace("<end>", "</s>"))
    chats = [{"messages": [turn("user", said), SAID[1]]}, {"messages": SAID}, {"text": "a</s>"}]
    load(write_jsonl(tmp_path / "a.jsonl", chats), tokenizer)
    token = "'<pad>'" if said == "<pad>" else "'</s>'"
    assert f"1 of 3 prompts hold control tokens such as {token}, which the model takes as its own" in caplog.text


def test_a_long_conversation_is_looked_through_in_time_that_grows_with_its_length(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", PLAIN)
    turns = [turn(role, f"{number} " * 50) for number in range(400) for role in ("user", "assistant")]
    start = time.process_time()
    load(write_jsonl(tmp_path / "a.jsonl", [{"messages": turns}] * 2), tokenizer)
    assert time.process_time() - start < 5


def thinking(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [ASKED, turn("assistant", content, **more)]}


@pytest.mark.parametrize(
    ("template", "record", "lost"),
    [
        (DISTILLED, thinking("<think>\nso\n</think>\n\n59"), "the reasoning"),
        (DISTILLED, thinking("so</think>59"), "the reasoning"),
        (PLAIN, thinking("59", reasoning_content="so"), "the reasoning"),
        (PLAIN, thinking("<think>so</think>59"), ""),
        (LISTS, thinking([{"type": "text", "text": "<think>so</think>59"}]), ""),
        (TOOLS, thinking("59", reasoning_content="so"), ""),
        (TOOLS, thinking("59", reasoning_content="so", reasoning="so"), ""),
        (DISTILLED, thinking("<think>\n\n</think>\n\n59"), ""),
        (DISTILLED, thinking("59", reasoning_content=None), ""),
        (SWITCHED, thinking("59", reasoning_content="so"), ""),
        (PLAIN, {"messages": SAID, "tools": SCHEMA}, "the tools"),
        (USERS_ONLY, {"messages": [ASKED, turn("tool", "42"), SAID[1]]}, "a turn of the tool"),
        (USERS_ONLY, {"messages": [KIND, *SAID]}, ""),  # it is said by the user
        # What a template writes otherwise
        (JSON_RESULTS, {"messages": [ASKED, turn("tool", '{"temp": 20,\n"ü": 1}'), SAID[1]]}, ""),
        (OBEYED, {"messages": [turn("system", "be kind /no_think"), *SAID]}, ""),
    ],
)
def test_what_the_template_leaves_out_is_counted(
    template: str, record: dict[str, Any], lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template)
    source = write_jsonl(tmp_path / "a.jsonl", [record, record, {"messages": SAID}])
    load(source, tokenizer, samples=3)
    counted = f"Calibration source {source!r}: the chat template leaves out {lost} of 2 of 3 prompts: write it in"
    assert [line.startswith(counted) for line in caplog.messages if "leaves out" in line] == [True] * bool(lost)


SILENT = "{% for m in messages %}[{{ m.role }}]{{ m.content if m.content is string else '' }}<end>{% endfor %}"


@pytest.mark.parametrize("template", [SILENT, LISTS])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "so "}, {"type": "text", "text": "it is"}], "so it is"),
        ([{"type": "text", "text": "<think>a</think>"}, {"type": "text", "text": "59"}], "<think>a</think>59"),
        (["so ", "it is"], "so it is"),
        ({"temp": 20}, '{"temp": 20}'),
    ],
)
def test_parts_that_the_template_would_leave_out_in_silence_are_joined(
    content: Any, text: str, template: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row, _, answer = shown({"messages": [ASKED, turn("tool", content), turn("assistant", content)]}, template, tmp_path)
    assert row == by_hand([ASKED, turn("tool", text), turn("assistant", text)], None, template, tmp_path)
    assert answer == text and not caplog.messages


CALLS_ALONE = TOOLS.replace("{{ m.content }}", "{% if m.tool_calls is not defined %}{{ m.content }}{% endif %}")


@pytest.mark.parametrize("tools", [None, SCHEMA])
def test_a_result_with_the_tools_name_which_the_template_does_not_write_is_no_call(tools: Any, tmp_path: Path) -> None:
    unnamed = TOOLS.replace("(m.name + ':' if m.name is defined else '')", "''")
    chat = [*CALLED, turn("tool", "42", name="find"), turn("assistant", "It is 42, find says.")]
    row, _, answer = shown({"messages": chat, "tools": tools}, unnamed, tmp_path)
    assert row == by_hand(chat, tools, unnamed, tmp_path) and answer == "It is 42, find says."


def test_words_beside_a_call_that_the_template_leaves_out_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = [ASKED, turn("assistant", "Let me find it.", tool_calls=CALLED[1]["tool_calls"])]
    _, _, answer = shown({"messages": chat}, CALLS_ALONE, tmp_path)
    assert answer == '<calls>find {"q": "a", "n": 3}</calls>'
    assert "leaves out the words beside a tool call of 1 of 1 prompts" in caplog.text


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        ({"question": "a", "answer": "b", "context": "c", "system": "d"}, ["context", "system"]),
        ({"question": "a", "answer": "b", "choices": ["b", "c"], "options": []}, ["choices"]),
        ({"messages": SAID, "history": [["a", "b"]], "system": "d"}, ["history"]),
        ({"text": "a", "context": "c", "answer": "a"}, []),
        ({"text": "a", "code": "c"}, ["code"]),
        ({"text": "Is it so, yes or no?", "answer": "no"}, ["answer"]),
        ({"question": "a", "answer": "b", "reasoning": "c"}, ["reasoning"]),
        ({"question": "a", "answer": "b", "solution": "c", "tools": SCHEMA}, ["solution", "tools"]),
        ({"messages": [turn("user", "a")], "answer": "b"}, ["answer"]),
    ],
)
def test_fields_that_are_not_read_are_counted(
    record: dict[str, Any], fields: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown(record, PLAIN, tmp_path)
    said = [message for message in caplog.messages if "leaves out" in message]
    assert len(said) == len(fields)
    for field, message in zip(fields, said, strict=True):
        assert f"calibration leaves out the field '{field}' of 1 of 1 prompts: write it in a 'template'" in message


EMPTY = PLAIN.replace("+ m.content", "+ ('<think>\\n</think>' if m.role == 'assistant' else '') + m.content")


@pytest.mark.parametrize(
    ("record", "template", "said"),
    [
        (PAIR, "", "1 of 1 prompts reach the models without a chat template"),
        ({"messages": SAID}, "", "an empty thought before 1 of 1 answers"),
        ({"messages": [ASKED, turn("assistant", "<think>\n\n</think>ho")]}, "", ""),
        ({"question": "hi", "answer": "[INST]"}, "", ""),
        ({"messages": SAID}, r"{messages[0][content]}\nho", "the template has a backslash and an n"),
        ({"text": "<|none|>hi"}, "", "splits <|none|> into pieces"),
        ({"text": "hi"}, "{text}", ""),
    ],
)
def test_what_a_chat_model_would_read_otherwise_is_said(
    record: dict[str, Any], template: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", EMPTY)
    load(write_jsonl(tmp_path / "a.jsonl", [record]), tokenizer, 1, template=template)
    assert [said in message for message in caplog.messages] == [True] * bool(said)


@pytest.mark.parametrize("answer", [json.dumps([ASKED]), '[{"from": "NYC", "to": "LA"}]', "[]"])
def test_an_answer_of_json_is_no_conversation(answer: str, tmp_path: Path) -> None:
    _, text, found = shown({"prompt": "hi", "completion": answer}, PLAIN, tmp_path)
    assert found == answer and "[user]" not in text


@pytest.mark.parametrize("answer", ['["red", "blue"]', '{"a": null}', "[1]"])
def test_an_answer_of_json_to_a_conversation_stays_as_it_is(answer: str, tmp_path: Path) -> None:
    assert shown({"prompt": [ASKED], "completion": answer}, PLAIN, tmp_path)[2] == answer


def test_reasoning_is_a_part_of_the_answer(tmp_path: Path) -> None:
    _, text, answer = shown({"messages": [ASKED, turn("assistant", "59", reasoning_content="so")]}, TOOLS, tmp_path)
    assert text == "[user]hi<end>[assistant]<think>so</think>59<end>" and answer == "<think>so</think>59"


def test_a_tokenizers_template_for_tools_writes_conversations_with_tools(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    tokenizer.chat_template = {"default": PLAIN, "tool_use": TOOLS}
    for tools, template in ((SCHEMA, TOOLS), (None, PLAIN)):
        source = write_jsonl(tmp_path / "a.jsonl", [{"messages": SAID, "tools": tools}])
        (row,) = load(source, tokenizer, max_tokens=500).token_ids
        assert row == by_hand(SAID, tools, template, tmp_path)


def test_rows_of_a_table_have_the_arguments_that_they_have_as_json(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", TOOLS)
    arguments: list[dict[str, Any]] = [{"q": "a"}, {"n": 3, "deep": {"x": 1}}, {"deep": {"y": 2}}]
    records = [{"messages": [ASKED, turn("assistant", None, tool_calls=[call(given)])]} for given in arguments]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    table = load(str(tmp_path / "a.parquet"), tokenizer, max_tokens=500)
    assert table.token_ids == load(write_jsonl(tmp_path / "a.jsonl", records), tokenizer, max_tokens=500).token_ids
    (row,) = load(write_jsonl(tmp_path / "b.jsonl", records[1:2]), tokenizer, max_tokens=500).token_ids
    assert str(tokenizer.decode([*row])).endswith('<calls>find {"n": 3, "deep": {"x": 1}}</calls><end>')
