"""Turn a calibration record into text, by a template, by the names of its fields, or by a chat template."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice, takewhile
from typing import Any, NamedTuple

from mergekit_slta.errors import SltaError, first_line
from mergekit_slta.words import listed

Record = Mapping[str, Any]
Span = tuple[int, int]
Turns = list[dict[str, Any]]
Render = Callable[[Turns], str]
Change = Callable[[Turns], Turns]

CHAT_FIELDS = ("messages", "conversations")
# These groups of fields are tried in order; the texts of one group are joined by a newline, unless a prompt brings its
# own blanks.
TEXT_FIELDS = (
    ("text",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
)
ANSWERS = {fields[-1] for fields in TEXT_FIELDS[1:]}
CALLS = ("function_call", "tool_call")
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "model", "bot", "ai", *CALLS), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"),
}
REASONING = ("reasoning_content", "reasoning", "thinking")
ARGUMENTS = ("arguments", "parameters", "input")  # of a tool call
SYSTEM = ("system", "system_prompt")  # a conversation's system prompt in a field of its own
REASON, CALLED = "the reasoning", "the tool calls"  # parts that a chat template may leave out
MEDIA = ("image", "images", "image_url", "video", "videos", "audio", "audios", "input_audio")
BESIDE_TEXT = ("code", "label", "solution", "summary", "target")  # what may stand there; the text is read alone
# What only a template of a recipe names.
UNREAD = ("context", "passage", "schema", "choices", "options", "history", "functions", *REASONING, *MEDIA)
BY_CHANCE = 20  # a text may hold so many characters of another field by chance
DEEPEST = 100  # lists and tables within each other: more would overflow what writes them
_SWITCH = re.compile(r"(?<!<)/(no_)?think\b")  # of a system prompt: some chat templates obey it and do not write it
MARK = "\ue000"  # a character for private use, which chat templates neither strip nor write themselves
# A template reads no attribute of a value: through these the template of somebody else could read more than a record.
_FIELD = re.compile(r"(?!\d+(\[|$))[^.\[\]]+(\[[^\[\]]+\])*")
_END = re.compile(r"<[^<>\s]*(/s|end|eo[st]|return)[^<>\s]*>")  # a token at the end of a turn or text
_APART = r"(?!(?<=\w)\w)"  # a place that is not inside a word


class UnfitRecord(SltaError):
    """A record that cannot be turned into text, though others of its source may be."""


class Text(NamedTuple):
    """A record as text."""

    text: str  # "" for an empty record
    is_chat: bool = False  # a chat template wrote it
    is_pair: bool = False  # it joins several fields
    # The place of the answer, without blanks around it: the index of its first character, and of the one after its
    # last. The answer is the last turn if it is an assistant's, the last part of a pair, or of several fields in a
    # template the last one, if only end tokens follow it in the template or it is an answer by its name. In the
    # record's own text it is the only place for the last part of a pair that the record has too. None where there is
    # no such part or place.
    answer: Span | None = None
    left_out: tuple[str, ...] = ()  # what the chat template does not write of the record, as in "the reasoning"
    unread: tuple[str, ...] = ()  # the fields of the record that hold something for the model and are not read
    conversation: str = ""  # its turns as JSON, where the record is one


def record_text(record: Record, template: str, *, where: object, render_chat: Callable[..., str]) -> Text:
    """Turn a record into text by the template, or else by the first of these fields that it has and that is not blank.

    In order: ``messages``, ``conversations``, and the groups of ``TEXT_FIELDS``; a group with turns is a conversation.

    The template is a ``str.format`` string; ``where`` names the record at the beginning of an error message, and
    ``render_chat`` gets the argument ``tools`` where the record has some.

    Raises:
        UnfitRecord: the record lacks these fields, or does not fit the template or the chat template.
        SltaError: the template is not valid, or there is no chat template.
    """
    text = _fill(template, record, where) if template else _by_fields(record, where, render_chat)
    refuse_halves(text.text, where)
    return text


def refuse_halves(text: str, where: object) -> None:
    if re.search("[\ud800-\udfff]", text):
        raise UnfitRecord(f"{where} holds half of a character, which no tokenizer reads: correct it.")


def _by_fields(record: Record, where: object, render_chat: Callable[..., str]) -> Text:
    chat_fields, groups = [field for field in CHAT_FIELDS if field in record], _groups_in(record)
    if record.get("label") is False and groups[:1] == [("prompt", "completion")]:
        raise UnfitRecord(f"{where} has an answer that was rejected ('label' is false).")
    for field in chat_fields:
        if turns := turns_of(record[field], f"{field!r} of {where}"):
            return _chat_text(turns, record, where, render_chat)
    for fields in groups:
        values = [decoded(record[field]) for field in fields]
        if isinstance(record[fields[-1]], str) and not (is_turns(values[0]) and is_turns(values[-1])):
            values[-1] = record[fields[-1]]  # an answer may be JSON
        if len(fields) > 1 and any(map(is_turns, values)):
            if turns := turns_of(_one_chat(values), f"{fields[0]!r} of {where}"):
                return _chat_text(turns, record, where, render_chat)
            continue
        parts = [_plain_text(record[field], f"{field!r} of {where}") for field in fields]
        if any(part.strip() for part in parts):
            text = _joined(fields, parts, record)
            names = sorted(ANSWERS | {*BESIDE_TEXT}) if fields == ("text",) else (*UNREAD, *SYSTEM, "solution", "tools")
            beside = [name for name in unread(record, names) if not _holds(text, str(record[name]).strip())]
            return text._replace(unread=tuple(beside), is_pair=len(fields) > 1)
    if not chat_fields and not groups:
        problem = f"{where} has none of the known fields: its fields are {listed(map(str, record)) or 'none'}"
        fix = "Give the expert a 'template' that names the fields to use, such as '{question} {answer}'"
        raise UnfitRecord(f"{problem}. {fix}; if it was trained on chats, save the rows as 'messages' instead.")
    return Text("")


# The known fields


def unread(record: Record, names: Iterable[str] = UNREAD) -> tuple[str, ...]:
    """The fields of these names that hold something."""
    return tuple(name for name in names if not is_blank(record.get(name)))


def _holds(text: Text, words: str) -> bool:
    """Whether a text has a field's words, and not by chance."""
    known = text.answer is not None or len(words) > BY_CHANCE
    return words in text.text if known else _END.sub("", text.text).rstrip().endswith(words)


