"""Parsers of tool calls in notations of their own: LFM2's (`[name(key="text", other=None)]`) and
Gemma's (`call:name{key:<|"|>text<|"|>}`).

Values are converted to JSON while they arrive. Sources: LFM2's model card, and the chat templates
of LFM2.5, FunctionGemma and Gemma 4.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sglcore.serving.chat.parsers.json_calls import LONGEST_NAME, Sink, Tools, text_as_json
from sglcore.serving.chat.parsers.scanner import Malformed, Scan, Scanner

MOST_LEVELS = 64
"""Maximum depth of nested lists and objects."""

_NAME = re.compile(r"[^\s()\[\]{}<>\"'=:,]+")
_WORDS = MappingProxyType({"True": "true", "False": "false", "None": "null"})
_ESCAPES = MappingProxyType(
    {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "/": "/"}
)
_HEX = MappingProxyType({"x": 2, "u": 4, "U": 8})
_ENDS = (",", "]", "}", ")")


@dataclass(frozen=True, slots=True)
class Notation:
    """A notation of tool calls: the texts around calls, arguments, names and values. An instance is
    called as a `ToolScan`: it parses the text after the reasoning into content and calls. Arguments
    are converted to JSON as they are written (quotes make a text); the tools' schemas are not used,
    and any function name is accepted."""

    begin: str
    """Text before the calls."""
    end: str
    """Text after the calls."""
    around: tuple[str, str]
    """Text before and after the arguments."""
    assign: str
    """Text between a parameter's name and its value."""
    quotes: tuple[str, ...]
    """Quotation marks of text, the model's own first. In quotes of one character a backslash
    escapes."""
    prefix: str = ""
    """Text before a function's name."""
    joint: str = ","
    """Text between parameters."""
    is_list: bool = False
    """Whether calls are in brackets, separated by commas; else each has its own marks."""
    is_sorted: bool = False
    """Whether parameters are written in the order of their names."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a well-formed call, which clients must not see."""
        return (self.begin, self.end)

    def __call__(self, s: Scanner, tools: Tools) -> Scan[None]:
        while mark := (yield from s.pass_until((self.begin,), "content")):
            name = yield from s.attempt(self._head(s, "[" if self.is_list else ""))
            if name is None:
                s.say("content", mark)
                continue
            is_whole = True
            while name is not None:
                sink = s.arguments(s.start_call(name))
                is_whole = yield from self._entries(s, sink, self.around[1], self.assign, 0)
                name = (yield from s.attempt(self._head(s, ","))) if is_whole and self.is_list else None
            if is_whole and (not self.is_list or (yield from s.take("]"))):
                yield from s.take(self.end)

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that a model would write for these calls. `calls`: in OpenAI's form, with
        arguments as objects. Only for LFM2's notation."""
        functions = [call["function"] for call in calls]
        made = (f"{f['name']}({', '.join(map(_written, f['arguments'].items()))})" for f in functions)
        return f"{self.begin}[{', '.join(made)}]{self.end}"

    def _head(self, s: Scanner, before: str) -> Scan[str]:
        """Parse the text `before` a call and the call's name, and return the name. Raises
        Malformed."""
        yield from s.literal(before + self.prefix)
        yield from s.peek()
        name, _ = yield from s.upto((self.around[0],), LONGEST_NAME)
        if not _NAME.fullmatch(name.strip()):
            raise Malformed
        return name.strip()

    def _entries(self, s: Scanner, sink: Sink, end: str, assign: str, level: int) -> Scan[bool]:
        """Parse names with values, up to and including the text `end`, and pass them to `sink` as a
        JSON object; returns False if they are malformed or cut off. `assign`: text between name and
        value; `level`: depth of the object, 0 for the arguments."""
        before = "{"
        while not (yield from s.take(end)):
            has_joint = before == "{" or (yield from s.take(","))
            key = (yield from s.attempt(self._key(s, assign))) if has_joint else None
            if key is None:
                sink("{}" if before == "{" else "}")
                return False
            sink(f"{before}{key}: ")
            before = ", "
            if not (yield from self._value(s, sink, level)):
                return False
        sink("{}" if before == "{" else "}")
        return True

    def _key(self, s: Scanner, assign: str) -> Scan[str]:
        parts: list[str] = []
        if (quote := (yield from self._quote(s))) and (yield from _string(s, quote, parts.append)):
            yield from s.literal(assign)
            return "".join(parts)
        name, _ = yield from s.upto((assign,), LONGEST_NAME)
        if quote or not name.strip():
            raise Malformed
        return text_as_json(name.strip())

    def _quote(self, s: Scanner) -> Scan[str]:
        """Parse a quotation mark of this notation, perhaps after white space, and return it; "" if
        none comes next."""
        for quote in self.quotes:
            if (yield from s.take(quote)):
                return quote
        return ""

    def _value(self, s: Scanner, sink: Sink, level: int) -> Scan[bool]:
        if quote := (yield from self._quote(s)):
            return (yield from _string(s, quote, sink))
        if level == MOST_LEVELS:
            return False
        if (yield from s.take("{")):
            return (yield from self._entries(s, sink, "}", ":", level + 1))
        if (yield from s.take("[")):
            return (yield from self._items(s, sink, level + 1))
        return (yield from _word(s, sink))

    def _items(self, s: Scanner, sink: Sink, level: int) -> Scan[bool]:
        before = "["
        while not (yield from s.take("]")):
            if before != "[" and not (yield from s.take(",")):
                return False
            sink(before)
            before = ", "
            if not (yield from self._value(s, sink, level)):
                return False
        sink("[]" if before == "[" else "]")
        return True


