"""The one form that constrains an answer: each field is a grammar of its kind, and two are
refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from pydantic import ValidationError

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.grammar_spec import MAX_GRAMMAR_TEXT, GrammarKind
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.openai.body import ChatBody, CompletionBody
from sglcore.serving.apis.openai.request import chat_request
from sglcore.serving.apis.request_params import generation_params
from sglcore.serving.chat.run import ChatRequest
from sglcore.serving.replicas.server_errors import InvalidRequest

SCHEMA = {"enum": ["Köln"]}
EBNF, LARK = 'root ::= "a"', 'start: "a"'
TAGS = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
FORM = {
    "type": "triggered_tags",
    "triggers": ["<a"],
    "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</a>"}],
}


def params_of(**given: Any) -> tuple[SamplingParams, str]:
    body = CompletionBody.model_validate({"prompt": "a", **given})
    return generation_params(body, ServerConfig(), max_tokens=5, logprobs=None)


def chat(**given: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "How is it?"}]
    return chat_request(ChatBody.model_validate({"messages": messages, **given}), ServerConfig(), "chatcmpl-1")


@pytest.mark.parametrize(
    ("given", "field", "kind", "text"),
    [
        ({}, "", None, ""),
        ({"response_format": {"type": "text"}}, "", None, ""),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", "json_schema", SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format", "json_schema", {}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format",
            "json_schema",
            SCHEMA,
        ),
        ({"response_format": {"type": "structural_tag", **TAGS}}, "response_format", "structural_tag", TAGS),
        (
            {"response_format": {"type": "structural_tag", "format": FORM}},
            "response_format",
            "structural_tag",
            {"format": FORM},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", "json_object", ""),
        ({"structured_outputs": {"json_object": False}}, "", None, ""),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", "regex", "a+"),
        ({"structured_outputs": {"grammar": EBNF}}, "structured_outputs.grammar", "ebnf", EBNF),
        ({"structured_outputs": {"grammar": LARK}}, "structured_outputs.grammar", "lark", LARK),
        (
            {"structured_outputs": {"structural_tag": TAGS}},
            "structured_outputs.structural_tag",
            "structural_tag",
            TAGS,
        ),
        ({"guided_json": SCHEMA}, "guided_json", "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "guided_regex", "regex", "a+"),
        ({"guided_grammar": EBNF}, "guided_grammar", "ebnf", EBNF),
        ({"guided_grammar": LARK}, "guided_grammar", "lark", LARK),
        ({"json_schema": SCHEMA}, "json_schema", "json_schema", SCHEMA),
        ({"regex": "a+"}, "regex", "regex", "a+"),
        ({"grammar": EBNF}, "grammar", "ebnf", EBNF),
        ({"grammar": LARK}, "grammar", "lark", LARK),
        ({"ebnf": EBNF}, "ebnf", "ebnf", EBNF),
        ({"json_schema": "", "regex": "", "grammar": "", "ebnf": EBNF}, "ebnf", "ebnf", EBNF),
    ],
)
def test_a_form_is_a_grammar_and_is_named_by_its_field(
    given: Any, field: str, kind: GrammarKind | None, text: Any
) -> None:
    if given.get("json_schema") == "":
        given = {name: value for name, value in given.items() if name != "json_schema"}
    params, found = params_of(**given)
    assert found == field and (None if params.grammar is None else params.grammar.kind) == kind
    if params.grammar is not None:
        read = params.grammar.text if isinstance(text, str) else json.loads(params.grammar.text)
        assert read == text and "\\u" not in params.grammar.text
    assert chat(**given).form == field


@pytest.mark.parametrize("first", ["guided_regex", "regex", "ebnf", "guided_grammar"])
@pytest.mark.parametrize(
    "second", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "b"}}]
)
def test_two_forms_of_any_kind_are_one_too_many(first: str, second: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(second))}.* and {first}; wanted one response format"):
        params_of(**{first: EBNF, **second})


@pytest.mark.parametrize(
    ("form", "param", "wanted"),
    [
        ({"type": "text", "schema": {}}, "schema", "no field but type"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "json_schema", "schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}, "schema", "json_schema or schema"),
        ({"type": "json_schema", "schema": {}, "format": FORM}, "format", "json_schema or schema"),
        ({"type": "structural_tag", "schema": {}}, "schema", "structures or triggers or format"),
        ({"type": "json_schema"}, "json_schema.schema", "a JSON schema"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "json_schema.schema", "a JSON schema"),
    ],
)
def test_a_response_format_has_the_fields_of_its_type_alone(form: Any, param: str, wanted: str) -> None:
    with pytest.raises(InvalidRequest, match=f"wanted {wanted}") as refused:
        params_of(response_format=form)
    assert refused.value.param == f"response_format.{param}"


def inside(*names: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that makes a body with a value at this path."""

    def body(value: Any) -> dict[str, Any]:
        for name in reversed(names):
            value = {name: value}
        return value

    return body


