"""Finds keywords in a JSON schema where they are keywords, not where they are names of properties
or literal values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglcore.sampling.grammar_spec import GrammarError

SCHEMA = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
"""Keywords that have a schema as their value (`items` may also have a list of schemas)."""
LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
"""Keywords that have a list of schemas (LIST), or an object with a schema for each name (MAP), as
their value."""
MAP = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})


def schemas(schema: Any, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema object inside `schema`, the outermost first, each with its place as a JSON
    pointer. Booleans are not yielded."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for name, value in schema.items():
        for step, part in _parts(name, value):
            yield from schemas(part, f"{place}/{step}")


def refuse_keywords(schema: Any, unsupported: frozenset[str], backend: str) -> None:
    """Raise GrammarError for the first keyword in `unsupported` that the schema uses: the grammar
    backend named `backend` would read it and not enforce it."""
    for place, node in schemas(schema):
        found = next((name for name in node if name in unsupported), None)
        if found is not None:
            raise GrammarError(
                f"the schema uses {found!r} at {place}, which the grammar backend {backend} does not enforce",
                wanted="a schema without it",
                remedy="take it out, and check the output for it yourself",
            )


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if name in MAP and isinstance(value, dict):
        yield from ((f"{name}/{key}", part) for key, part in value.items())
    elif name in LIST and isinstance(value, list):
        yield from ((f"{name}/{index}", part) for index, part in enumerate(value))
    elif name in SCHEMA:
        yield name, value
