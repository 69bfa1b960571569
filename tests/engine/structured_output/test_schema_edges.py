"""The lists by which parts of a schema are refused, left out or kept: each entry, compared with
llguidance where it decides."""

from __future__ import annotations

import copy
import json
from typing import Any

import llguidance
import pytest
from jsonschema import FormatChecker

from sglcore.engine.structured_output.answer_check import Question
from sglcore.engine.structured_output.answer_check_process import checked
from sglcore.engine.structured_output.guidance_schema import LeftOut, check_schema, embedded, left_out_of
from sglcore.engine.structured_output.schema_loosening import FORMATS, NOTES, loosened, readable
from sglcore.sampling.grammar_spec import Grammar, GrammarError


def is_known(schema: dict[str, Any]) -> bool:
    """Whether llguidance can compile a schema as it is."""
    return not llguidance.LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}")


@pytest.mark.parametrize("name", sorted({*FORMATS, *FormatChecker.checkers, "base64", "jwt", "path", "int32"}))
def test_a_format_is_left_out_where_the_library_does_not_know_it(name: str) -> None:
    schema = {"type": "string", "format": name}
    left_out = () if is_known(schema) else (f"#/format '{name}'",)
    assert loosened(schema).left_out == left_out and is_known(loosened(schema).schema)


@pytest.mark.parametrize("escape", [*(f"\\{digit}" for digit in range(1, 10)), *(f"\\{mark}" for mark in "bBAzZGkK")])
def test_an_escape_that_depends_on_other_text_makes_a_pattern_unreadable(escape: str) -> None:
    assert readable(f"x{escape}y") is None and readable(f"(?=z)(x|{escape})") is None
    assert readable(f"x\\{escape}") == f"x\\{escape}" and readable(f"[{escape}]") == f"[{escape}]"


@pytest.mark.parametrize("escape", [f"\\{mark}" for mark in "dDwWsSntrfv0.*+?()[]{}|^$/-\\"])
def test_an_escape_that_stands_for_a_character_stays(escape: str) -> None:
    assert readable(f"x{escape}y") == f"x{escape}y"
    assert readable(f"(?!{escape})x") == "x"


@pytest.mark.parametrize("look", ["(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?=a|(b[)]))", "(?!\\))"])
@pytest.mark.parametrize("count", ["", "*", "+", "?", "{2}", "{2,}", "{2,13}"])
@pytest.mark.parametrize("lazy", ["", "?"])
def test_a_look_around_goes_with_its_count(look: str, count: str, lazy: str) -> None:
    count += lazy if count else ""
    assert readable(f"^x{look}{count}y+$") == "^xy+$"
    assert readable(f"{look}{count}{look}(?:y)??") == "(?:y)??"


@pytest.mark.parametrize(
    "group", ["(a)", "(?:a)", "(?<name>a)", "(?P<name>a)", "\\(?=a", "[(?=a]", "[](?=a)]", "[^](?=a)]"]
)
def test_other_groups_and_sets_stay(group: str) -> None:
    assert readable(f"x{group}y") == f"x{group}y"


@pytest.mark.parametrize("name", [*sorted(NOTES), "x-order", "x-"])
def test_a_note_is_taken_out_without_a_word_and_a_property_of_its_name_stays(name: str) -> None:
    node = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    given = {**node, name: {"propertyName": "a"} if name == "discriminator" else {}}
    before = copy.deepcopy(given)
    assert loosened(given) == (node, ())
    assert loosened({"items": given, "type": "array"}) == ({"items": node, "type": "array"}, ())
    assert given == before


@pytest.mark.parametrize("name", ["x-guidance", "$anchor", "$dynamicAnchor"])
@pytest.mark.parametrize(
    ("place", "outer"),
    [
        ("#", lambda node: node),
        ("#/items", lambda node: {"type": "array", "items": node}),
        ("#/properties/a", lambda node: {"properties": {"a": node}}),
        ("#/anyOf/1", lambda node: {"anyOf": [{}, node]}),
        ("#/$defs/T/prefixItems/0", lambda node: {"$defs": {"T": {"prefixItems": [node]}}}),
        ("#/additionalProperties", lambda node: {"additionalProperties": node}),
    ],
)
def test_a_keyword_that_would_be_passed_over_is_refused_at_its_place(name: str, place: str, outer: Any) -> None:
    for call in (check_schema, embedded):
        with pytest.raises(
            GrammarError, match=rf"^the schema uses '{name.replace('$', '[$]')}' at {place.replace('$', '[$]')},"
        ):
            call(outer({name: "a"}))
    check_schema({"properties": {name: {"type": "string"}}, "enum": [{name: 1}]})


@pytest.mark.parametrize("name", ["allOf", "anyOf", "oneOf", "$ref"])
@pytest.mark.parametrize("inner", ["maximum", "exclusiveMaximum"])
def test_bounds_that_are_merged_are_checked_together(name: str, inner: str) -> None:
    part: Any = {inner: 0.5}
    near = {"exclusiveMinimum": 0, name: "#/$defs/T" if name == "$ref" else [part], "$defs": {"T": part}}
    with pytest.raises(GrammarError, match=r"between 0 and 0\.5 with a whole number as exclusive bound"):
        check_schema(near)
    check_schema({**near, "exclusiveMinimum": -0.5})
    check_schema({"properties": {"a": {"exclusiveMinimum": 0}, "b": {**part, "type": "number"}}})