def _written(entry: tuple[str, Any]) -> str:
    key, value = entry
    return f"{key}={text_as_json(value) if isinstance(value, str) else repr(value)}"


def _string(s: Scanner, quote: str, sink: Sink) -> Scan[bool]:
    """Parse text up to and including the quotation mark `quote`, and pass it to `sink` as a JSON
    string while it arrives; returns False if the quotation mark is missing. The opening mark has
    been read."""
    sink('"')
    marks = (quote, "\\") if len(quote) == 1 else (quote,)
    while mark := (yield from s.hand_on(marks, lambda text: sink(text_as_json(text)[1:-1]))):
        if mark == quote:
            sink('"')
            return True
        sink((yield from _escaped(s)))
    return False


def _escaped(s: Scanner) -> Scan[str]:
    """Parse the rest of a backslash escape, the backslash itself already read; returns its text as
    it stands inside a JSON string. An unknown escape keeps its backslash."""
    if not (yield from s.more()):
        return "\\\\"
    mark = s.character()
    wanted, digits = _HEX.get(mark, 0), ""
    while len(digits) < wanted and (yield from s.more()):
        digit = s.character()
        if digit not in string.hexdigits:
            s.unread(1)
            break
        digits += digit
    if wanted and len(digits) == wanted and int(digits, 16) <= sys.maxunicode:
        return json.dumps(chr(int(digits, 16)))[1:-1]
    return _ESCAPES.get(mark + digits) or text_as_json("\\" + mark + digits)[1:-1]


def _word(s: Scanner, sink: Sink) -> Scan[bool]:
    """Parse a number, a constant, or text without quotation marks, up to a comma or closing
    bracket, which is not read, and pass it to `sink` as JSON; returns False if it is empty or its
    end is missing."""
    parts: list[str] = []
    mark = yield from s.hand_on(_ENDS, parts.append)
    s.unread(len(mark))
    word = "".join(parts).strip()
    if not word:
        return False
    try:
        json.loads(_WORDS.get(word, word), parse_constant=_refused)
    except (ValueError, RecursionError):
        sink(text_as_json(word))
    else:
        sink(_WORDS.get(word, word))
    return bool(mark)


def _refused(word: str) -> None:
    raise ValueError(word)


LFM2 = Notation("<|tool_call_start|>", "<|tool_call_end|>", ("(", ")"), "=", ('"', "'"), joint=", ", is_list=True)
FUNCTION_GEMMA = Notation(
    "<start_function_call>", "<end_function_call>", ("{", "}"), ":", ("<escape>", '"'), "call:", is_sorted=True
)
GEMMA = Notation("<|tool_call>", "<tool_call|>", ("{", "}"), ":", ('<|"|>', '"'), "call:", is_sorted=True)
