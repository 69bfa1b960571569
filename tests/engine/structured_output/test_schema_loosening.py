"""Parts of a schema that llguidance does not enforce are removed and named, so that ordinary
schemas are accepted; the rest is enforced."""

from __future__ import annotations

import datetime
import json
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from tokenizers import Tokenizer

from sglcore.engine.start import embedded_model
from sglcore.engine.structured_output.grammar_llguidance import Llguidance
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.grammar_xgrammar import _refuse_mixtures
from sglcore.engine.structured_output.guidance_schema import check_schema, left_out_of
from sglcore.engine.structured_output.schema_loosening import loosened, readable
from sglcore.sampling.grammar_spec import Grammar, GrammarError
from sglcore.serving.replicas.unenforced_schemas import unenforced
from tests.engine.grammar_keywords import CASES
from tests.engine.structured_output.test_grammar_backends import EOS, SIZE, takes

REFUSED = frozenset({"$ref to an anchor", "$dynamicRef", "$recursiveRef", "x-guidance"})
"""Keywords that restrict values and can not be removed."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> Llguidance:
    return Llguidance(Vocabulary(tokenizer, SIZE, EOS))


def grammar_of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def names_of(grammar: Grammar) -> tuple[str, ...]:
    return tuple(name for part in left_out_of(grammar) for name in part.names)


@pytest.mark.parametrize("name", sorted(set(CASES) - REFUSED))
def test_every_keyword_is_enforced_or_left_out_by_name_and_no_value_is_lost(
    name: str, backend: Llguidance, tokenizer: Tokenizer
) -> None:
    schema, good, bad = CASES[name]
    left_out = loosened(schema).left_out
    assert all(takes(backend, grammar_of(schema), json.dumps(value), tokenizer) for value in good), name
    taken = [value for value in bad if takes(backend, grammar_of(schema), json.dumps(value), tokenizer)]
    assert not taken or left_out, (name, taken)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_looser_schema_has_every_value_of_the_given_one_and_no_further_step_changes_it(name: str) -> None:
    schema, good, _ = CASES[name]
    simpler = loosened(schema)
    if name not in REFUSED:
        for value in good:
            kind = (
                jsonschema.Draft7Validator if isinstance(schema.get("items"), list) else jsonschema.Draft202012Validator
            )
            kind(simpler.schema).validate(value)
    again = loosened(simpler.schema)
    assert again.schema == simpler.schema and not again.left_out


class Leaf(pydantic.BaseModel):
    kind: Literal["leaf"]
    folder: Path
    blob: bytes
    price: Decimal
    cost: Annotated[Decimal, pydantic.Field(max_digits=6, decimal_places=2)]
    tags: set[str]
    place: uuid.UUID
    when: datetime.datetime
    secret: pydantic.SecretStr
    link: pydantic.AnyUrl
    by_name: dict[Annotated[str, pydantic.Field(pattern="^[a-z]+$")], int]
    by_word: dict[Literal["x", "y"], float]
    key: pydantic.UUID4
    code: pydantic.Base64Str
    host: pydantic.IPvAnyAddress


class Branch(pydantic.BaseModel):
    kind: Literal["branch"]
    parts: list[Annotated[Leaf | Branch, pydantic.Field(discriminator="kind")]]
    pair: tuple[int, str] | None = None


ZOD: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}, ()),
    (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
        },
        (),
    ),
    (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        ("#/anyOf/1/pattern's look-around",),
    ),
    ({"type": "string", "format": "jwt"}, ("#/format 'jwt'",)),
    ({"type": "string", "format": "base64", "contentEncoding": "base64"}, ("#/format 'base64'",)),
    (
        {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        },
        ("#/pattern's look-around",),
    ),
    ({"type": "object", "patternProperties": {r"\bx": True}, "additionalProperties": False}, ("#/patternProperties",)),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ("#/uniqueItems",)),
    ({"type": "array", "uniqueItems": False}, ()),
    ({"type": "integer", "format": "int32"}, ()),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ()),
    ({"oneOf": [{"minimum": 3}, {"type": "integer"}]}, ("#/oneOf",)),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}], "anyOf": [{"type": "string"}, {"type": "null"}]}, ()),
    ({"properties": {"x": {"oneOf": [{}, {"const": 1}], "anyOf": [{}], "allOf": [{}]}}}, ("#/properties/x/oneOf",)),
    ({"properties": {"uniqueItems": {"const": {"not": 1}}, "format": {"enum": [{"format": "x"}]}}}, ()),
)


@pytest.mark.parametrize(("schema", "names"), ZOD, ids=lambda value: json.dumps(value)[:40])
def test_what_zod_and_others_write_is_served_and_what_is_left_out_is_named(
    schema: dict[str, Any], names: tuple[str, ...], backend: Llguidance
) -> None:
    assert names_of(grammar_of(schema)) == names
    backend.compile(grammar_of(schema))


LOOSE = {"type": "array", "items": {"type": "string", "format": "jwt"}, "uniqueItems": True}
TAG = {"begin": "<f>", "schema": LOOSE, "end": "</f>"}
CONTENT = {"type": "json_schema", "json_schema": LOOSE}
HOLDING: dict[str, tuple[Any, int]] = {
    "json_schema": (LOOSE, 1),
    "structural_tag": ({"type": "structural_tag", "structures": [TAG, {**TAG, "begin": "<g>"}], "triggers": ["<"]}, 2),
    "structural_tag of one format": (
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [{"begin": "<f>", "content": CONTENT, "end": "</f>"}],
            },
        },
        1,
    ),
}


@pytest.mark.parametrize("kind", list(HOLDING))
def test_what_is_left_out_is_named_wherever_a_grammar_holds_a_schema(kind: str, backend: Llguidance) -> None:
    text, count = HOLDING[kind]
    grammar = Grammar(kind.partition(" ")[0], json.dumps(text))  # pyright: ignore[reportArgumentType]
    names = ("#/items/format 'jwt'", "#/uniqueItems")
    assert [part.names for part in left_out_of(grammar)] == [names] * count
    assert [part.names for part in unenforced("form", grammar)] == [[f"form{name}" for name in names]] * count
    backend.compile(grammar)
    assert {each.partition(" ")[0] for each in HOLDING} == {"json_schema", "structural_tag"}
    assert not left_out_of(None) and not left_out_of(Grammar("regex", "uniqueItems"))


def test_what_pydantic_writes_is_served(backend: Llguidance) -> None:
    for mode in ("validation", "serialization"):
        grammar = grammar_of(Branch.model_json_schema(mode=mode))
        backend.compile(grammar)
        named = {name.rpartition("/")[2] for name in names_of(grammar)}
        assert {"uniqueItems", "format 'path'", "format 'uuid4'"} <= named
        assert not named & {"oneOf", "propertyNames", "format 'uuid'"}


def test_names_that_are_listed_or_have_a_pattern_are_kept_to(backend: Llguidance, tokenizer: Tokenizer) -> None:
    value = {"additionalProperties": {"type": "integer"}, "type": "object"}
    listed = grammar_of({**value, "propertyNames": {"enum": ["ab", "cd"]}})
    shaped = grammar_of({**value, "propertyNames": {"pattern": "^[a-d]+$"}})
    for grammar in (listed, shaped):
        assert takes(backend, grammar, '{"ab": 1}', tokenizer) and takes(backend, grammar, "{}", tokenizer)
        assert not takes(backend, grammar, '{"xy": 1}', tokenizer)
        assert not takes(backend, grammar, '{"ab": "1"}', tokenizer)


@pytest.mark.parametrize(
    ("pattern", "simpler"),
    [
        ("^a+$", "^a+$"),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?0*\d*\.?\d*$"),
        ("(?=a(b(c)))*x(?<!y){2}", "x"),
        ("(?<name>a)", "(?<name>a)"),
        (r"[(?=]\(?=", r"[(?=]\(?="),
        (r"(a)\1", None),
        (r"\bx", None),
        (r"\\bx[\b]", r"\\bx[\b]"),
        ("(?=a", None),
    ],
)
def test_a_pattern_loses_what_only_forbids(pattern: str, simpler: str | None) -> None:
    assert readable(pattern) == simpler


def test_names_whose_pattern_can_not_be_read_lose_no_value(backend: Llguidance, tokenizer: Tokenizer) -> None:
    closed = {"type": "object", "patternProperties": {r"\bx": {"type": "integer"}}, "additionalProperties": False}
    assert takes(backend, grammar_of(closed), '{"x": 1}', tokenizer)


def tagged(kind: object, **more: Any) -> dict[str, Any]:
    return {"properties": {"kind": {"const": kind}, "n": {"type": "integer"}}, "required": ["kind"], **more}


@pytest.mark.parametrize(
    ("parts", "is_apart"),
    [
        ([{"type": "string"}, {"type": "integer"}], True),
        ([{"type": "string"}, {"type": "number"}, {"type": "null"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "string"}, {"type": "string", "maxLength": 2}], False),
        ([{"type": "string"}, {"maxLength": 2}], False),
        ([tagged("a"), tagged("b"), tagged(3)], True),
        ([tagged("a"), tagged("b", required=["n"])], False),
        ([tagged("a"), tagged("b", required=[])], False),
        ([tagged("a"), tagged("b"), tagged("a")], False),
        ([tagged("a"), {"properties": {"n": {"type": "integer"}}, "required": ["kind"]}], False),
    ],
)
def test_a_choice_of_exactly_one_is_left_out_where_a_value_may_have_two(
    parts: list[dict[str, Any]], is_apart: bool
) -> None:
    assert loosened({"oneOf": parts}) == ({"anyOf": parts}, () if is_apart else ("#/oneOf",))
    assert loosened({"oneOf": parts, "discriminator": {"propertyName": "kind"}}).left_out == ()


def test_a_choice_is_added_to_the_other_choices_of_its_schema() -> None:
    kept, one, any_ = {"minimum": 1}, [{"type": "string"}, {"type": "integer"}], [{"maximum": 9}]
    assert loosened({"oneOf": one, "anyOf": any_}).schema == {"anyOf": any_, "allOf": [{"anyOf": one}]}
    given = {"oneOf": one, "anyOf": any_, "allOf": [kept]}
    assert loosened(given).schema == {"anyOf": any_, "allOf": [kept, {"anyOf": one}]}


@pytest.mark.parametrize("kind", ["string", "object", None, "integer", "number", "boolean"])
def test_a_format_that_is_not_enforced_is_named_unless_its_value_can_not_be_text(kind: str | None) -> None:
    schema = {"format": "jwt", **({"type": kind} if kind else {})}
    is_named = kind not in ("integer", "number", "boolean")
    assert loosened(schema).left_out == (("#/format 'jwt'",) if is_named else ())
    assert ("format" in loosened(schema).schema) is not is_named
    assert loosened({**schema, "format": "date"}) == ({**schema, "format": "date"}, ())


@pytest.mark.parametrize(
    ("keywords", "names"),
    [
        ({"uniqueItems": True}, ("#/uniqueItems",)),
        ({"uniqueItems": False}, ()),
        ({"contains": {}, "minContains": 2, "maxContains": 3}, ("#/contains",)),
        ({"if": {}, "then": {}, "else": {}}, ("#/if",)),
        ({"propertyNames": True}, ()),
        ({"propertyNames": {"type": "string", "title": "a name"}}, ()),
        ({"propertyNames": {"type": "integer"}}, ("#/propertyNames",)),
        ({"propertyNames": {"enum": ["a"], "pattern": "^b"}}, ("#/propertyNames",)),
        ({"propertyNames": {"enum": ["a"]}}, ()),
        ({"propertyNames": {"enum": ["a"]}, "required": ["a"]}, ("#/propertyNames",)),
        ({"propertyNames": {"pattern": "^(?=a)"}}, ("#/propertyNames",)),
        ({"properties": {"a": True}, "minProperties": 1, "maxProperties": 2}, ("#/minProperties", "#/maxProperties")),
        ({"properties": {"a": True}, "required": ["a"], "minProperties": 1}, ()),
        ({"minProperties": 1}, ()),
        ({"x-order": 1, "nullable": True, "examples": [1]}, ()),
    ],
    ids=str,
)
def test_what_only_forbids_is_left_out_and_named_once(keywords: dict[str, Any], names: tuple[str, ...]) -> None:
    assert loosened(keywords).left_out == names
    assert loosened({"items": {"properties": {"p": keywords}, "required": ["p"]}}).left_out == tuple(
        f"#/items/properties/p{name.removeprefix('#')}" for name in names
    )


@pytest.mark.parametrize(
    ("schema", "is_narrow"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, True),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, True),
        ({"exclusiveMinimum": 2.0, "maximum": 2.5}, True),
        ({"exclusiveMinimum": 0, "maximum": 1}, False),
        ({"minimum": 0, "maximum": 0.5}, False),
        ({"exclusiveMinimum": 0.5, "maximum": 0.9}, False),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, False),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, True),
        ({"exclusiveMaximum": -2, "minimum": -2.5}, True),
        ({"exclusiveMaximum": 0, "minimum": -1}, False),
        ({"exclusiveMaximum": 1, "minimum": 0.5}, False),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, True),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5}, False),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, True),
        ({"exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}]}, True),
        ({"maximum": 0.5, "$ref": "#/$defs/a", "$defs": {"a": {"exclusiveMinimum": 0}}}, True),
        ({"anyOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, False),
        ({"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}}, False),
    ],
    ids=str,
)
def test_bounds_between_which_a_whole_number_would_be_accepted_are_refused(
    schema: dict[str, Any], is_narrow: bool
) -> None:
    if not is_narrow:
        check_schema(schema)
        return
    with pytest.raises(GrammarError, match="with a whole number as exclusive bound"):
        check_schema(schema)


@pytest.mark.parametrize(
    ("node", "found"),
    [
        ({"type": "integer", "minimum": 1, "multipleOf": 2}, ""),
        ({"type": "number", "exclusiveMaximum": 1}, ""),
        ({"type": "string", "minimum": 1}, "'minimum' without its type"),
        ({"minLength": 1}, "'minLength' without its type"),
        ({"type": "string", "maxLength": 2}, ""),
        ({"type": "string", "maxLength": 2, "pattern": "a"}, "'pattern' with a length"),
        ({"type": "string", "format": "jwt"}, "format 'jwt'"),
        ({"type": "string", "format": "uuid", "title": "t"}, ""),
        ({"enum": [1], "description": "d"}, ""),
        ({"enum": [1], "minimum": 1, "type": "integer"}, "'enum' with 'minimum'"),
        ({"type": "object", "required": ["a"]}, "'required' for a property that is not in 'properties'"),
        ({"type": "object", "properties": {"a": True}, "required": ["a"]}, ""),
    ],
    ids=str,
)
def test_keywords_that_a_backend_enforces_only_apart_are_refused_together(node: dict[str, Any], found: str) -> None:
    if not found:
        _refuse_mixtures("#/items", node)
        return
    with pytest.raises(GrammarError, match=f"the schema uses {found} at #/items, which the grammar backend xgrammar"):
        _refuse_mixtures("#/items", node)
