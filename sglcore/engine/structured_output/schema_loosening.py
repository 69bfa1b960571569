"""Removes from JSON schemas the parts that llguidance does not enforce, and names them. Every value
of the given schema is also valid under the new one. Ordinary schemas of Pydantic and zod have such
parts.

It does not need the library, so a frontend can tell which parts an engine will leave out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sglcore.engine.structured_output.grammar_schema import LIST, MAP, SCHEMA

FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid",
    }
)  # fmt: skip
"""Values of `format` that llguidance enforces. Others are annotations, as the standard says."""

DROPPED = frozenset(
    {
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""Keywords that llguidance does not enforce. Each of them only forbids values."""

NOTES = frozenset(
    {"contentEncoding", "contentMediaType", "contentSchema", "discriminator", "example", "examples", "nullable"}
)
"""Keywords that restrict no value."""

SILENT = frozenset({"else", "maxContains", "minContains", "then"})
"""Keywords that are reported under the name of another keyword of the same schema."""

_AROUND = re.compile(r"\(\?(?:<?[=!])")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
_LETTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
UNREADABLE = frozenset({*(f"\\{digit}" for digit in range(1, 10)), *(f"\\{letter}" for letter in "bBAzZGkK")})
"""Escapes that depend on text before or after them, or on the match of a group: no automaton
matches them."""
_NOTED = re.compile(r"(.*/pattern)'s look-around|(.*/format) (['\"]).*\3", re.DOTALL)
"""Names of left-out parts that have a note after the JSON pointer."""
_SAYS_NOTHING = ("type", "title", "description", "$comment")


class Loosened(NamedTuple):
    """A schema that llguidance enforces completely, and the names of the parts that were left out,
    each a JSON pointer with a note for some."""

    schema: Any
    left_out: tuple[str, ...]


def loosened(schema: Any) -> Loosened:
    """Return the schema without the parts that llguidance does not enforce, and the names of these
    parts. `schema` is not changed. A value that is no schema is returned as it is."""
    left_out: list[str] = []
    return Loosened(_loosen(schema, "#", left_out), tuple(left_out))


def place_of(name: str) -> str:
    """Return the JSON pointer in the name of a left-out part, without its note."""
    found = _NOTED.fullmatch(name)
    return name if found is None else found[1] or found[2]