@pytest.mark.parametrize("kind", [None, "number", ["integer", "null"], ["integer"]])
@pytest.mark.parametrize("whole", [0, 3, -3, 2.0])
@pytest.mark.parametrize("width", [0, 0.25, 0.999, 1, 1.5])
@pytest.mark.parametrize("other", ["inclusive", "exclusive"])
def test_a_narrow_range_beside_an_excluded_whole_number_is_refused(
    kind: Any, whole: float, width: float, other: str
) -> None:
    """The bound that excludes the number is the one nearer to 0; the other one is `width` away."""
    is_open, near, far = (
        other == "exclusive",
        "exclusiveMinimum",
        "exclusiveMaximum" if other == "exclusive" else "maximum",
    )
    if whole < 0:
        near, far = "exclusiveMaximum", "exclusiveMinimum" if is_open else "minimum"
    end = whole - width if whole < 0 else whole + width
    schema = {"items": {near: whole, far: end, **({} if kind is None else {"type": kind})}}
    low, high = sorted((whole, end))
    if width >= 1:
        check_schema(schema)
    else:
        with pytest.raises(GrammarError, match=f"a number between {low} and {high} with a whole number as exclusive"):
            check_schema(schema)
    check_schema({"items": {**schema["items"], "type": "integer"}})


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{\n  "a": 1,\n  "b": [\n    1,\n\t2\n  ]\n}', True),
        ('{"a":\n' + " " * 32 + '1,"b":[1]}', True),
        ('{"a":\n' + " " * 33 + '1,"b":[1]}', False),
        ('{"a":  1,"b":[1]}', False),
        ('{"a":\n\n1,"b":[1]}', False),
        ('{"a":\t1,"b":[1]}', False),
        ('{"a" : 1,"b":[1]}', True),
        (' {"a":1,"b":[1]}', False),
    ],
)
def test_white_space_between_values_has_a_limit(text: str, is_taken: bool) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": numbers}, "required": ["a", "b"]}
    letters = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(letters, f"start: %json {embedded(schema)}", log_level=0)
    ids = letters.tokenize_str(text)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_taken


LOOSE, WHOLE = {"type": "array", "uniqueItems": True}, {"type": "integer"}


def test_of_several_tags_those_whose_schema_is_not_enforced_are_named_with_their_beginning() -> None:
    structures = [
        {"begin": f"<{name}>", "schema": schema, "end": ""}
        for name, schema in zip("abc", (LOOSE, WHOLE, LOOSE), strict=True)
    ]
    found = left_out_of(Grammar("structural_tag", json.dumps({"structures": structures, "triggers": ["<"]})))
    assert [(each.names, each.begin) for each in found] == [(("#/uniqueItems",), "<a>"), (("#/uniqueItems",), "<c>")]
    assert json.loads(found[0].schema) == LOOSE
    assert left_out_of(Grammar("json_schema", json.dumps(LOOSE))) == [LeftOut(json.dumps(LOOSE), ("#/uniqueItems",))]
    assert left_out_of(Grammar("json_schema", json.dumps(WHOLE))) == []


def test_the_beginning_of_a_tag_keeps_its_blanks() -> None:
    tag = {"begin": " <a>\n ", "schema": LOOSE, "end": ""}
    (found,) = left_out_of(Grammar("structural_tag", json.dumps({"structures": [tag], "triggers": [" <"]})))
    assert found.begin == tag["begin"]
    assert verdict("<a>[1, 1] and\n<a>\n [1, 1]", found.begin) == ((), "")
    assert verdict("so <a>\n [1, 1]", found.begin) == (("#/uniqueItems",), "")


def verdict(text: str, begin: str = "") -> tuple[tuple[str, ...], str]:
    """Return what a check says of an answer, and its error."""
    asked = Question(json.dumps({**LOOSE, "not": {"minItems": 3}}), ("#/not", "#/uniqueItems"), text, begin)
    found = checked(json.dumps({name: getattr(asked, name) for name in asked.__struct_fields__}).encode())
    return found.said, "" if found.error is None else found.error[0]


@pytest.mark.parametrize(
    ("text", "begin", "said"),
    [
        ("[1, 1, 2]", "", ("#/not", "#/uniqueItems")),
        (" [1, 1]\n", "", ("#/uniqueItems",)),
        ("[1]", "", ()),
        ("<a>[1, 1]</a>, <a>\n [1, 2, 3]</a>", "<a>", ("#/not", "#/uniqueItems")),
        ("<a>[1]</a><a>[2]</a><a>[3, 3]</a>", "<a>", ("#/uniqueItems",)),
        ("<a>[2, 2]</a> and [1, 2, 3]", "<a>", ("#/uniqueItems",)),
        ("[1, 1]", "<a>", ()),
    ],
)
def test_every_value_of_an_answer_is_checked_and_parts_are_named_in_their_order(
    text: str, begin: str, said: tuple[str, ...]
) -> None:
    assert verdict(text, begin) == (said, "")


@pytest.mark.parametrize(("text", "begin"), [("", ""), ("[1] [2]", ""), ("<a>", "<a>"), ("<a>[1]<a>[1", "<a>")])
def test_an_answer_without_a_whole_value_is_no_json(text: str, begin: str) -> None:
    assert verdict(text, begin) == ((), "the answer is no JSON")
