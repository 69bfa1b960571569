"""JSON schemas for llguidance: keywords that it reads but does not enforce are refused, and the
white space between tokens is limited.

It does not need the library, so a frontend can check what an engine will compile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from sglcore.engine.structured_output.grammar_schema import refuse_keywords, schemas
from sglcore.engine.structured_output.schema_loosening import loosened
from sglcore.sampling.grammar_spec import Grammar, GrammarError, read_tags

NAME = "llguidance"

WHITESPACE = r"( |\n[ \t]{0,32})?"
"""The regular expression for white space between JSON's tokens: none, a space, or a line break with
its indentation. Without a limit a model may write white space until its tokens are used up."""

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
)
"""llguidance's options for every schema."""

OWN = "x-guidance"
"""The keyword with which a schema itself would set llguidance's options; it is refused."""

UNENFORCED = frozenset({OWN, "$anchor", "$dynamicAnchor"})
"""Keywords that llguidance ignores silently, and OWN, which would switch llguidance's own checks
off."""

BOUNDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
MERGED = frozenset({"$ref", "anyOf", "oneOf"})
"""Keywords that llguidance merges with the other keywords of the same schema."""


def check_schema(schema: Any) -> None:
    """Raise GrammarError for what llguidance would accept and not enforce, and `loosened` does not
    remove: a keyword in UNENFORCED, or bounds of a number that it gets wrong."""
    refuse_keywords(schema, UNENFORCED, NAME)
    _refuse_narrow_bounds(schema)


def embedded(schema: Mapping[str, Any]) -> str:
    """Return a schema as the text after `%json` in a Lark grammar, without the parts that are not
    enforced (`loosened`). Raises GrammarError."""
    check_schema(schema)
    return json.dumps({**loosened(schema).schema, OWN: dict(OPTIONS)}, ensure_ascii=False)


class LeftOut(NamedTuple):
    """The parts of one JSON schema that llguidance does not enforce while an output is generated,
    for a check of the finished output: the whole schema as text, the names of the parts, and the
    text before a value of the schema in the output."""

    schema: str
    """The whole schema, as JSON text."""
    names: tuple[str, ...]
    """The parts, each as a JSON pointer to its place in the schema, with a note for some."""
    begin: str = ""
    """The text before a value of the schema in an output; empty: the whole output is one value."""


def left_out_of(grammar: Grammar | None) -> list[LeftOut]:
    """Return a LeftOut for each schema of the grammar that has parts that are not enforced; empty
    if none has, and for None. The grammar's text must be valid."""
    schemas: list[tuple[str, str]] = []
    if grammar is not None and grammar.kind == "json_schema":
        schemas = [(grammar.text, "")]
    elif grammar is not None and grammar.kind == "structural_tag":
        schemas = [(tag.schema, tag.begin) for tag in read_tags(grammar.text).tags]
    found = [LeftOut(text, loosened(json.loads(text)).left_out, begin) for text, begin in schemas]
    return [each for each in found if each.names]


def _refuse_narrow_bounds(schema: Any) -> None:
    """Raise GrammarError if the bound nearer to 0 excludes a whole number and the other bound is
    less than 1 away: llguidance would accept the excluded number."""
    nodes = [node for _, node in schemas(schema) if node.get("type") != "integer"]
    merges = any("allOf" in node or (MERGED & set(node) and BOUNDS & set(node)) for node in nodes)
    for group in [nodes] if merges else [[node] for node in nodes]:
        lows, highs = (_bounds(group, name) for name in ("minimum", "maximum"))
        for low, high in product(lows, highs):
            below = low[1] and low[0] >= 0 and low[0] == int(low[0])
            above = high[1] and high[0] <= 0 and high[0] == int(high[0])
            if (below or above) and 0 <= high[0] - low[0] < 1:
                raise GrammarError(
                    f"the schema wants a number between {low[0]} and {high[0]} with a whole number as exclusive bound,"
                    " which the grammar backend llguidance does not enforce",
                    wanted="an inclusive bound, or one with decimals",
                )


def _bounds(nodes: Sequence[dict[str, Any]], name: str) -> list[tuple[float, bool]]:
    """Return the lower or upper bounds of several schemas, and whether each is exclusive. `name`:
    "minimum" or "maximum"."""
    names = {name: False, f"exclusive{name.capitalize()}": True}
    found = [(node.get(each), is_open) for node in nodes for each, is_open in names.items()]
    return [(value, is_open) for value, is_open in found if isinstance(value, (int, float))]
