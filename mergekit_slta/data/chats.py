"""Conversations: what a chat template is given of a record's turns, and where in its text the answer is."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from itertools import takewhile
from typing import Any

from mergekit_slta.errors import SltaError, first_line

Turns = list[dict[str, Any]]
Span = tuple[int, int]
Render = Callable[[Turns], str]

CALLS = ("function_call", "tool_call")
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "model", "bot", "ai", *CALLS), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"),
}
REASONING = ("reasoning_content", "reasoning", "thinking")
MARK = "\ue000"  # a character for private use, which chat templates neither strip nor write themselves


class UnfitRecord(SltaError):
    """A record that cannot be turned into text, though others of its source may be."""


def is_turns(value: Any) -> bool:
    """Whether the value of a field is a conversation."""
    return isinstance(value, list) and any(isinstance(turn, dict) and {"role", "from"} & {*turn} for turn in value)


def is_blank(value: Any) -> bool:
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())


def normalized(value: Any, what: str) -> Turns:
    """The turns of a conversation, each with ``role``, ``content`` and what else it has; [] if nobody says anything.

    Roles and keys get the names that chat templates know, what is JSON in a string is decoded, and nulls are left out.

    Raises:
        UnfitRecord: it is no conversation, or has a turn of an unknown role.
    """
    value = plain(value) or []
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise UnfitRecord(f"{what} is not a list of turns: give the expert a 'template'.")
    turns = [_turn(turn, what) for turn in value]
    return turns if any("tool_calls" in turn or not is_blank(turn["content"]) for turn in turns) else []


def _turn(turn: dict[str, Any], what: str) -> dict[str, Any]:
    roles, contents = ([turn[key] for key in keys if key in turn] for keys in (("role", "from"), ("content", "value")))
    if not roles:
        raise UnfitRecord(
            f"{what} has a turn without 'role' and 'content', or 'from' and 'value': its fields are {', '.join(turn)}."
        )
    role, content = str(roles[0]).lower(), contents[0] if contents else ""
    content = content or "" if isinstance(content, (str, list, dict)) else str(content)
    if role not in ROLES:
        raise UnfitRecord(f"{what} has a turn of the unknown role {roles[0]!r}: write system, user, assistant or tool.")
    calls = plain(turn.get("tool_calls")) or turn.get("function_call")
    if role in CALLS and isinstance(plain(content), (dict, list)):
        calls, content = plain(content), ""
    normal = {"role": ROLES[role], "content": content}
    if calls:
        normal["tool_calls"] = [_call(call, what) for call in (calls if isinstance(calls, list) else [calls])]
    others = _without(turn, "role", "from", "content", "value", "tool_calls", "function_call")
    return normal | {key: entry for key, entry in others.items() if not is_blank(entry)}


def _call(call: Any, what: str) -> dict[str, Any]:
    call = plain(call)
    if isinstance(call, dict) and "name" in call and "function" not in call:
        call = {"type": "function", "function": call}
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise UnfitRecord(f"{what} has a tool call without a function: mend it, or leave it out.")
    return call | {"function": call["function"] | {"arguments": plain(call["function"].get("arguments", {}))}}


def plain(value: Any) -> Any:
    """A value as it was before it was written as JSON into a string, or into a table, which fills in nulls."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, dict):
        return {key: _inside(entry) for key, entry in value.items() if entry is not None}
    return [*map(_inside, value)] if isinstance(value, list) else value


def _inside(value: Any) -> Any:
    return value if isinstance(value, str) else plain(value)


# What a chat template may need: text instead of parts, arguments as JSON, the system's text before the user's.


def _joined(turns: Turns) -> Turns:
    return [turn | {"content": _text_of(turn["content"])} for turn in turns]


def _text_of(content: Any) -> Any:
    """The parts of a text as one text; other contents as they are."""
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts) if parts and len(texts) == len(parts) else content


def _encoded(turns: Turns) -> Turns:
    turns = deepcopy(turns)
    for function in (call["function"] for turn in turns for call in turn.get("tool_calls", [])):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return turns


