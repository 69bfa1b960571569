"""Tool calls in tags, as Qwen3-Coder writes them: `<function=name><parameter=key>value</parameter></function>`.

Values are plain text; the tool's schema says which of them are not strings. They become one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sglcore.serving.formats.json_calls import CALL, CALL_END, LONGEST_NAME, Tools
from sglcore.serving.formats.scanner import Malformed, Scan, Scanner

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

Sink = Callable[[str], None]


def qwen3_coder(s: Scanner, tools: Tools) -> Scan[None]:
    """Functions in tags, with or without `<tool_call>` around them."""
    while mark := (yield from s.pass_until((CALL, FUNCTION), "content")):
        name = yield from s.attempt(_head(s, mark))
        if name is None:
            s.say("content", mark)
        elif (yield from _call(s, name, properties_of(tools, name))):
            yield from s.take(CALL_END)


def properties_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The declared parameters of a tool, by name; empty if the tool is unknown."""
    functions = (tool.get("function", tool) for tool in tools)
    schema = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def is_string(schema: Any) -> bool:
    """Whether a value of this schema can be nothing but a string."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _head(s: Scanner, mark: str) -> Scan[str]:
    if mark == CALL:
        yield from s.literal(FUNCTION)
    name = yield from _name(s)
    if not ((yield from s.starts(PARAMETER)) or (yield from s.starts(FUNCTION_END))):
        raise Malformed
    return name


def _name(s: Scanner) -> Scan[str]:
    name, _ = yield from s.upto((">",), LONGEST_NAME)
    if not name.strip() or "<" in name or "\n" in name:
        raise Malformed
    return name.strip()


def _call(s: Scanner, name: str, properties: Mapping[str, Any]) -> Scan[bool]:
    """The parameters up to the end of the function; False if something else stands between them."""
    sink = s.arguments(s.start_call(name))
    before = "{"
    while not (yield from s.take(FUNCTION_END)):
        key = yield from s.attempt(_key(s))
        if key is None:
            sink("{}" if before == "{" else "}")
            return False
        sink(f"{before}{_text(key)}: ")
        before = ", "
        read = _string if is_string(properties.get(key)) else _value
        if not (yield from read(s, sink, properties.get(key))):
            return False
    sink("{}" if before == "{" else "}")
    return True


def _key(s: Scanner) -> Scan[str]:
    yield from s.literal(PARAMETER)
    return (yield from _name(s))


def _string(s: Scanner, sink: Sink, schema: Any) -> Scan[bool]:
    """A value that is text: handed on as it comes."""
    sink('"')
    yield from s.skip("\n")
    if not (yield from s.hand_on(("\n" + PARAMETER_END, PARAMETER_END), lambda text: sink(_text(text)[1:-1]))):
        return False
    sink('"')
    return True


def _value(s: Scanner, sink: Sink, schema: Any) -> Scan[bool]:
    """A value that may be anything: handed on when all of it is there."""
    parts: list[str] = []
    yield from s.skip("\n")
    is_whole = yield from s.hand_on(("\n" + PARAMETER_END, PARAMETER_END), parts.append)
    sink(as_json("".join(parts), schema) if is_whole else "".join(parts))
    return bool(is_whole)


def as_json(text: str, schema: Any) -> str:
    """The JSON text of a parameter's value: JSON if it is some, Python's names of constants, or else a string."""
    kinds = _kinds(schema)
    word = text.strip()
    constant = {"true": "true", "false": "false", "none": "null", "null": "null"}.get(word.lower())
    if constant and (kinds & ({"null"} if constant == "null" else {"boolean"})):
        return constant
    if kinds and kinds <= {"string", "null"}:
        return _text(text)
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _text(text)
    return word


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names; empty if it does not say."""
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


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