def formatted(kind: str, *names: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that makes a body with a response format of this kind."""
    part = inside(*names)
    return lambda value: {"response_format": {"type": kind, **part(value)}}


SCHEMAS = {
    "response_format.json_schema.schema": formatted("json_schema", "json_schema", "schema"),
    "response_format.schema": formatted("json_schema", "schema"),
    "structured_outputs.json": inside("structured_outputs", "json"),
    "guided_json": inside("guided_json"),
    "json_schema": inside("json_schema"),
}
"""Each field that takes a schema as an object, and the body that has it."""
TEXTS = {
    **{name: make for name, make in SCHEMAS.items() if not name.startswith("response_format")},
    "structured_outputs.structural_tag": inside("structured_outputs", "structural_tag"),
}
"""Each field that takes JSON as text too."""
WORDS = {
    **{f"structured_outputs.{name}": inside("structured_outputs", name) for name in ("regex", "grammar")},
    **{name: inside(name) for name in ("guided_regex", "guided_grammar", "regex", "grammar", "ebnf")},
}
"""Each field that takes an expression or a grammar as text."""
LISTED = {"structured_outputs.choice": inside("structured_outputs", "choice"), "guided_choice": inside("guided_choice")}


def text_of(body: dict[str, Any]) -> str:
    """The grammar of a body, as text."""
    grammar = params_of(**body)[0].grammar
    assert grammar is not None
    return grammar.text


@pytest.mark.parametrize("field", SCHEMAS)
def test_a_schema_reaches_the_engine_as_it_was_written(field: str) -> None:
    make = SCHEMAS[field]
    for schema in ({}, {"properties": {"z": {}, "a": {"const": "Käse"}}, "$comment": "日本"}):
        written = json.dumps(schema, ensure_ascii=False)
        assert text_of(make(schema)) == written, "the order of properties is the order in the answer"
        if field in TEXTS:
            assert text_of(make(written)) == written
    assert text_of(make({"const": "x" * (MAX_GRAMMAR_TEXT - 13)}))


def test_structural_tags_reach_the_engine_as_they_were_written() -> None:
    tags = {"structures": [{"begin": "<ä>", "schema": {"z": 1, "a": 2}, "end": "</ä>"}], "triggers": ["<ä"]}
    written = json.dumps(tags, ensure_ascii=False)
    assert text_of({"response_format": {"type": "structural_tag", **tags}}) == written
    for given in (tags, written):
        assert text_of({"structured_outputs": {"structural_tag": given}}) == written


@pytest.mark.parametrize("field", [*SCHEMAS, *WORDS, *LISTED])
def test_a_form_that_is_too_long_is_refused_by_the_name_of_its_field(field: str) -> None:
    long = "x" * (MAX_GRAMMAR_TEXT + 1)
    made = {**SCHEMAS, **WORDS, **LISTED}[field](
        {"const": long} if field in SCHEMAS else [long] if field in LISTED else long
    )
    with pytest.raises(InvalidRequest, match=f"wanted at most {MAX_GRAMMAR_TEXT}") as refused:
        params_of(**made)
    assert refused.value.param == field


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ("", "not JSON"), ("[1]", "wanted an object"), ("5", "wanted")]
)
def test_json_in_a_text_is_read_and_refused_by_the_name_of_its_field(field: str, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        params_of(**TEXTS[field](text))
    assert refused.value.param == field


@pytest.mark.parametrize("field", WORDS)
def test_an_empty_text_is_no_form_and_binds_nothing_only_by_the_names_of_llama_server(field: str) -> None:
    body = WORDS[field]("")
    if field in ("regex", "grammar", "ebnf"):
        params, found = params_of(**body)
        assert (params.grammar, found) == (None, "")
        return
    with pytest.raises(InvalidRequest, match="no text") as refused:
        params_of(**body)
    assert refused.value.param == field


@pytest.mark.parametrize(
    "make", [formatted("structural_tag", "format"), inside("structured_outputs", "structural_tag")]
)
def test_structural_tags_without_any_are_refused(make: Callable[[Any], dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        params_of(**make({}))
    assert refused.value.param in ("response_format", "structured_outputs.structural_tag")


@pytest.mark.parametrize("field", LISTED)
def test_a_choice_has_at_least_one_text(field: str) -> None:
    with pytest.raises(ValidationError, match="at least 1"):
        params_of(**LISTED[field]([]))
    assert text_of(LISTED[field](["a.b", "c"])) == r"a\.b|c"


KINDS: dict[str, Any] = {
    "json": {"enum": [1]},
    "json_object": True,
    "regex": "a",
    "grammar": EBNF,
    "choice": ["a"],
    "structural_tag": TAGS,
}
OTHERS: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_grammar": LARK,
    "guided_choice": ["a"],
    "json_schema": {},
    "regex": "a",
    "grammar": EBNF,
    "ebnf": EBNF,
}
"""Every field that constrains an answer, with a value: in `structured_outputs`, and others."""


@pytest.mark.parametrize(("first", "second"), [*combinations(KINDS, 2)])
def test_two_kinds_of_structured_outputs_are_one_too_many(first: str, second: str) -> None:
    names = {f"structured_outputs.{each}" for each in (first, second)}
    with pytest.raises(InvalidRequest, match="wanted one response format") as refused:
        params_of(structured_outputs={first: KINDS[first], second: KINDS[second]})
    assert refused.value.param in names and all(name in str(refused.value) for name in names)


@pytest.mark.parametrize(("first", "second"), [*combinations([*OTHERS, "structured_outputs"], 2)])
def test_two_fields_that_constrain_an_answer_are_refused_by_the_name_of_one(first: str, second: str) -> None:
    given = {**OTHERS, "structured_outputs": {"json_object": True}}
    for made in (params_of, chat):
        with pytest.raises(InvalidRequest, match="wanted one response format") as refused:
            made(**{second: given[second], first: given[first]})
        said = str(refused.value).partition(";")[0]
        param = str(refused.value.param)
        assert said.startswith(f"found {param} and ") and {first, second} == {
            each.removesuffix(".json_object") for each in said.removeprefix("found ").split(" and ")
        }


@pytest.mark.parametrize("field", ["structured_outputs.grammar", "guided_grammar", "grammar"])
@pytest.mark.parametrize(
    ("text", "kind"), [('# a\na ::= "x"\nroot ::= a', "ebnf"), ('root::="x"', "ebnf"), ('start: "::"', "lark")]
)
def test_a_grammar_is_ebnf_if_it_defines_by_two_colons_and_a_sign_anywhere(field: str, text: str, kind: str) -> None:
    grammar = params_of(**WORDS[field](text))[0].grammar
    assert grammar is not None and (grammar.kind, grammar.text) == (kind, text)


@pytest.mark.parametrize("field", ["ebnf", "regex", "guided_regex", "guided_grammar"])
def test_a_word_that_switches_checks_off_in_one_language_is_a_word_in_another(field: str) -> None:
    text = "x-guidance" if "regex" in field else 'root ::= "x-guidance"'
    assert text_of({field: text}) == text


LETTERS = r"""a.b+c*d?e(f)g|h[i]j{k}l^m$n\o/p-q r#s&t~u"v'w<x>y=z!"""


def test_a_choice_is_each_of_its_texts_and_nothing_else() -> None:
    params, _ = params_of(guided_choice=[LETTERS, "no.", "a|b"])
    assert params.grammar is not None and params.grammar.kind == "regex"
    for text in (LETTERS, "no.", "a|b"):
        assert re.fullmatch(params.grammar.text, text), text
    for text in ("nox", "a", "b", LETTERS[:-1], LETTERS.replace("$", "")):
        assert not re.fullmatch(params.grammar.text, text), text


@pytest.mark.parametrize("field", ["guided_grammar", "grammar", "structured_outputs"])
def test_a_grammar_may_not_switch_checks_off(field: str) -> None:
    text = 'start: a\na: %json {"x-guidance": {"lenient": true}}'
    given = {"grammar": text} if field == "structured_outputs" else text
    name = f"{field}.grammar" if field == "structured_outputs" else field
    with pytest.raises(InvalidRequest, match="x-guidance") as refused:
        params_of(**{field: given})
    assert refused.value.param == name


@pytest.mark.parametrize("text", ["{", "[" * 100_000, ""])
@pytest.mark.parametrize("field", ["guided_json", "json_schema"])
def test_a_schema_as_text_must_be_json(field: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match="not JSON") as refused:
        params_of(**{field: text})
    assert refused.value.param == field
