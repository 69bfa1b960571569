"""Fields of request bodies: what the OpenAPI document says of them is what the server accepts."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import BaseModel, ValidationError

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.grammar_spec import Grammar, TokenRules
from sglcore.sampling.params import SamplingError, SamplingParams
from sglcore.serving.apis.anthropic.body import MessagesRequest
from sglcore.serving.apis.batches.route import BatchBody
from sglcore.serving.apis.ollama.body import OllamaOptions
from sglcore.serving.apis.openai.body import ChatBody, CompletionBody, Message
from sglcore.serving.apis.openai.request import chat_request, template_request
from sglcore.serving.apis.others.llama_body import LlamaCompletionBody
from sglcore.serving.apis.others.sglang import SglangSampling
from sglcore.serving.apis.pooling.body import ClassifyBody, EmbeddingBody, RerankBody
from sglcore.serving.apis.request_params import SamplingFields, generation_params
from sglcore.serving.apis.responses.body import ResponsesRequest
from sglcore.serving.apis.server.token_routes import DetokenizeBody, TokenizeBody

USER = {"role": "user", "content": "a"}
BODIES: dict[type[BaseModel], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [USER]},
    EmbeddingBody: {"input": "a"},
    ClassifyBody: {"input": "a"},
    RerankBody: {"query": "a", "documents": ["a"]},
    TokenizeBody: {"prompt": "a"},
    DetokenizeBody: {"tokens": [5]},
    OllamaOptions: {},
    LlamaCompletionBody: {"prompt": "a"},
    SglangSampling: {},
    MessagesRequest: {"messages": [USER], "max_tokens": 5},
    ResponsesRequest: {"input": "a"},
    BatchBody: {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"},
}
NUMBERS = (-(2**40), -(2**31), 1 - 2**31, -3, -2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3.0, 999, 1000, 1001, 2**31 - 1, 2**31)
LISTS = ([], ["a"], [""], [5], [5.0], [-1], [2**31 - 1], [2**31], [[5]], [[]], [["a"]], [True], [None], ["a", 5])
LONG = (["x"] * 16, ["x"] * 17, ["x"] * 64, ["x"] * 65, [5] * 4096, [5] * 4097, "x" * 1024, "x" * 1025)
VALUES = (None, True, False, "", "a", "5", "text", {}, {"a": "b"}, {"5": 1}, {"5": "b"}, -1, 0, 1.5, 3.0, *LISTS)


def is_taken(kind: type[BaseModel], name: str, value: Any) -> bool:
    try:
        kind.model_validate({**BODIES[kind], name: value})
    except ValidationError as error:
        return name not in {each["loc"][0] for each in error.errors() if each["loc"]}
    return True


@cache
def documented() -> dict[type[BaseModel], dict[str, dict[str, Any]]]:
    """Return the schemas of each body's fields, without those that an earlier body has too."""
    found: dict[type[BaseModel], dict[str, dict[str, Any]]] = {}
    seen: list[Any] = []
    for kind in BODIES:
        document = kind.model_json_schema()
        own = [(name, part) for name, part in document["properties"].items() if (name, part) not in seen]
        seen += own
        found[kind] = {name: {"$defs": document.get("$defs", {}), **part} for name, part in own}
    return found


@pytest.mark.parametrize("kind", BODIES)
def test_each_field_takes_what_the_document_says_and_nothing_else(kind: type[BaseModel]) -> None:
    for name, part in documented()[kind].items():
        field = Draft202012Validator(part)
        bounds = json.dumps({**part, "$defs": {}})
        for value in (
            *VALUES,
            *(NUMBERS if "imum" in bounds else ()),
            *(LONG if "maxItems" in bounds or "maxLength" in bounds else ()),
        ):
            assert is_taken(kind, name, value) is field.is_valid(value), (name, value)