def _joined(fields: tuple[str, ...], parts: list[str], record: Record) -> Text:
    """The texts of a group of fields; its last one is the answer, if there are several fields."""
    text = ""
    for part in filter(str.strip, parts):
        blank = fields[0] == "prompt" and (text[-1:].isspace() or part[0].isspace())
        text += "\n" * bool(text and not blank) + part
    if len(fields) == 1:
        return Text(text, answer=_answer_in(text, record))
    begin = len(text) - len(parts[-1]) if parts[-1].strip() else len(text)
    return Text(text, answer=_without_blanks(text, begin, len(text)))


def _groups_in(record: Record) -> list[tuple[str, ...]]:
    """The groups of ``TEXT_FIELDS`` that a record has."""
    return [fields for fields in TEXT_FIELDS if all(field in record for field in fields)]


def _answer_in(text: str, record: Record) -> Span | None:
    """Where the answer of a known pair of the record is, in a text that holds the pair's parts one after the other.

    None where several places could be the answer's: what follows an answer may hold the same letters.
    """
    for fields in _groups_in(record):
        *parts, answer = ("" if record[field] is None else str(record[field]).strip() for field in fields)
        end = 0
        for part in parts:
            end = text.find(part, end) + len(part) if text.find(part, end) >= 0 else len(text)
        places = re.compile(f"{_APART}{re.escape(answer)}{_APART}", re.ASCII).finditer(text, end)
        if parts and answer and len(first_two := [*islice(places, 2)]) == 1:
            return first_two[0].span()
    return None


def _without_blanks(text: str, begin: int, end: int) -> Span | None:
    """A part of a text without the blanks around it; None if nothing else is in it."""
    part = text[begin:end]
    begin += len(part) - len(part.lstrip())
    return (begin, begin + len(part.strip())) if part.strip() else None


def _plain_text(value: Any, what: str) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, dict, bytes)):
        raise UnfitRecord(f"{what} holds a {type(value).__name__}, not text: give the expert a 'template'.")
    if re.match(r"\[{'(role|content|from|value)'", str(value)):
        raise UnfitRecord(f"{what} holds turns as Python prints them: save the rows as JSON.")
    return str(value)


def is_turns(value: Any) -> bool:
    turns = [turn for turn in value if isinstance(turn, dict)] if isinstance(value, list) else []
    return any(str(turn.get("role", turn.get("from"))).lower() in ROLES for turn in turns)


