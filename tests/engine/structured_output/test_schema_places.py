"""Where a JSON schema has schemas: every keyword of the standard's own metaschemas that takes one,
a list of them or a map, and no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema_specifications import REGISTRY

from sglcore.engine.structured_output.grammar_schema import refuse_keywords, schemas
from sglcore.sampling.grammar_spec import GrammarError

META = (
    "http://json-schema.org/draft-07/schema#",
    *(
        f"https://json-schema.org/draft/{draft}/meta/{part}"
        for draft, parts in (
            ("2019-09", ("core", "applicator", "validation", "meta-data", "content")),
            ("2020-12", ("core", "applicator", "unevaluated", "validation", "meta-data", "content")),
        )
        for part in parts
    ),
)
OWN = ({"$ref": "#"}, {"$recursiveRef": "#"}, {"$dynamicRef": "#meta"})
INNER = {"title": "inner"}


def values() -> Iterator[tuple[str, Any, str]]:
    """Yield each keyword with a value in which `INNER` is a schema, and its place; an empty place
    for one whose value is no schema."""
    for name in META:
        found: Any = REGISTRY[name].contents
        for keyword, described in found["properties"].items():
            ways = [] if described is True else described.get("anyOf", [described])
            is_none = True
            for way in ways:
                each = way.get("additionalProperties", {})
                if way in OWN:
                    yield keyword, INNER, f"#/{keyword}"
                elif str(way.get("$ref", "")).endswith("/schemaArray"):
                    yield keyword, [True, INNER], f"#/{keyword}/1"
                elif each in OWN or any(other in OWN for other in each.get("anyOf", ())):
                    yield keyword, {"a": False, "b": INNER}, f"#/{keyword}/b"
                else:
                    continue
                is_none = False
            if is_none:
                yield keyword, INNER, ""


VALUES = {json.dumps(each): each for each in values()}


def test_the_metaschemas_have_keywords_of_each_kind() -> None:
    places = [place.count("/") for _, _, place in VALUES.values()]
    assert min(places.count(0), places.count(1)) > 10 and places.count(2) > 8


@pytest.mark.parametrize("given", VALUES)
def test_schemas_are_found_where_the_standard_has_them(given: str) -> None:
    keyword, value, place = VALUES[given]
    if keyword == "$recursiveAnchor" or not place:
        assert [found for found, _ in schemas({keyword: value})] == ["#"]
        return
    assert list(schemas({keyword: value})) == [("#", {keyword: value}), (place, INNER)]
    nested = {"properties": {"p": {keyword: value}}}
    assert [found for found, _ in schemas(nested)][2:] == [f"#/properties/p{place[1:]}"]


@pytest.mark.parametrize("schema", [True, False, None, [], "x", 3, [{"title": "x"}]])
def test_what_is_no_object_has_no_schemas(schema: Any) -> None:
    assert not list(schemas(schema))
    assert not any(schema is found for _, found in schemas({"items": schema, "const": {"title": "x"}}))


def test_a_refused_keyword_is_named_with_the_first_place_that_has_it() -> None:
    schema = {"properties": {"no": {"enum": [{"no": 1}]}}, "items": [{}, {"anyOf": [{"no": 1}]}], "not": {"no": 2}}
    with pytest.raises(GrammarError, match="uses 'no' at #/items/1/anyOf/0, which the grammar backend own does not"):
        refuse_keywords(schema, frozenset({"no", "other"}), "own")
    refuse_keywords(schema, frozenset({"other"}), "own")