@pytest.mark.parametrize(
    ("kind", "name", "least"),
    [
        *((CompletionBody, name, 1) for name in ("n", "best_of", "dry_allowed_length")),
        *((CompletionBody, name, 0) for name in ("max_tokens", "logprobs", "prompt_logprobs", "min_tokens")),
        *((ChatBody, name, 1) for name in ("n", "max_tokens", "max_completion_tokens")),
        *((ChatBody, name, 0) for name in ("top_logprobs", "thinking_token_budget")),
        (CompletionBody, "top_k", -1),
        (CompletionBody, "dry_penalty_last_n", -1),
        (EmbeddingBody, "dimensions", 1),
        (RerankBody, "top_n", 1),
        (RerankBody, "max_tokens_per_doc", 1),
    ],
)
def test_a_number_has_a_least_value_and_at_most_32_bits(kind: type[BaseModel], name: str, least: int) -> None:
    for value in (least, float(least), 16.0, 2**31 - 1):
        found = getattr(kind.model_validate({**BODIES[kind], name: value}), name)
        assert found == value and type(found) is int
    for value in (least - 1, 2**31, 16.5, "16", True):
        assert not is_taken(kind, name, value), value


@pytest.mark.parametrize(
    ("kind", "name"),
    [(CompletionBody, "stop_token_ids"), (CompletionBody, "allowed_token_ids"), (DetokenizeBody, "tokens")],
)
def test_an_id_of_a_token_is_a_number_of_32_bits(kind: type[BaseModel], name: str) -> None:
    found = getattr(kind.model_validate({**BODIES[kind], name: [0, 16.0, 2**31 - 1]}), name)
    assert found == [0, 16, 2**31 - 1] and {type(each) for each in found} == {int}
    for value in (-1, 2**31, 16.5, "16", True):
        assert not is_taken(kind, name, [5, value]), value


@pytest.mark.parametrize("name", ["seed", "priority"])
def test_a_whole_number_may_be_written_with_a_point(name: str) -> None:
    body = CompletionBody.model_validate({"prompt": "a", name: 16.0})
    assert getattr(body, name) == 16 and type(getattr(body, name)) is int


@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty", "logit_bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_is_finite(name: str, value: float) -> None:
    assert not is_taken(CompletionBody, name, {"5": value} if name == "logit_bias" else value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dry_sequence_breakers", value) for value in ([], ["x"] * 64, ["x"] * 65, ["x" * 40], ["x" * 41], [""])),
        *(
            ("stop_regex", value)
            for value in (["x"] * 16, ["x"] * 17, "x" * 255, "", [""], [], f"[{'x' * 1022}]", f"[{'x' * 1023}]")
        ),
    ],
)
def test_texts_of_sampling_have_the_limits_of_their_parameter(name: str, value: Any) -> None:
    try:
        SamplingParams(**{name: value})
    except SamplingError:
        with pytest.raises((ValidationError, SamplingError)):
            SamplingParams(**SamplingFields.model_validate({name: value}).given(name))
    else:
        assert SamplingFields.model_validate({name: value}).given(name) == {name: value}


TOGETHER: dict[str, Any] = {
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.25, "seed": 0, "n": 2, "min_tokens": 1},
    **{"xtc_probability": 0.5, "xtc_threshold": 0.25, "presence_penalty": -1, "frequency_penalty": 1},
    **{"dry_multiplier": 0.5, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 9},
    **{"dry_sequence_breakers": ["b"], "repetition_penalty": 1.5, "ignore_eos": True, "stop_regex": ["a+"]},
    **{"stop": ["x", "y"], "stop_token_ids": [9, 7, 9], "priority": -2, "include_stop_str_in_output": True},
    **{"logit_bias": {"7": -1, "5": 2}, "skip_special_tokens": False, "prompt_logprobs": 3},
    **{"bad_words": ["w", "v"], "allowed_token_ids": [7, 5]},
}
"""A value of each field that becomes a sampling parameter."""


def params_of(given: dict[str, Any]) -> SamplingParams:
    body = CompletionBody.model_validate({"prompt": "a", **given})
    return generation_params(body, ServerConfig(), max_tokens=9, logprobs=2)[0]


@pytest.mark.parametrize("name", TOGETHER)
def test_a_field_has_its_effect_whatever_else_a_request_sets(name: str) -> None:
    others = {other: value for other, value in TOGETHER.items() if other != name}
    every, alone, without, plain = map(params_of, (TOGETHER, {name: TOGETHER[name]}, others, {}))
    for field in (each.name for each in fields(SamplingParams) if each.name != "token_rules"):
        values = [getattr(each, field) for each in (every, alone, without, plain)]
        assert values[0] == (values[2] if values[1] == values[3] else values[1]), field