def is_blank(value: Any) -> bool:
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())


# Templates of a recipe


def template_fields(template: str) -> list[str]:
    """The fields of a record that a template names, in order; an SltaError if it is not valid, or names none."""
    try:
        named = [(name, form) for _, name, form, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        problem = f"The template {template!r} is not a valid format string ({error})"
        raise SltaError(f"{problem}: write a brace as '{{{{'.") from error
    # A width of five digits or more would fill the memory.
    unknown = any(not _FIELD.fullmatch(name) or re.search(r"{|\d{5}", form or "") for name, form in named)
    if not named or unknown:
        forms = "'{field}', '{field[key]}' for a part of a field, or '{field:format}' with a width below 10000"
        raise SltaError(f"The template {template!r} must name fields of a row, each as {forms}.")
    return [name.split("[")[0] for name, _ in named]


def _fill(template: str, record: Record, where: object) -> Text:
    fields = template_fields(template)
    if lacking := [field for field in fields if field not in record]:
        problem = f"{where} has no field {lacking[0]!r}, which the template {template!r} names"
        raise UnfitRecord(f"{problem}: its fields are {listed(map(str, record)) or 'none'}.")
    if all(is_blank(record[field]) for field in fields):
        return Text("")
    text, tail, formatter = "", "", string.Formatter()
    last: Span = 0, 0
    for words, name, form, conversion in formatter.parse(template):
        text, tail = text + words, tail + words if name is None else ""
        if name is None:
            continue
        try:
            value, _ = formatter.get_field(name, (), record)
            shown = formatter.convert_field("" if value is None else value, conversion)
            written = str(formatter.format_field(shown, form or ""))
        except Exception as error:  # of any kind: the value is any, and so is what is asked of it
            problem = f"{where} does not fit the template {template!r} ({first_line(error)})"
            raise UnfitRecord(f"{problem}: correct the template.") from error
        if isinstance(value, (list, dict, bytes)):
            problem = f"{where} has a {type(value).__name__} in {name!r}, which the template {template!r} would print"
            part = f"{{{name}[{'key' if isinstance(value, dict) else 0}]}}"
            fix = f"write a part of it, such as '{part}', or leave the template out and call a chat 'messages'"
            raise UnfitRecord(f"{problem}: {fix}.")
        last = len(text), len(text) + len(written)
        text += written
    is_answer = len(fields) > 1 and (fields[-1] in ANSWERS or not (_END.sub("", tail).strip() or ANSWERS & {*fields}))
    return Text(text, answer=_without_blanks(text, *last) if is_answer else None)


# Conversations


def _chat_text(turns: Turns, record: Record, where: object, render_chat: Callable[..., str]) -> Text:
    turns, tools = with_system(turns, record), decoded(record.get("tools"))
    tools = [*map(decoded, tools)] if isinstance(tools, list) else tools
    # Some templates write the reasoning only if they are asked to.
    named = dict.fromkeys(("enable_thinking", "thinking"), True) if _thought(turns[-1]) else {}
    render = partial(render_chat, **named, **({"tools": tools} if tools else {}))
    change, text, left_out = _written(turns, tools, render, where)
    answer = _last_turn_in(turns, text, lambda marked: render(change(marked)))
    said = json.dumps(turns, ensure_ascii=False, default=str)
    names = UNREAD if turns[-1]["role"] == "assistant" else (*UNREAD, *sorted(ANSWERS))
    return Text(text, True, False, answer, tuple(left_out), unread(record, names), said)


def with_system(turns: Turns, record: Record) -> Turns:
    """A conversation with the system prompt that its record has in a field of its own."""
    system = next((_text_of(record[name]) for name in SYSTEM if not is_blank(record.get(name))), None)
    has_none = not any(turn["role"] == "system" for turn in turns)
    return [{"role": "system", "content": system}, *turns] if isinstance(system, str) and has_none else turns


def _one_chat(values: list[Any]) -> list[Any]:
    """A prompt and its completion, of which one is a list of turns, as one conversation."""
    turns = []
    for number, value in enumerate(values, 1):
        if is_turns(value):
            turns += value
        elif not is_blank(value):
            turns.append({"role": "user" if number < len(values) else "assistant", "content": value})
    return turns


def turns_of(value: Any, what: str) -> Turns:
    """The turns of a conversation, each with ``role``, ``content`` and what else it has; [] if nobody says anything.

    Roles and keys get the names that chat templates know, what is JSON in a string is decoded, and nulls are left out.
    """
    value = decoded(value) or []
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise UnfitRecord(f"{what} is not a list of turns: save the rows as JSON, or give the expert a 'template'.")
    turns = [_turn(turn, what) for turn in value]
    return turns if any("tool_calls" in turn or not is_blank(turn["content"]) for turn in turns) else []


def _turn(turn: dict[str, Any], what: str) -> dict[str, Any]:
    of_role, of_content = ("role", "from"), ("content", "value", "text")
    roles, contents = ([turn[key] for key in keys if key in turn] for keys in (of_role, of_content))
    if not roles:
        lacking = "'role' and 'content', or 'from' and 'value'"
        raise UnfitRecord(f"{what} has a turn without {lacking}: its fields are {', '.join(turn)}.")
    role, content = str(roles[0]).lower(), contents[0] if contents else ""
    content = content or "" if isinstance(content, (str, list, dict)) else str(content)
    if role not in ROLES:
        raise UnfitRecord(f"{what} has a turn of the unknown role {roles[0]!r}: write system, user, assistant or tool.")
    calls = decoded(turn.get("tool_calls")) or turn.get("function_call")
    if role in CALLS and isinstance(decoded(content), (dict, list)):
        calls, content = decoded(content), ""
    parts = [part for part in content if isinstance(part, dict) and "text" not in part]
    if kinds := [part.get("type", key) for part in parts for key in ("type", *MEDIA) if key in part]:
        raise UnfitRecord(f"{what} has a part of the type {kinds[0]!r}: only text calibrates and is answered.")
    normal = {"role": ROLES[role], "content": _text_of(content)}
    if calls:
        normal["tool_calls"] = [_call(call, what) for call in (calls if isinstance(calls, list) else [calls])]
    unnamed = _without(turn, *of_role, *of_content, "tool_calls", "function_call")
    return normal | {key: entry for key, entry in unnamed.items() if not is_blank(entry)}


def _call(call: Any, what: str) -> dict[str, Any]:
    call = decoded(call)
    if isinstance(call, dict) and "name" in call and "function" not in call:
        call = {"type": "function", "function": call}
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise UnfitRecord(f"{what} has a tool call without a function: correct it, or leave it out.")
    function = call["function"]
    arguments: Any = next((function[name] for name in ARGUMENTS if name in function), {})
    return call | {"function": _without(function, *ARGUMENTS) | {"arguments": decoded(arguments)}}


def decoded(value: Any, depth: int = 0) -> Any:
    """A value as it was before it was written as JSON into a string, or into a table, which fills in nulls."""
    if isinstance(value, str) and not depth and value.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if depth > DEEPEST:
        raise UnfitRecord(f"a row has more than {DEEPEST} lists or tables within each other: take some out.")
    if isinstance(value, dict):
        return {key: decoded(entry, depth + 1) for key, entry in value.items() if entry is not None}
    return [decoded(entry, depth + 1) for entry in value] if isinstance(value, list) else value


def _text_of(content: Any) -> Any:
    """The parts of a text as one text, a table as JSON; other contents as they are."""
    if isinstance(content, dict):
        return json.dumps(content, ensure_ascii=False)
    parts = content if isinstance(content, list) else []
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(texts) if parts and all(isinstance(text, str) for text in texts) else content


# What a chat template may need: arguments as JSON, the system's text before the user's, texts as lists of parts.


def _encoded(turns: Turns) -> Turns:
    turns = deepcopy(turns)
    for function in _functions(turns):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return turns


def _folded(turns: Turns) -> Turns:
    if [(turn["role"], type(turn["content"])) for turn in turns[:2]] != [("system", str), ("user", str)]:
        return turns
    texts = [turn["content"] for turn in turns[:2] if turn["content"]]
    return [turns[1] | {"content": "\n\n".join(texts)}, *turns[2:]]


def _in_parts(turns: Turns) -> Turns:
    return [
        turn | {"content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in turns
    ]


def _written(turns: Turns, tools: Any, render: Render, where: object) -> tuple[Change, str, list[str]]:
    """How to change a conversation so that the chat template writes most of it; its text, and what that lacks."""
    forms, written, reason = list[Turns](), list[tuple[Change, str, list[str]]](), ""
    changes: tuple[Change, ...] = (list, _in_parts, _encoded, _folded, lambda turns: _encoded(_folded(turns)))
    for change in changes:
        if (form := change(turns)) in forms:
            continue
        forms.append(form)
        try:
            text = render(form)
            tables = [turn["content"] for turn in form] + [function["arguments"] for function in _functions(form)]
            if any(str(table) in text for table in tables if table and isinstance(table, (list, dict))):
                raise ValueError("it would print a list or a table")
            if CALLED in (left_out := _left_out(turns, tools, text)):
                raise ValueError("it writes no tool calls")
        except (SltaError, MemoryError):
            raise
        except Exception as error:  # of any kind: templates are programs
            reason = reason if change is _in_parts else first_line(error)  # a text that is expected is no list
            continue
        written.append((change, text, left_out))
        if not left_out:
            break
    if not written:
        raise UnfitRecord(f"{where} does not fit the chat template ({reason}): give the expert a 'template'.")
    return min(written, key=lambda one: len(one[2]))


def _left_out(turns: Turns, tools: Any, text: str) -> list[str]:
    """What a chat template's text lacks of a conversation, each thing once."""
    squeezed = _squeezed(_SWITCH.sub("", text))

    def lacks(words: str) -> bool:
        words = _SWITCH.sub("", words)
        # Some templates write the results of tools as JSON.
        return all(_squeezed(form) not in squeezed for form in (words, json.dumps(words, ensure_ascii=False)[1:-1]))

    def unnamed(names: list[str], calls: list[str]) -> bool:  # beside the words and calls in the text
        return any(text.count(name) <= words.count(name) + calls.count(name) for name in {*names} if name)

    left_out = [REASON] if lacks(_thought(turns[-1])) else []
    said = list[str]()
    for turn in turns:
        if lacks(_said(turn)):
            left_out.append("the words beside a tool call" if "tool_calls" in turn else f"a turn of the {turn['role']}")
        else:
            said.append(_said(turn))
    words, called = "\n".join(said), [str(function.get("name", "")) for function in _functions(turns)]
    tables = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    defined = [str(table.get("name", "")) for tool in tables if isinstance(table := tool.get("function", tool), dict)]
    left_out += [CALLED] * unnamed(called, []) + ["the tools"] * unnamed(defined, called)
    return [*dict.fromkeys(left_out)]


def _functions(turns: Turns) -> list[dict[str, Any]]:
    return [call["function"] for turn in turns for call in turn.get("tool_calls", [])]


def _last_turn_in(turns: Turns, text: str, render: Render) -> Span | None:
    """Where in the text of a conversation its last turn is, if it is an assistant's: what it thinks, says and calls.

    The conversation is written once more with a mark in place of all this: the turn is what differs.
    """
    last, functions = turns[-1], _functions(turns[-1:])
    if last["role"] != "assistant" or not (functions or _words(last).strip()):
        return None
    try:
        marked = render([*turns[:-1], _without(last, "tool_calls", *REASONING) | {"content": MARK}])
    except Exception:  # of any kind: templates are programs
        return None
    head, *tail = marked.split(MARK)
    if len(tail) != 1:  # the template takes the turn apart, leaves it out or repeats it
        return None
    begin = shared(text, head)
    end = len(text) - shared(text[begin:][::-1], tail[0][::-1])
    # A template may write the beginning of the content itself, such as the tag before a chain of thought, or leave out
    # what is thought, or said beside a call.
    pieces = [str(function.get("name")) for function in functions] or [_said(last)]
    part = _squeezed(text[begin:end])
    return _without_blanks(text, begin, end) if all(_squeezed(piece) in part for piece in pieces) else None


def _words(turn: dict[str, Any]) -> str:
    """The content of a turn; "" if it is no text."""
    return turn["content"] if isinstance(turn["content"], str) else ""


def _thought(turn: dict[str, Any]) -> str:
    """What an assistant's turn thinks before it says something."""
    if turn["role"] != "assistant":
        return ""
    reasoning = (str(turn[key]) for key in REASONING if key in turn)  # some servers give one text by two names
    thought = next(reasoning, "") or _words(turn).rpartition("</think>")[0]
    return thought.strip().removeprefix("<think>").strip()


def _said(turn: dict[str, Any]) -> str:
    """What a turn says, an assistant's after it has thought."""
    return _words(turn).rpartition("</think>")[2] if turn["role"] == "assistant" else _words(turn)


def _without(turn: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in turn.items() if key not in keys}


def shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many characters two texts share at their beginnings, or tokens two rows."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _squeezed(text: str) -> str:
    return "".join(text.split())
