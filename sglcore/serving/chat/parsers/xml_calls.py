"""Parsers of tool calls in tags: those of Qwen3-Coder
(`<function=name><parameter=key>value</parameter></function>`), GLM-4.5 and MiniMax-M2.

Values are plain text; the tool's schema says which values are not strings. They become one JSON
object. Sources: the chat templates of these models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglcore.serving.chat.parsers.json_calls import CALL, CALL_END, LONGEST_NAME, Sink, Tools, text_as_json
from sglcore.serving.chat.parsers.scanner import Malformed, Scan, Scanner


@dataclass(frozen=True, slots=True)
class Tags:
    """A format of tool calls in tags: the tags around functions, parameter names and values. An
    instance is called as a `ToolScan`: it parses the text after the reasoning into content and
    calls, with arguments converted to JSON by the tools' schemas. Any function name is accepted."""

    function: tuple[str, str]
    """Tags before and after a function's name; a parameter, or the end tag, may replace the second
    one."""
    key: tuple[str, str]
    """Tags before and after a parameter's name."""
    value: tuple[str, str]
    """Tags before and after a parameter's value."""
    end: str
    """The end tag of a function."""
    section: tuple[str, str] = ("", "")
    """Tags around all functions, which models sometimes leave out; empty: this format has none."""
    margin: str = ""
    """A character at both ends of a value that does not belong to the value."""

    @property
    def opening(self) -> tuple[str, ...]:
        """Texts with which a call may begin: the tag of the section, if this format has one, and
        that of a function."""
        return tuple(filter(None, (self.section[0], self.function[0])))

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a well-formed call that begin with `<`, which clients must not see, each
        once."""
        tags = (*self.section, *self.function, *self.key, *self.value, self.end)
        return tuple(tag for tag in dict.fromkeys(tags) if tag.startswith("<"))

    def __call__(self, s: Scanner, tools: Tools) -> Scan[None]:
        while mark := (yield from s.pass_until(self.opening, "content")):
            name = yield from s.attempt(self._head(s, mark == self.function[0]))
            if name is None:
                s.say("content", mark)
            is_whole = name is not None
            while name is not None:
                is_whole = yield from self._call(s, name, properties_of(tools, name))
                name = (yield from s.attempt(self._head(s))) if is_whole and self.section[0] else None
            if is_whole and self.section[1]:
                yield from s.take(self.section[1])

    def _head(self, s: Scanner, has_begun: bool = False) -> Scan[str]:
        if not has_begun:
            yield from s.literal(self.function[0])
        yield from s.peek()
        name, mark = yield from s.upto((self.function[1], self.key[0], self.end), LONGEST_NAME)
        if mark != self.function[1]:
            s.unread(len(mark))
        if not ((yield from s.starts(self.key[0])) or (yield from s.starts(self.end))):
            raise Malformed
        return _name(name)

    def _call(self, s: Scanner, name: str, properties: Mapping[str, Any]) -> Scan[bool]:
        """Emit the start of a call, and parse its parameters up to and including the end tag of the
        function; returns False if they are malformed or cut off. `properties`: the schema of each
        parameter."""
        sink = s.arguments(s.start_call(name))
        before = "{"
        while not (yield from s.take(self.end)):
            key = yield from s.attempt(self._key(s))
            if key is None:
                sink("{}" if before == "{" else "}")
                return False
            sink(f"{before}{text_as_json(key)}: ")
            before = ", "
            read = self._string if is_string(properties.get(key)) else self._value
            if not (yield from read(s, sink, properties.get(key))):
                return False
        sink("{}" if before == "{" else "}")
        return True

    def _key(self, s: Scanner) -> Scan[str]:
        yield from s.literal(self.key[0])
        name, _ = yield from s.upto((self.key[1],), LONGEST_NAME)
        if self.value[0]:
            yield from s.literal(self.value[0])
        return _name(name)

    def _string(self, s: Scanner, sink: Sink, schema: Any) -> Scan[bool]:
        """Parse a value as text, with its end tag, and pass it to `sink` as a JSON string while it
        arrives; returns False if its end tag is missing. `schema` is not read."""
        sink('"')
        if not (yield from self._rest(s, lambda text: sink(text_as_json(text)[1:-1]))):
            return False
        sink('"')
        return True

    def _value(self, s: Scanner, sink: Sink, schema: Any) -> Scan[bool]:
        """Parse a value of any type, with its end tag, and pass it to `sink` as JSON when it is
        complete; returns False if its end tag is missing, and then passes on its text as it is.
        `schema`: of the value (None: not known)."""
        parts: list[str] = []
        is_whole = yield from self._rest(s, parts.append)
        sink(as_json("".join(parts), schema) if is_whole else "".join(parts))
        return is_whole

    def _rest(self, s: Scanner, sink: Sink) -> Scan[bool]:
        """Parse a value, up to and including its end tag, and pass it to `sink` as plain text
        without its margins; returns False if the end tag is missing."""
        end = self.value[1]
        if not self.margin:
            return bool((yield from s.hand_on((end,), sink)))
        yield from s.skip(self.margin)
        return bool((yield from s.hand_on((self.margin + end, end), sink)))


QWEN3_CODER = Tags(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", (CALL, CALL_END), margin="\n"
)
GLM = Tags((CALL, "\n"), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), CALL_END)
MINIMAX = Tags(
    ('<invoke name="', '">'),
    ('<parameter name="', '">'),
    ("", "</parameter>"),
    "</invoke>",
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)


def _name(text: str) -> str:
    name = text.strip()
    if not name or any(mark in name for mark in '<"{\n'):
        raise Malformed
    return name


def properties_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the schemas of the parameters of the tool `name`, by parameter; empty if the tool is
    not in `tools` or has no parameters. `tools`: in OpenAI's form."""
    functions = (tool.get("function", tool) for tool in tools)
    schema = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def is_string(schema: Any) -> bool:
    """Return whether the `type` of this schema is "string" alone; false for None and for other ways
    to say so."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def as_json(text: str, schema: Any) -> str:
    """Return a parameter's value `text`, as the model wrote it, as JSON text: true, false, null and
    Python's names for them if the schema allows the type; a string if the schema allows only
    strings and null, or if the text is not JSON; else the text itself, without white space around
    it. `schema` None: any type."""
    kinds = _kinds(schema)
    word = text.strip()
    constant = {"true": "true", "false": "false", "none": "null", "null": "null"}.get(word.lower())
    if constant and (kinds & ({"null"} if constant == "null" else {"boolean"})):
        return constant
    if kinds and kinds <= {"string", "null"}:
        return text_as_json(text)
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text_as_json(text)
    return word


def _kinds(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows, by `type`, `anyOf` and `oneOf`; empty if
    it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    named = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    for name in ("anyOf", "oneOf"):
        others = schema.get(name)
        named = named.union(*map(_kinds, others)) if isinstance(others, list) else named
    return named


def _refuse(word: str) -> None:
    raise ValueError(word)
