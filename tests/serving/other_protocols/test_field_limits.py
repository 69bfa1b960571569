"""Limits of fields in the protocols besides OpenAI's chat: each takes the last value inside its
limit and refuses the first one outside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.grammar_spec import MAX_GRAMMAR_TEXT
from sglcore.serving.apis.anthropic import body as anthropic
from sglcore.serving.apis.anthropic.request import message_request
from sglcore.serving.apis.ollama import body as ollama
from sglcore.serving.apis.ollama.request import params_of
from sglcore.serving.apis.others.llama_body import ApplyTemplateBody, InfillBody, LlamaCompletionBody, llama_params
from sglcore.serving.apis.others.sglang import GenerateBody, SglangSampling, _params
from sglcore.serving.apis.request_params import LONGEST_STOP, MOST_IDS, MOST_STOPS
from sglcore.serving.apis.responses import body as responses
from sglcore.serving.apis.responses.request import response_request
from sglcore.serving.apis.shared_body import MOST_INT32, Body
from sglcore.serving.replicas.server_errors import InvalidRequest

USER: Any = {"role": "user", "content": "q"}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c"}
CALL: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c", "output": "o"}
CASES: list[tuple[type[Body], dict[str, Any], dict[str, list[tuple[Any, Any]]]]] = [
    (
        anthropic.CustomTool,
        {"name": "f", "input_schema": {}},
        {"name": [("n" * 256, "n" * 257), ("n", "")], "type": [(None, "other")], "input_schema": [({}, None)]},
    ),
    (
        anthropic.ToolUseBlock,
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        {
            "id": [("n" * 256, "n" * 257), ("n", "")],
            "name": [("n" * 256, "n" * 257), ("n", "")],
            "input": [({}, "{}")],
            "toolset_name": [(None, "t")],
        },
    ),
    (
        anthropic.ToolResultBlock,
        RESULT,
        {
            "tool_use_id": [("n" * 256, "n" * 257), ("n", "")],
            "toolset_name": [(None, "t")],
            "is_error": [(True, 1)],
            "content": [("", 5), (None, {})],
        },
    ),
    (anthropic.ToolChoice, {"type": "tool"}, {"name": [("n" * 256, "n" * 257), (None, "")], "type": [("any", "one")]}),
    (anthropic.Thinking, {"type": "enabled"}, {"budget_tokens": [(1, 0), (MOST_INT32, MOST_INT32 + 1)]}),
    (anthropic.Message, USER, {"role": [("system", "tool"), ("assistant", "developer")], "content": [("", None)]}),
    (
        anthropic.JsonFormat,
        {"type": "json_schema", "schema": {}},
        {"schema": [({}, None)], "type": [("json_schema", "text")]},
    ),
    (
        anthropic.MessagesRequest,
        {"messages": [USER], "max_tokens": 1},
        {
            "max_tokens": [(1, 0), (MOST_INT32, MOST_INT32 + 1), (16.0, 16.5)],
            "stop_sequences": [
                (["x"] * MOST_STOPS, ["x"] * (MOST_STOPS + 1)),
                (["x" * LONGEST_STOP], ["x" * (LONGEST_STOP + 1)]),
            ],
            "messages": [([USER], [])],
            "stream": [(None, "true")],
        },
    ),
    (
        responses.CallItem,
        CALL,
        {
            "call_id": [("n" * 256, "n" * 257), ("n", "")],
            "name": [("n" * 256, "n" * 257), ("n", "")],
            "arguments": [("", None)],
            "namespace": [(None, "n")],
        },
    ),
    (responses.CallOutputItem, OUTPUT, {"call_id": [("n" * 256, "n" * 257), ("n", "")], "output": [("", None)]}),
    (responses.FunctionTool, {"type": "function", "name": "f"}, {"name": [("n" * 256, "n" * 257), ("n", "")]}),
    (
        responses.ResponsesRequest,
        {"input": "a"},
        {
            "top_logprobs": [(0, -1)],
            "max_tool_calls": [(1, 0)],
            "thinking_token_budget": [(0, -1)],
            "tool_choice": [("required", "any")],
            "stop": [(["x"] * MOST_STOPS, ["x"] * (MOST_STOPS + 1))],
        },
    ),
    (responses.MessageItem, USER, {"role": [("developer", "tool")], "content": [("", None)]}),
    (responses.TextConfig, {}, {"verbosity": [("medium", "none")]}),
    (ollama.OllamaCall, {"function": {"name": "f", "arguments": {}}}, {"id": [("n" * 256, "n" * 257), ("n", "")]}),
    (ollama.OllamaFunction, {"name": "f", "arguments": {}}, {"arguments": [({}, "{}")], "index": [(0, "0")]}),
    (ollama.OllamaEmbedBody, {"input": "a"}, {"dimensions": [(1, 0)], "input": [([], None), ("", 5)]}),
    (
        ollama.AnswerFields,
        {},
        {
            "top_logprobs": [(0, -1)],
            "format": [("json", "xml"), ("", 5)],
            "think": [("n" * 256, "n" * 257), (False, "")],
            "keep_alive": [(-1.5, []), ("5m", True)],
        },
    ),
    (
        LlamaCompletionBody,
        {"prompt": "a"},
        {
            "logit_bias": [([[5, 1]] * MOST_IDS, [[5, 1]] * (MOST_IDS + 1)), ([[5, False]], [[5, True]])],
            "stop": [(["x"] * MOST_STOPS, ["x"] * (MOST_STOPS + 1)), ("x" * LONGEST_STOP, "x" * (LONGEST_STOP + 1))],
            "n_probs": [(0, -1), (MOST_INT32, MOST_INT32 + 1)],
            "prompt": [([5], []), ([[5], [6]], [[5], []])],
        },
    ),
    (InfillBody, {"input_prefix": "", "input_suffix": ""}, {"input_suffix": [("", None)], "input_extra": [([], [{}])]}),
    (ApplyTemplateBody, {"messages": [USER]}, {"messages": [([USER], [])]}),
    (
        SglangSampling,
        {},
        {
            "stop_token_ids": [([5] * MOST_IDS, [5] * (MOST_IDS + 1)), ([0], [-1])],
            "stop": [(["x"] * MOST_STOPS, ["x"] * (MOST_STOPS + 1))],
            "max_new_tokens": [(1, 0)],
            "min_new_tokens": [(0, -1)],
            "sampling_seed": [(-1, -2)],
            "n": [(1, 0)],
        },
    ),
    (
        GenerateBody,
        {},
        {
            "rid": [("r" * 128, "r" * 129), ("r", "")],
            "text": [(["a"], [])],
            "input_ids": [([5], []), ([[5], [6]], [[5], []]), ([0], [-1])],
            "top_logprobs_num": [(0, -1)],
        },
    ),
]
"""A body, its required fields, and for each field values inside and outside of its limit."""
LIMITS = [
    pytest.param(model, known, name, fits, over, id=f"{model.__name__}.{name}-{place}")
    for model, known, limits in CASES
    for name, pairs in limits.items()
    for place, (fits, over) in enumerate(pairs)
]


@pytest.mark.parametrize(("model", "known", "name", "fits", "over"), LIMITS)
def test_a_field_takes_what_is_inside_its_limit_and_no_more(
    model: type[Body], known: dict[str, Any], name: str, fits: Any, over: Any
) -> None:
    model.model_validate({**known, name: fits})
    with pytest.raises(ValidationError):
        model.model_validate({**known, name: over})


@pytest.mark.parametrize(
    ("role", "is_needed"), [("system", True), ("user", True), ("tool", True), ("assistant", False)]
)
def test_a_message_of_ollama_says_something_unless_the_model_said_it(role: str, is_needed: bool) -> None:
    ollama.OllamaMessage.model_validate({"role": role, "content": ""})
    for empty in ({}, {"content": None}):
        if is_needed:
            with pytest.raises(ValidationError, match=f"message of role {role} has"):
                ollama.OllamaMessage.model_validate({"role": role, **empty})
        else:
            assert ollama.OllamaMessage.model_validate({"role": role, **empty}).content is None


LONG: Any = {"description": "x" * MAX_GRAMMAR_TEXT}
CONFIG = ServerConfig()
FRONTEND: Any = SimpleNamespace(config=CONFIG, sampling={}, names=("a",))


def of_messages(**given: Any) -> Any:
    return message_request(anthropic.MessagesRequest.model_validate({"messages": [USER], "max_tokens": 5, **given}))


def of_response(**given: Any) -> Any:
    return response_request(responses.ResponsesRequest.model_validate({"input": "a", **given}), [], 5)


def of_ollama(**given: Any) -> Any:
    return params_of(ollama.AnswerFields.model_validate(given), FRONTEND)


def of_llama(**given: Any) -> Any:
    return llama_params(LlamaCompletionBody.model_validate({"prompt": "a", **given}), CONFIG)


def of_sglang(**given: Any) -> Any:
    return _params(GenerateBody.model_validate({"text": "a", "sampling_params": given}), FRONTEND)


@pytest.mark.parametrize(
    ("ask", "given", "param"),
    [
        (of_messages, {"output_config": {"format": {"type": "json_schema", "schema": LONG}}}, "output_config.format.schema"),
        (of_messages, {"output_format": {"type": "json_schema", "schema": LONG}}, "output_config.format.schema"),
        (of_response, {"text": {"format": {"type": "json_schema", "schema": LONG}}}, "text.format.schema"),
        (of_ollama, {"format": LONG}, "format"),
        (of_llama, {"json_schema": LONG}, "json_schema"),
        (of_llama, {"grammar": "x" * (MAX_GRAMMAR_TEXT + 1)}, "grammar"),
        (of_sglang, {"json_schema": LONG}, "sampling_params.json_schema"),
        (of_sglang, {"regex": "x" * (MAX_GRAMMAR_TEXT + 1)}, "sampling_params.regex"),
        (of_sglang, {"ebnf": "x" * (MAX_GRAMMAR_TEXT + 1)}, "sampling_params.ebnf"),
        (of_sglang, {"structural_tag": LONG}, "sampling_params.structural_tag"),
    ],
)  # fmt: skip
def test_a_grammar_that_is_too_long_is_refused_by_its_field(ask: Any, given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"wanted at most {MAX_GRAMMAR_TEXT}") as refused:
        ask(**given)
    assert refused.value.param == param
