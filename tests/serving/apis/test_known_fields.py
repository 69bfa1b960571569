"""Fields of OpenAI's client that a request may have anywhere: none is reported as unknown."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import chat
from openai.types.chat.chat_completion_message_function_tool_call_param import Function as Called
from openai.types.shared_params.function_definition import FunctionDefinition
from openai.types.shared_params.response_format_json_schema import JSONSchema
from pydantic import BaseModel, TypeAdapter, ValidationError

from sglcore.serving.apis.openai.body import CalledTool, ChatBody, CompletionBody, Function, FunctionCall, Message, Tool
from sglcore.serving.apis.request_params import JsonSchemaFormat, StreamOptions
from sglcore.serving.apis.shared_body import OTHER, Body, Ignored, OtherKind, by_kind, kind_of
from sglcore.serving.apis.unknown import UnknownFields


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat.ChatCompletionUserMessageParam, Message),
        (chat.ChatCompletionSystemMessageParam, Message),
        (chat.ChatCompletionDeveloperMessageParam, Message),
        (chat.ChatCompletionAssistantMessageParam, Message),
        (chat.ChatCompletionToolMessageParam, Message),
        (chat.ChatCompletionMessageFunctionToolCallParam, CalledTool),
        (chat.ChatCompletionFunctionToolParam, Tool),
        (chat.ChatCompletionStreamOptionsParam, StreamOptions),
        (Called, FunctionCall),
        (FunctionDefinition, Function),
        (JSONSchema, JsonSchemaFormat),
    ],
)
def test_every_field_of_a_part_is_known(theirs: Any, ours: type[Body]) -> None:
    assert theirs.__annotations__.keys() <= ours.known


CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "description": "d", "parameters": {"own": 1}, "strict": True}
SCHEMA = {"name": "n", "description": "d", "schema": {"own": 1}, "strict": True}
FULL: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": False},
    "chat_template_kwargs": {"own": 1},
    "metadata": {"own": "a"},
}


def unknown_of(kind: type[BaseModel], body: dict[str, Any]) -> list[str]:
    fields = UnknownFields()
    kind.model_validate(body, context=fields)
    return fields.places(body)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"response_format": {"type": "json_schema", "schema": {"own": 1}}},
        {"response_format": {"type": "structural_tag", "structures": [{"own": 1}], "triggers": ["<"]}},
        {"response_format": {"type": "structural_tag", "format": {"own": 1}}},
        {"structured_outputs": {"json": {"own": 1}}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"structural_tag": {"own": 1}}},
        {"guided_json": {"own": 1}, "json_schema": {"own": 1}, "logit_bias": {"5": 1}},
    ],
)
def test_no_part_of_a_whole_request_is_unknown_and_values_have_names_of_their_own(more: dict[str, Any]) -> None:
    assert unknown_of(ChatBody, {**FULL, **more}) == []
    assert unknown_of(CompletionBody, {"prompt": "a", **more}) == []


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "a", "x": 1}]}, "messages[1].x"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages[0].content[0].x",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL, {**CALL, "x": 1}]}]}, "messages[0].tool_calls[1].x"),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "x": 1}}]}, "tools[0].function.x"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "x": 1}}},
            "response_format.json_schema.x",
        ),
        ({"response_format": {"type": "json_schema", "schema_": {}, "schema": {}}}, "response_format.schema_"),
        ({"structured_outputs": {"json": {}, "json_": {}}}, "structured_outputs.json_"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
def test_an_unknown_field_has_the_place_where_it_stands(body: dict[str, Any], place: str) -> None:
    assert unknown_of(ChatBody, {**FULL, **body}) == [place]


class Kept(Body):
    """A part with a field without effect."""

    type: str
    first: int | None = None
    unused: Ignored[bool] = None


def test_what_is_given_is_what_is_not_null_and_of_that_what_has_no_effect_is_told() -> None:
    made = Kept(type="a", first=0, unused=False)
    assert made.given("type", "first", "unused") == {"type": "a", "first": 0, "unused": False}
    assert made.warnings() == ("unused",) and Kept(type="a").warnings() == ()
    assert list(made.given("unused", "first")) == ["unused", "first"] and Kept(type="a").given("first") == {}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"type": "a"}, "a"),
        (Kept(type="a"), "a"),
        (OtherKind(type="b"), "b"),
        ({"type": ""}, ""),
        ({"type": 5}, "none"),
        ({"type": None}, "none"),
        ({"type": ["a"]}, "none"),
        ({}, "none"),
        ("type", "none"),
        (None, "none"),
        ([{"type": "a"}], "none"),
    ],
)
def test_the_kind_of_a_value_is_its_type_if_that_is_text(value: Any, kind: str) -> None:
    assert kind_of(value, "none") == kind
    assert kind_of(value) == ("" if kind == "none" else kind)


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        ({"type": "a"}, "first"),
        ({"type": "b"}, "second"),
        (Kept(type="b"), "second"),
        ({"type": "c"}, OTHER),
        ({"type": ""}, "absent"),
        ({"type": 5}, "absent"),
        ({}, "absent"),
        (None, "absent"),
    ],
)
def test_a_union_takes_its_member_by_the_type_and_another_type_by_none(value: Any, tag: str) -> None:
    words = {"a": "first", "b": "second"}
    choose: Any = by_kind(words, "absent").discriminator
    assert choose(value) == tag
    default: Any = by_kind(words).discriminator
    assert default(value) == (OTHER if tag == "absent" else tag)


def test_a_value_of_another_type_keeps_its_type_and_its_fields() -> None:
    made = TypeAdapter(OtherKind).validate_python({"type": "own", "more": [1]})
    assert made.model_dump() == {"type": "own", "more": [1]}
    for wrong in ({"type": 5}, {"more": 1}):
        with pytest.raises(ValidationError):
            OtherKind.model_validate(wrong)
