"""The one form that constrains an answer: each field is a grammar of its kind, and two are
refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.grammar_spec import GrammarKind
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