def _loosen(schema: Any, place: str, left_out: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    node: dict[str, Any] = {
        name: _part(name, value, f"{place}/{name}", left_out)
        for name, value in _with_names(schema)
        if not _is_note(name)
    }
    for name in sorted(DROPPED & set(node)):
        value = node.pop(name)
        if name not in SILENT and (name, value) != ("uniqueItems", False) and not _is_any_name(name, value):
            left_out.append(f"{place}/{name}")
    if "oneOf" in node:
        if not _are_apart(node, schema):
            left_out.append(f"{place}/oneOf")
        choice = node.pop("oneOf")
        if "anyOf" in node:
            node["allOf"] = [*node.get("allOf", ()), {"anyOf": choice}]
        else:
            node["anyOf"] = choice
    _loosen_text(node, place, left_out)
    _loosen_keys(node, place, left_out)
    _loosen_counts(node, place, left_out)
    return node


def _part(name: str, value: Any, place: str, left_out: list[str]) -> Any:
    if name in DROPPED:
        return value
    if name in MAP and isinstance(value, dict):
        return {key: _loosen(each, f"{place}/{key}", left_out) for key, each in value.items()}
    if name in LIST and isinstance(value, list):
        return [_loosen(each, f"{place}/{number}", left_out) for number, each in enumerate(value)]
    return _loosen(value, place, left_out) if name in SCHEMA else value


def _is_note(name: str) -> bool:
    """Return whether a keyword restricts no value, so that it is removed.

    llguidance merges the keywords next to a choice into its alternatives, and fails if these are
    recursive.
    """
    return name in NOTES or (name.startswith("x-") and name != "x-guidance")


def _with_names(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keywords and values of a schema. A `propertyNames` that lists names, or is one
    pattern, is replaced by equivalent keywords if the schema does not have these already."""
    names, taken = schema.get("propertyNames"), {"properties", "patternProperties", "required"}
    if not isinstance(names, dict) or taken & set(schema) or set(names) - {*_SAYS_NOTHING, "enum", "const", "pattern"}:
        yield from schema.items()
        return
    value = schema.get("additionalProperties", True)
    known = [names["const"]] if "const" in names else names.get("enum")
    rest = {name: each for name, each in schema.items() if name not in ("propertyNames", "additionalProperties")}
    if isinstance(known, list) and all(isinstance(each, str) for each in known) and "pattern" not in names:
        yield from {**rest, "properties": dict.fromkeys(known, value), "additionalProperties": False}.items()
    elif known is None and isinstance(names.get("pattern"), str) and readable(names["pattern"]) == names["pattern"]:
        yield from {**rest, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}.items()
    else:
        yield from schema.items()


def _is_any_name(keyword: str, value: Any) -> bool:
    """Return whether the keyword is a `propertyNames` that allows every name."""
    if keyword != "propertyNames":
        return False
    return value is True or (
        isinstance(value, dict) and not set(value) - set(_SAYS_NOTHING) and value.get("type", "string") == "string"
    )


def _loosen_text(node: dict[str, Any], place: str, left_out: list[str]) -> None:
    found = node.get("format")
    if isinstance(found, str) and found not in FORMATS and node.get("type") not in ("integer", "number", "boolean"):
        left_out.append(f"{place}/format {found!r}")
        del node["format"]
    pattern = node.get("pattern")
    if isinstance(pattern, str) and (simpler := readable(pattern)) != pattern:
        left_out.append(f"{place}/pattern" if simpler is None else f"{place}/pattern's look-around")
        if simpler is None:
            del node["pattern"]
        else:
            node["pattern"] = simpler


def _loosen_keys(node: dict[str, Any], place: str, left_out: list[str]) -> None:
    """Remove `patternProperties` if a pattern cannot be enforced exactly. Any property may match
    it, so `additionalProperties` is removed too. Changes `node`, the schema at the JSON pointer
    `place`, and adds the name of the removed part to `left_out`."""
    keys = node.get("patternProperties")
    if isinstance(keys, dict) and any(readable(key) != key for key in keys):
        left_out.append(f"{place}/patternProperties")
        del node["patternProperties"]
        node.pop("additionalProperties", None)


def _loosen_counts(node: dict[str, Any], place: str, left_out: list[str]) -> None:
    """Remove `minProperties` and `maxProperties` if a listed property is optional; llguidance does
    not enforce them then. Changes `node`, the schema at the JSON pointer `place`, and adds the
    names of the removed parts to `left_out`."""
    listed, required = node.get("properties"), node.get("required")
    if not isinstance(listed, dict) or set(listed) <= set(required if isinstance(required, list) else ()):
        return
    for name in ("minProperties", "maxProperties"):
        if node.pop(name, None) is not None:
            left_out.append(f"{place}/{name}")


def _are_apart(node: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Return whether no value can match two of the schemas of `oneOf` in `node`, as far as types,
    constants or a discriminator in `schema` show it."""
    parts = node["oneOf"]
    if "discriminator" in schema or not isinstance(parts, list) or len(parts) < 2:
        return True
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
        return not {"integer", "number"} <= set(kinds)
    tags = [_constants(part) for part in parts]
    shared = set.intersection(*(set(each) for each in tags)) if tags else set()
    return any(len({repr(each[name]) for each in tags}) == len(tags) for name in shared)


def _constants(part: Any) -> dict[str, Any]:
    """Return the values of `const` in a schema's properties that are required, by the property's
    name; empty if it is no schema of an object."""
    listed = part.get("properties") if isinstance(part, dict) else None
    required = part.get("required") if isinstance(part, dict) else None
    if not isinstance(listed, dict) or not isinstance(required, Sequence):
        return {}
    return {
        name: each["const"]
        for name, each in listed.items()
        if isinstance(each, dict) and "const" in each and name in required
    }


def readable(pattern: str) -> str | None:
    """Return a pattern without look-ahead and look-behind, which only forbid text. None if it has
    other parts that no automaton matches, such as a reference to a group, or a group without an
    end."""
    while (found := _find(_AROUND, pattern)) is not None:
        end = _group_end(pattern, found)
        if end is None:
            return None
        quantifier = _QUANTIFIER.match(pattern, end)
        pattern = pattern[:found] + pattern[quantifier.end() if quantifier else end :]
    return None if _has_unreadable(pattern) else pattern


def _find(wanted: re.Pattern[str], pattern: str) -> int | None:
    """Return the index where the first match of `wanted` begins in a pattern, outside of sets and
    escapes; None if there is none."""
    return next((place for place, _ in _letters(pattern) if wanted.match(pattern, place)), None)


def _has_unreadable(pattern: str) -> bool:
    return any(text in UNREADABLE for _, text in _letters(pattern))


def _group_end(pattern: str, begin: int) -> int | None:
    depth = 0
    for place, text in _letters(pattern, begin):
        depth += (text == "(") - (text == ")")
        if depth == 0:
            return place + 1
    return None


def _letters(pattern: str, place: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the index and text of each character of a pattern, from index `place` on; each escape
    and each set counts as one."""
    yield from ((found.start(), found[0]) for found in _LETTER.finditer(pattern, place))
