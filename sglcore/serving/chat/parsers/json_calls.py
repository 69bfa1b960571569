"""Parsers of tool calls with arguments in JSON: Hermes (Qwen), Llama 3, Mistral, DeepSeek, Kimi-K2,
Granite 3, Nemotron.

Arguments are returned as they arrive. Text that is no call is content, with its markers. Sources:
the chat templates of these models, and the model cards where a template writes no calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglcore.serving.chat.parsers.scanner import Malformed, Scan, Scanner

Tools = Sequence[Mapping[str, Any]]
Sink = Callable[[str], None]
"""Receives the parts of the text of a call's arguments."""

LONGEST_NAME = 1024
"""Maximum number of characters of a function's name, or of a call's id."""

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE_BEGIN, ONE_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE, FENCE_END = "```json", "```"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENT, CALL_DONE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@dataclass(slots=True)
class Head:
    """A call up to its arguments. `arguments`: their JSON text, if it came before the name or is
    missing ("{}"); empty: it follows in the text. `fenced`: the arguments are in a Markdown code
    block."""

    name: str = ""
    call_id: str = ""
    arguments: str = ""
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class Marked:
    """The format `{"name": ..., "arguments": ...}`, or a list of such objects, between the marks
    `begin` and `end`; the end mark may be missing. An instance is called as a `ToolScan`: it parses
    the text after the reasoning into content and calls. Any function name is accepted."""

    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a well-formed call, which clients must not see."""
        return (self.begin, self.end)

    def __call__(self, s: Scanner, tools: Tools) -> Scan[None]:
        while mark := (yield from s.pass_until((self.begin,), "content")):
            if (head := (yield from s.attempt(_object_head(s)))) is not None:
                is_whole = yield from _object_rest(s, head)
            elif (head := (yield from s.attempt(_list_head(s)))) is not None:
                is_whole = yield from _list_rest(s, head)
            else:
                s.say("content", mark)
                continue
            if is_whole:
                yield from s.take(self.end)

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that a model would write for these calls, as a list, without the end
        mark. `calls`: in OpenAI's form, with arguments as objects."""
        made = [{name: call["function"][name] for name in ("name", "arguments")} for call in calls]
        return self.begin + json.dumps(made, ensure_ascii=False)


HERMES = Marked(CALL, CALL_END)
GRANITE = Marked("<|tool_call|>", "<|/tool_call|>")
"""Granite 3 omits the end mark, Phi-4-mini does not."""
NEMOTRON = Marked("<TOOLCALL>", "</TOOLCALL>")
LFM2 = Marked("<|tool_call_start|>", "<|tool_call_end|>")


def llama3(s: Scanner, tools: Tools) -> Scan[None]:
    """Parse `{"name": ..., "parameters": ...}` at the beginning of the text or after
    `<|python_tag|>`; further calls follow, with or without `;`. Other text is content. `tools` is
    not read: any name is accepted."""
    yield from _llama3_series(s)
    while mark := (yield from s.pass_until((PYTHON_TAG,), "content")):
        if not (yield from _llama3_series(s)):
            s.say("content", mark)


def mistral(s: Scanner, tools: Tools) -> Scan[None]:
    """Parse `[TOOL_CALLS]` and after it a list of objects, or one call in the form
    `name[ARGS]{...}`, perhaps with `[CALL_ID]` and an id after the name. Other text is content.
    `tools` is not read: any name is accepted."""
    while mark := (yield from s.pass_until((TOOL_CALLS,), "content")):
        if (head := (yield from s.attempt(_list_head(s)))) is not None:
            yield from _list_rest(s, head)
        elif (head := (yield from s.attempt(_named_head(s)))) is not None:
            yield from _arguments(s, head)
        else:
            s.say("content", mark)


def deepseek(s: Scanner, tools: Tools) -> Scan[None]:
    """Parse calls between markers, each `function<sep>name` with the arguments in a code block, or
    `name<sep>` with the arguments. Other text is content. `tools` is not read: any name is
    accepted."""
    yield from _sections(s, BEGIN, _fenced_head, ONE_END, END)


def kimi(s: Scanner, tools: Tools) -> Scan[None]:
    """Parse calls between markers, each with an id that contains the function's name:
    `functions.name:0<begin>{...}`. Other text is content. `tools` is not read: any name is
    accepted."""
    yield from _sections(s, SECTION, _identified_head, CALL_DONE, SECTION_END)


def _sections(s: Scanner, begin: str, head_of: Callable[[Scanner], Scan[Head]], one_end: str, end: str) -> Scan[None]:
    while mark := (yield from s.pass_until((begin,), "content")):
        head = yield from s.attempt(head_of(s))
        if head is None:
            s.say("content", mark)
            continue
        while head is not None:
            is_whole = yield from _arguments(s, head)
            is_whole = is_whole and (not head.fenced or (yield from s.take(FENCE_END)))
            is_whole = is_whole and (yield from s.take(one_end))
            head = (yield from s.attempt(head_of(s))) if is_whole else None
        yield from s.take(end)


def text_as_json(text: str) -> str:
    """Return a text as a JSON string, with quotes; characters that are not ASCII stay as they
    are."""
    return json.dumps(text, ensure_ascii=False)


