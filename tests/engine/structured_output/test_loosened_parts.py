"""Parts within parts of a schema that are left out, and schemas in which one keyword decides about
another."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from sglcore.engine.structured_output.grammar_llguidance import Llguidance
from sglcore.engine.structured_output.grammar_schema import LIST, MAP, SCHEMA
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.schema_loosening import DROPPED, SILENT, loosened
from sglcore.engine.structured_output.schema_validation import not_kept
from sglcore.sampling.grammar_spec import Grammar, GrammarError
from tests.engine.structured_output.test_grammar_backends import EOS, SIZE, tokenizer

__all__ = ["tokenizer"]

ITEM = {"type": "integer"}
LOOSE: dict[str, Any] = {"type": "string", "format": "jwt", "pattern": "a(?!b)", "uniqueItems": True}
NAMES = ("uniqueItems", "format 'jwt'", "pattern's look-around")


@pytest.mark.parametrize("keyword", sorted((SCHEMA | LIST | MAP) - {"contentSchema"}))
def test_what_is_left_out_within_a_part_has_a_name_unless_the_whole_part_is_left_out(keyword: str) -> None:
    """The parts of a choice are loosened, though the choice itself is left out too."""
    simple = {"type": "string", "pattern": "a"}
    if keyword in SCHEMA:
        value, wanted, step = LOOSE, simple, ""
    elif keyword in LIST:
        value, wanted, step = [ITEM, LOOSE], [ITEM, simple], "/1"
    else:
        value, wanted, step = {"x": ITEM, "y": LOOSE}, {"x": ITEM, "y": simple}, "/y"
    given: dict[str, Any] = {keyword: value}
    before = copy.deepcopy(given)
    if keyword in DROPPED:
        assert loosened(given) == ({}, () if keyword in SILENT else (f"#/{keyword}",))
    else:
        kept = "anyOf" if keyword == "oneOf" else keyword
        assert loosened(given) == ({kept: wanted}, tuple(f"#/{keyword}{step}/{name}" for name in NAMES))
    assert given == before


def test_a_choice_of_exactly_one_is_named_after_what_its_parts_lose() -> None:
    given = {"oneOf": [{"type": "string", "format": "jwt"}, {"type": "string", "maxLength": 3}]}
    wanted = {"anyOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    assert loosened(given) == (wanted, ("#/oneOf/0/format 'jwt'", "#/oneOf"))


@pytest.mark.parametrize(
    ("schema", "value", "names"),
    [
        ({"not": {"format": "regex"}}, "(", []),
        ({"not": {"format": "regex"}}, "a", ["#/not"]),
        ({"not": {"items": {"format": "regex"}}}, ["(", "a"], []),
        ({"if": {"format": "regex"}, "then": {"maxLength": 1}}, "((", []),
        ({"if": {"format": "regex"}, "then": {"maxLength": 1}}, "ab", ["#/if"]),
        ({"oneOf": [{"format": "regex"}, {"maxLength": 3}]}, "(", []),
        ({"oneOf": [{"format": "regex"}, {"maxLength": 3}]}, "a", ["#/oneOf"]),
        ({"oneOf": [{"format": "regex"}, {"maxLength": 3}]}, "((((", ["#/oneOf/0/format 'regex'", "#/oneOf"]),
        ({"oneOf": [{"format": "time"}, {"maxLength": 3}]}, "12:34:56Z", []),
        ({"if": {"format": "jwt"}, "then": {"maxLength": 1}}, "ab", ["#/if"]),
        ({"properties": {"a": {"format": "regex"}}, "minProperties": 1}, {"b": 1}, []),
        ({"properties": {"a": {"format": "regex"}}, "minProperties": 1}, {}, ["#/minProperties"]),
        ({"properties": {"a": ITEM, "b": ITEM}, "maxProperties": 1}, {"a": 1, "b": 1}, ["#/maxProperties"]),
        ({"properties": {"a": ITEM}, "minProperties": 2, "maxProperties": 0}, {"a": 1}, ["#/minProperties", "#/maxProperties"]),
        ({"$defs": {"a": {"format": "regex"}}, "items": {"$ref": "#/$defs/a"}}, ["("], ["#/$defs/a/format 'regex'"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_format_is_checked_wherever_a_left_out_part_has_it(schema: Any, value: Any, names: list[str]) -> None:
    assert not_kept(schema, value, loosened(schema).left_out) == names


@pytest.mark.parametrize(
    ("rule", "broken", "kept"),
    [
        ({"dependentRequired": {"b": ["c"]}}, {"b": 1}, {"b": 1, "c": 2}),
        ({"dependentSchemas": {"b": {"required": ["c"]}}}, {"b": 1}, {"b": 1, "c": 2}),
        ({"unevaluatedProperties": False}, {"b": 1}, {"a": [1]}),
        ({"dependencies": {"b": ["c"]}}, {"b": 1}, {"b": 1, "c": 2}),
        ({"propertyNames": {"maxLength": 1}}, {"bb": 1}, {"b": 1}),
        ({"if": {"required": ["b"]}, "then": {"required": ["c"]}}, {"b": 1}, {"c": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("items", [[ITEM], ITEM])
def test_keywords_of_every_draft_are_checked_beside_lists_of_items(
    items: Any, rule: dict[str, Any], broken: Any, kept: Any
) -> None:
    """A list of schemas for items was in JSON Schema before 2020-12."""
    schema = {"properties": {"a": {"type": "array", "items": items}}, **rule}
    left_out = loosened(schema).left_out
    assert left_out == (f"#/{next(iter(rule))}",)
    assert not_kept(schema, broken, left_out) == list(left_out) and not_kept(schema, kept, left_out) == []


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ({"const": "a"}, {"properties": {"a": ITEM}, "additionalProperties": False}),
        ({"enum": ["b", "a"]}, {"properties": {"b": ITEM, "a": ITEM}, "additionalProperties": False}),
        ({"enum": []}, {"properties": {}, "additionalProperties": False}),
        ({"pattern": "^a"}, {"patternProperties": {"^a": ITEM}, "additionalProperties": False}),
        (
            {"type": "string", "title": "t", "description": "d", "$comment": "c", "const": "a"},
            {"properties": {"a": ITEM}, "additionalProperties": False},
        ),
    ],
    ids=str,
)
def test_names_that_a_schema_lists_become_its_properties(names: dict[str, Any], wanted: dict[str, Any]) -> None:
    given = {"propertyNames": names, "additionalProperties": ITEM, "maxProperties": 0, "type": "object"}
    found = loosened(given)
    assert {key: found.schema.get(key) for key in wanted} == wanted and "propertyNames" not in found.schema
    assert found.left_out == (("#/maxProperties",) if wanted.get("properties") else ())
    free = loosened({"propertyNames": names}).schema
    value = next(iter(wanted))
    assert free == {**wanted, value: dict.fromkeys(wanted[value], True)}


@pytest.mark.parametrize(
    "names",
    [
        *({"enum": ["a", 1]}, {"enum": [None]}, {"const": 1}, {"const": None}, {"enum": "a"}, {"pattern": 3}),
        *(
            {"pattern": "a(?=b)"},
            {"pattern": r"\bx"},
            {"minLength": 1},
            {"maxLength": 1},
            {"format": "date"},
            {"$ref": "#"},
        ),
        *(
            {"const": "a", "pattern": "a"},
            {"type": "integer"},
            {"type": ["string", "null"]},
            {"enum": ["a"], "not": {}},
            {"enum": ["a", "bc"], "minLength": 2},
            {"const": "a", "maxLength": 0},
            {"pattern": "^a", "maxLength": 3},
        ),
        False,
    ],
    ids=str,
)
def test_names_that_are_no_list_and_no_pattern_are_left_out_and_named(names: Any) -> None:
    given = {"propertyNames": names, "additionalProperties": ITEM}
    assert loosened(given) == ({"additionalProperties": ITEM}, ("#/propertyNames",))


@pytest.mark.parametrize(
    "taken", [{"properties": {"b": ITEM}}, {"patternProperties": {"b": ITEM}}, {"required": ["b"]}]
)
@pytest.mark.parametrize("names", [{"const": "a"}, {"enum": ["a"]}, {"pattern": "^a"}])
def test_names_are_left_out_where_the_schema_has_properties_of_its_own(
    taken: dict[str, Any], names: dict[str, Any]
) -> None:
    assert loosened({**taken, "propertyNames": names}) == (taken, ("#/propertyNames",))
    assert loosened({**taken, "propertyNames": {"type": "string"}}) == (taken, ())


@pytest.mark.parametrize("kind", [["string", "null"], ["integer", "null"], "array", "null"])
@pytest.mark.parametrize("more", [{}, {"enum": ["a"]}, {"minLength": 1}])
def test_a_format_is_named_beside_other_keywords_and_for_several_types(kind: Any, more: dict[str, Any]) -> None:
    rest = {"type": kind, **more}
    assert loosened({**rest, "format": "jwt"}) == (rest, ("#/format 'jwt'",))
    assert loosened({**rest, "format": "jwt", "pattern": r"\b"}) == (rest, ("#/format 'jwt'", "#/pattern"))


@pytest.mark.parametrize("keys", [["^a", r"\bx"], [r"\bx", "^a"], ["^(?!a)", "b"], ["b(?=a)"]])
def test_patterns_of_names_are_left_out_together(keys: list[str]) -> None:
    rest = {"type": "object", "properties": {"a": ITEM}, "required": ["a"]}
    given = {**rest, "patternProperties": dict.fromkeys(keys, ITEM), "additionalProperties": False}
    assert loosened(given) == (rest, ("#/patternProperties",))
    kept = {**given, "patternProperties": {"^a": ITEM, "b": ITEM}}
    assert loosened(kept) == (kept, ())


@pytest.mark.parametrize(
    ("more", "is_left_out"),
    [
        ({"properties": {"a": ITEM, "b": ITEM}, "required": ["a"]}, True),
        ({"properties": {"a": ITEM}, "additionalProperties": False}, True),
        ({"properties": {"a": ITEM}, "required": ["b"]}, True),
        ({"properties": {"a": ITEM}, "required": []}, True),
        ({"properties": {"a": ITEM}, "required": ["a", "b"]}, False),
        ({"properties": {}}, False),
        ({"additionalProperties": ITEM}, False),
        ({"patternProperties": {"a": ITEM}}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["minProperties", "maxProperties"])
def test_a_count_of_properties_is_left_out_where_a_listed_one_is_optional(
    name: str, more: dict[str, Any], is_left_out: bool
) -> None:
    given = {**more, name: 2}
    assert loosened(given) == ((more, (f"#/{name}",)) if is_left_out else (given, ()))


def tagged(**constants: Any) -> dict[str, Any]:
    return {"properties": {name: {"const": value} for name, value in constants.items()}, "required": list(constants)}


@pytest.mark.parametrize(
    ("parts", "is_apart"),
    [
        ([tagged(kind="a", version=1), tagged(kind="b", version=1)], True),
        ([tagged(version=1, kind="a"), tagged(kind="a", version=2)], True),
        ([tagged(kind="a", version=1), tagged(kind="a", version=1)], False),
        ([tagged(kind="a", version=1), tagged(kind="b", version=1), tagged(kind="a", version=2)], False),
        ([tagged(kind="a"), tagged(sort="b")], False),
        ([tagged(kind="a"), tagged(kind="b", sort="a"), tagged(sort="b")], False),
        ([tagged(kind=None), tagged(kind="a")], True),
        ([tagged(kind=1), tagged(kind="1")], True),
        ([tagged(kind=False), tagged(kind="False"), tagged(kind=None)], True),
        ([tagged(kind={"a": 1}), tagged(kind={"a": 2})], True),
        ([tagged(kind="a"), True], False),
        ([{"type": ["string"]}, {"type": ["integer"]}], False),
        ([{"type": "string"}, {"type": ["integer"]}], False),
        ([{"type": "string"}, {}], False),
        ([{"$ref": "#"}], True),
        ([True], True),
        ([{"$ref": "#"}, {"$ref": "#/items"}], False),
        ([{"type": "integer"}, {"type": "string"}, {"type": "number"}], False),
    ],
    ids=str,
)
def test_parts_of_a_choice_are_apart_by_a_constant_of_every_part(parts: list[Any], is_apart: bool) -> None:
    assert loosened({"oneOf": parts}) == ({"anyOf": parts}, () if is_apart else ("#/oneOf",))
    placed = {"type": "array", "items": {"oneOf": parts}}
    assert loosened(placed).left_out == (() if is_apart else ("#/items/oneOf",))


INVALID: tuple[dict[str, Any], ...] = (
    {"oneOf": 3},
    {"oneOf": {"type": "string"}},
    {"anyOf": {"type": "string"}},
    {"oneOf": [{"properties": {"a": {"const": 1}}, "required": 3}, {"properties": 3}]},
    {"properties": 3, "minProperties": 1},
    {"properties": {"a": ITEM}, "required": 3, "maxProperties": 1},
    {"propertyNames": {"enum": 3}},
    {"type": "object", "patternProperties": 3},
    {"type": "string", "pattern": 3},
    {"type": "string", "format": 3},
    {"type": 3, "format": "jwt"},
    {"items": 3},
    {"$defs": 3, "type": "string"},
)


@pytest.mark.parametrize("schema", INVALID, ids=str)
def test_a_schema_that_is_not_valid_is_left_to_the_library(schema: dict[str, Any], tokenizer: Any) -> None:
    before = copy.deepcopy(schema)
    loosened(schema)
    assert schema == before
    try:
        Llguidance(Vocabulary(tokenizer, SIZE, EOS)).compile(Grammar("json_schema", json.dumps(schema)))
    except GrammarError as error:
        assert str(error).startswith("this json_schema cannot be enforced: ")
