"""Converts the messages of a request to the form that a checkpoint's template reads."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sglcore.engine.tokenizers.chat_template import Message, TextError

UNREADABLE = "arguments"
"""The key under which a template gets the arguments of a call that are no JSON object, as text."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form of messages that a chat template needs, found by test renderings: how content, tool
    calls and their ids, results and tool descriptions are written. It is used by
    `as_template_reads`, and does not change."""

    parts: bool = False
    """Whether content is a list of parts; else a string."""
    arguments: bool = True
    """Whether a call's arguments are an object; else JSON text."""
    empty: bool = False
    """Whether missing content is an empty string; else None."""
    single: bool = False
    """Whether a message may have only one call, with its results before the next call."""
    joined: bool = False
    """Whether content of a message with calls is appended to its reasoning."""
    numbered: bool = False
    """Whether ids of calls must have the form `functions.NAME:NUMBER`."""
    write: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    """Writes calls (with arguments as objects) as text, which is appended to the content. None: the
    template writes calls itself."""
    described: bool = False
    """Whether every tool must have a description."""

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the tools for the template in a new list: unchanged, or if `described` as new
        objects in which a description that is missing or null is ""."""
        if not self.described:
            return list(tools)
        functions = (tool.get("function", tool) for tool in tools)
        return [
            {"type": "function", "function": {**function, "description": function.get("description") or ""}}
            for function in functions
        ]


def as_template_reads(messages: Sequence[Message], form: MessageForm) -> list[dict[str, Any]]:
    """Return the messages in the form that the template needs; the given ones are not changed.
    Raises TextError for a message without a role, with parts other than text, or with a wrong call.
    """
    listed = [_message(place, message, form) for place, message in enumerate(messages)]
    if form.numbered:
        _number_calls(listed)
    return list(_one_by_one(listed, form)) if form.single else listed


def _one_by_one(messages: Sequence[dict[str, Any]], form: MessageForm) -> Iterator[dict[str, Any]]:
    """Yield the messages so that each has one call at most, followed by the results of that call.
    The content stays with the first call; results that fit no call come after the last one."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = [rest.popleft() for _ in takewhile(lambda each: each["role"] == "tool", tuple(rest))]
        ids = [call.get("id") for call in calls]
        for place, call in enumerate(calls):
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"], "content": "" if form.empty else None}
            own = [each for each in results if each.get("tool_call_id") == ids[place]]
            if ids[place] in ids[place + 1 :]:
                own = own[:1]  # calls with the same id, or none, have one result each
            results = [each for each in results if all(each is not other for other in own)]
            yield from own
        yield from results


def _number_calls(messages: list[dict[str, Any]]) -> None:
    """Replace the id of each call by `functions.NAME:NUMBER`, numbered from 0 over the whole
    conversation, in place. A result gets the new id of its call; a result of no known call keeps
    its id."""
    ids: dict[Any, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            ids[call.get("id")] = call["id"] = f"functions.{call['function']['name']}:{number}"
            number += 1
        if "tool_call_id" in message:
            message["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])


def _message(place: int, message: Message, form: MessageForm) -> dict[str, Any]:
    result = {name: value for name, value in message.items() if value is not None}
    if not isinstance(result.get("role"), str):
        raise TextError(f"messages[{place}] has no role", wanted="a role such as user")
    content = result.get("content")
    if content is None and not message.get("tool_calls"):
        content = ""  # Templates expect messages without content only if they have calls.
    result["content"] = _content(place, content, form)
    thoughts = result.get("reasoning_content") or result.pop("reasoning", None)
    if calls := result.pop("tool_calls", None):
        _add_calls(place, result, calls, form)
        if form.joined and thoughts and isinstance(content := result["content"], str) and content:
            thoughts, result["content"] = f"{thoughts}\n\n{content}", "" if form.empty else None
    if thoughts:
        result |= {"reasoning_content": thoughts, "reasoning": thoughts, "thinking": thoughts}
    return result


def _add_calls(place: int, message: dict[str, Any], calls: Sequence[Any], form: MessageForm) -> None:
    read = [_call(place, call, form) for call in calls]
    if form.write is None:
        message["tool_calls"] = read
        return
    text, content = form.write(read), message["content"]
    message["content"] = (
        [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text
    )


def _content(place: int, content: Any, form: MessageForm) -> Any:
    if content is None:
        return "" if form.empty else None
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form.parts else content
    if not isinstance(content, Sequence):
        raise TextError(f"messages[{place}].content is {type(content).__name__}", wanted="a string or a list of parts")
    texts = [_part(place, part) for part in content]
    return [{"type": "text", "text": text} for text in texts] if form.parts else "\n".join(texts)


def _part(place: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text":
        raise TextError(
            f"messages[{place}].content holds a part of type {kind!r}", wanted="parts of type text; no others are read"
        )
    if not isinstance(text, str):
        raise TextError(f"messages[{place}].content holds a part of type text without a text")
    return text


def _call(place: int, call: Any, form: MessageForm) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TextError(f"messages[{place}].tool_calls holds a call without function.name")
    arguments = function.get("arguments", {})
    wants_object = form.arguments or form.write is not None
    if isinstance(arguments, str) and wants_object:
        arguments = _object(arguments)
    if not isinstance(arguments, str) and not wants_object:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _object(text: str) -> dict[str, Any]:
    """Return a call's arguments, given as JSON text, as an object; empty text gives an empty
    object.

    Text that is no object, for example of a truncated answer, becomes the value of the key
    `UNREADABLE`: the next turn, which reports the error of the call, must not fail because of it.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {UNREADABLE: text}