def _object_head(s: Scanner, *, needs_arguments: bool = False) -> Scan[Head]:
    """Parse a call's object up to its arguments if its name comes first, else the whole object.
    Raises Malformed for text that is no such object; with `needs_arguments`, also for an object
    without arguments."""
    head = Head()
    yield from s.literal("{")
    while True:
        key = yield from _string(s)
        yield from s.literal(":")
        if key in ("arguments", "parameters"):
            if not (yield from s.starts("{")):
                raise Malformed
            if head.name:
                return head
            head.arguments = yield from _object(s)
        elif key in ("name", "id", "type"):
            value = yield from _string(s)
            head.name = value if key == "name" else head.name
            head.call_id = value if key == "id" else head.call_id
        else:
            raise Malformed
        if (yield from s.take("}")):
            break
        yield from s.literal(",")
    if not head.name or (needs_arguments and not head.arguments):
        raise Malformed
    head.arguments = head.arguments or "{}"
    return head


def _object_rest(s: Scanner, head: Head) -> Scan[bool]:
    """Emit the call of `head` as deltas, and parse the rest of its object; returns False if the
    rest is malformed or cut off. The call then stays as far as it was read."""
    if head.arguments:
        s.arguments(s.start_call(head.name, head.call_id))(head.arguments)
        return True
    if not (yield from _arguments(s, head)):
        return False
    return (yield from s.attempt(_object_tail(s))) is True


def _object_tail(s: Scanner) -> Scan[bool]:
    while not (yield from s.take("}")):
        yield from s.literal(",")
        yield from _string(s)
        yield from s.literal(":")
        yield from _string(s)
    return True


def _arguments(s: Scanner, head: Head) -> Scan[bool]:
    """Emit the call of `head` as deltas, and parse its arguments, an object that follows in the
    text; returns False if they are malformed or cut off. The call then stays as far as it was
    read."""
    yield from s.starts("{")
    return (yield from s.json_object(s.arguments(s.start_call(head.name, head.call_id))))


def _llama3_series(s: Scanner) -> Scan[bool]:
    head = yield from s.attempt(_object_head(s, needs_arguments=True))
    found = head is not None
    while head is not None:
        is_whole = yield from _object_rest(s, head)
        head = (yield from s.attempt(_llama3_next(s))) if is_whole else None
    return found


def _llama3_next(s: Scanner) -> Scan[Head]:
    yield from s.take(";")
    return (yield from _object_head(s, needs_arguments=True))


def _list_head(s: Scanner) -> Scan[Head]:
    yield from s.literal("[")
    return (yield from _object_head(s))


def _list_next(s: Scanner) -> Scan[Head]:
    yield from s.literal(",")
    return (yield from _object_head(s))


def _list_rest(s: Scanner, head: Head | None) -> Scan[bool]:
    while head is not None:
        is_whole = yield from _object_rest(s, head)
        head = (yield from s.attempt(_list_next(s))) if is_whole else None
    return (yield from s.take("]"))


def _named_head(s: Scanner) -> Scan[Head]:
    name, mark = yield from s.upto((ARGS, CALL_ID, "{"), LONGEST_NAME)
    call_id = ""
    if mark == CALL_ID:
        call_id, mark = yield from s.upto((ARGS, "{"), LONGEST_NAME)
    if mark == "{":
        s.unread(1)
    name = name.strip()
    if not name or any(mark in " \t\n\r[]\"'" for mark in name) or not (yield from s.starts("{")):
        raise Malformed
    return Head(name, call_id.strip())


def _fenced_head(s: Scanner) -> Scan[Head]:
    yield from s.literal(ONE_BEGIN)
    before, _ = yield from s.upto((SEPARATOR,), LONGEST_NAME)
    if (yield from s.starts("{")):
        return _named(before)
    name, _ = yield from s.upto(("\n",), LONGEST_NAME)
    yield from s.literal(FENCE)
    if before.strip() != "function" or not (yield from s.starts("{")):
        raise Malformed
    head = _named(name)
    head.fenced = True
    return head


def _identified_head(s: Scanner) -> Scan[Head]:
    yield from s.literal(CALL_BEGIN)
    text, _ = yield from s.upto((ARGUMENT,), LONGEST_NAME)
    name, colon, number = text.strip().rpartition(":")
    is_numbered = bool(colon) and number.isdecimal()
    head = _named((name if is_numbered else text).strip().removeprefix("functions."))
    head.call_id = text.strip() if is_numbered else ""
    if not (yield from s.starts("{")):
        raise Malformed
    return head


def _named(name: str) -> Head:
    if not name.strip():
        raise Malformed
    return Head(name.strip())


def _string(s: Scanner) -> Scan[str]:
    """Parse a JSON string and return its value. Raises Malformed, also for one that cannot be
    UTF-8, or with more than LONGEST_NAME characters without a backslash."""
    yield from s.literal('"')
    text = ""
    while True:
        part, mark = yield from s.upto(('"', "\\"), LONGEST_NAME)
        text += part + mark
        if mark == '"':
            break
        if not (yield from s.more()):
            raise Malformed
        text += s.character()
    try:
        value = json.loads('"' + text)
        value.encode()  # half a surrogate pair could not be sent to a client
    except ValueError:
        raise Malformed from None
    return value


def _object(s: Scanner) -> Scan[str]:
    """Parse a JSON object and return it as text, unchanged. Raises Malformed if it is malformed or
    cut off."""
    parts: list[str] = []
    if not (yield from s.json_object(parts.append)):
        raise Malformed
    return "".join(parts)