def _folded(turns: Turns) -> Turns:
    if [(turn["role"], type(turn["content"])) for turn in turns[:2]] != [("system", str), ("user", str)]:
        return turns
    texts = [turn["content"] for turn in turns[:2] if turn["content"]]
    return [turns[1] | {"content": "\n\n".join(texts)}, *turns[2:]]


def written(turns: Turns, render: Render, where: object) -> tuple[Turns, str]:
    """A conversation with as few changes as the chat template needs to write all of it, and its text.

    Raises:
        UnfitRecord: the template refuses it, leaves tool calls out, or would print a list.
        SltaError: there is no chat template.
    """
    forms, reason = [turns], ""
    for change in (_joined, _encoded, _folded):
        forms += [changed for form in forms if (changed := change(form)) not in forms]
    for form in forms:
        try:
            text = render(form)
            tables = [turn["content"] for turn in form]
            tables += [call["function"]["arguments"] for turn in form for call in turn.get("tool_calls", [])]
            if any(str(table) in text for table in tables if table and isinstance(table, (list, dict))):
                raise ValueError("it would print a list or a table")
            uncalled = [_without(turn, "tool_calls") for turn in form]
            if uncalled != form and attempt(render, uncalled) == text:
                raise ValueError("it writes no tool calls")
            if _folded(form) != form and leaves_out(form[0], text):
                raise ValueError("it leaves the system's text out")
            return form, text
        except (SltaError, MemoryError):
            raise
        except Exception as error:  # of any kind: templates are programs
            reason = first_line(error)
    raise UnfitRecord(f"{where} does not fit the chat template ({reason}): give the expert a 'template'.")


def leaves_out(turn: dict[str, Any], text: str) -> bool:
    """Whether a text lacks what a turn says."""
    content = _text_of(turn["content"])
    return isinstance(content, str) and _squeezed(content) not in _squeezed(text)


def answer_in(turns: Turns, text: str, render: Render) -> Span | None:
    """Where in the text of a conversation its last turn is, if it is an assistant's: what it thinks, says and calls.

    The conversation is written once more with a mark in place of all this. The text before and after the mark is the
    template's; the turn is between.
    """
    last, content = turns[-1], _text_of(turns[-1]["content"])
    calls, mark = last.get("tool_calls", []), MARK if last["content"] is content else [{"type": "text", "text": MARK}]
    if last["role"] != "assistant" or not isinstance(content, str) or (is_blank(content) and not calls):
        return None
    rendered = attempt(render, [*turns[:-1], _without(last, "tool_calls", *REASONING) | {"content": mark}])
    if rendered is None or rendered.count(MARK) != 1:  # the template takes the turn apart, leaves it out or repeats it
        return None
    before, after = rendered.split(MARK)
    begin = _shared(text, before)
    end = len(text) - _shared(text[begin:][::-1], after[::-1])
    part = _squeezed(text[begin:end])
    # A template may write the beginning of the content itself, such as the tag before a chain of thought, or leave what
    # is thought out.
    pieces = content.rpartition("</think>")[2], *(str(call["function"].get("name")) for call in calls)
    return without_blanks(text, begin, end) if all(_squeezed(piece) in part for piece in pieces) else None


def loses_reasoning(turns: Turns, text: str) -> bool:
    """Whether the text lacks what the last turn, an assistant's, thinks before it answers."""
    last, content = turns[-1], str(_text_of(turns[-1]["content"]))
    thought = "".join(str(last[key]) for key in REASONING if key in last) or content.rpartition("</think>")[0]
    return last["role"] == "assistant" and _squeezed(thought).removeprefix("<think>") not in _squeezed(text)


def without_blanks(text: str, begin: int, end: int) -> Span | None:
    """A part of a text without the blanks around it; None if nothing else is in it."""
    part = text[begin:end]
    begin += len(part) - len(part.lstrip())
    return (begin, begin + len(part.strip())) if part.strip() else None


def attempt(render: Render, turns: Turns) -> str | None:
    try:
        return render(turns)
    except Exception:  # of any kind: templates are programs
        return None


def _without(turn: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in turn.items() if key not in keys}


def _shared(first: str, second: str) -> int:
    """How many characters two texts share at their beginnings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _squeezed(text: str) -> str:
    return "".join(text.split())