def test_lists_and_biases_are_kept_in_their_order_and_with_a_form() -> None:
    given = {name: value for name, value in TOGETHER.items() if name not in ("min_tokens", "ignore_eos")}
    for params in (params_of(TOGETHER), params_of({**given, "regex": "a*"})):
        assert (params.stop, params.stop_token_ids, params.logprobs) == (("x", "y"), (9, 7, 9), 2)
        assert dict(params.logit_bias) == {7: -1.0, 5: 2.0} and params.token_rules == TokenRules((7, 5), ("w", "v"))
    assert params.grammar == Grammar("regex", "a*")


TOLD: dict[str, Any] = {
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "service_tier": "flex",
    "store": False,
    "user": "a",
    "verbosity": "low",
}
"""Fields of OpenAI's API that have no effect here."""


@pytest.mark.parametrize("name", TOLD)
def test_a_field_of_openais_api_that_has_no_effect_is_told(name: str) -> None:
    assert name in CompletionCreateParamsBase.__annotations__
    assert ChatBody.model_validate({"messages": [USER], name: TOLD[name]}).warnings() == (name,)
    assert ChatBody.model_validate({"messages": [USER], name: None}).warnings() == ()
    if name in CompletionBody.model_fields:
        assert CompletionBody.model_validate({"prompt": "a", name: TOLD[name]}).warnings() == (name,)


def test_fields_without_effect_are_told_in_the_order_of_the_alphabet() -> None:
    body = {
        "stream": False,
        "return_progress": True,
        "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
    }
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    every = dict(reversed(TOLD.items()))
    found = ChatBody.model_validate({"messages": [USER], **every, **body}).warnings()
    assert found == tuple(sorted([*TOLD, "return_progress", "tools.function.strict"]))
    found = ChatBody.model_validate({"messages": [USER], **every, **options}).warnings()
    assert found == tuple(sorted([*TOLD, "stream_options.include_obfuscation"]))


@pytest.mark.parametrize("effort", ["", "low", "own"])
def test_an_effort_is_a_variable_of_the_template_whatever_its_words(effort: str) -> None:
    body = ChatBody.model_validate({"messages": [USER], "reasoning_effort": effort, "chat_template_kwargs": {"a": 1}})
    found = chat_request(body, ServerConfig(), "chatcmpl-1").chat_template_kwargs
    assert found == {"a": 1, "reasoning_effort": effort}
    assert body.chat_template_kwargs == {"a": 1}, "the body is as it was"


@pytest.mark.parametrize("continues", [None, False, True])
@pytest.mark.parametrize("adds", [None, False, True])
def test_a_prompt_begins_an_answer_unless_it_continues_one_and_both_may_be_said(continues: Any, adds: Any) -> None:
    fields = {"continue_final_message": continues, "add_generation_prompt": adds}
    body = ChatBody.model_validate({"messages": [USER], **fields})
    for made in (chat_request(body, ServerConfig(), "chatcmpl-1"), template_request(body, body.messages)):
        assert made.continue_final_message is (continues is True)
        assert made.add_generation_prompt is (continues is not True if adds is None else adds)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "", "name": "Ann"},
        {"role": "tool", "content": "", "tool_call_id": "c", "name": "f"},
        {"role": "assistant", "content": "a", "name": "Bo", "tool_calls": [CALL, {**CALL, "id": "d"}]},
        {"role": "assistant", "reasoning_content": "r"},
        {"role": "system", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]},
    ],
)
def test_a_message_reaches_the_template_with_all_of_its_fields(message: dict[str, Any]) -> None:
    assert Message.model_validate(message).plain() == message


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "audio": {"id": "a"}},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
        {"role": "function", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "text", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "refusal", "text": "a"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"text": "a"}]},
        {"role": "user", "content": ["a"]},
    ],
)
def test_a_message_that_can_not_be_rendered_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate(message)
