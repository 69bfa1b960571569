"""Each field of a request changes the request to the model, is refused, or is reported as without
effect."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from pydantic import ValidationError

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.params import SamplingError
from sglcore.serving.apis.anthropic import body as anthropic
from sglcore.serving.apis.anthropic.request import message_request
from sglcore.serving.apis.anthropic.request import unused as unused_of_messages
from sglcore.serving.apis.ollama import body as ollama
from sglcore.serving.apis.ollama.request import chat_request as ollama_chat
from sglcore.serving.apis.ollama.request import params_of, plain_prompt, text_request
from sglcore.serving.apis.openai import body as openai
from sglcore.serving.apis.openai.request import chat_request as openai_chat
from sglcore.serving.apis.openai.request import completion_request
from sglcore.serving.apis.others.llama_body import LlamaCompletionBody, llama_params
from sglcore.serving.apis.others.sglang import GenerateBody, SglangSampling, _params
from sglcore.serving.apis.responses import body as responses
from sglcore.serving.apis.responses.events import draft
from sglcore.serving.apis.responses.request import response_request
from sglcore.serving.apis.responses.request import unused as unused_of_response
from sglcore.serving.apis.shared_body import Body
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.stubs import Application, make_frontend

CONFIG = ServerConfig()
USER: Any = {"role": "user", "content": "q"}
SCHEMA: Any = {"type": "object"}
CUSTOM: Any = {"name": "f", "input_schema": SCHEMA}
FUNCTION: Any = {"type": "function", "name": "f"}
FORM: Any = {"type": "json_schema", "name": "n", "schema": SCHEMA}
PLAIN: list[Any] = [
    True,
    False,
    3,
    0.5,
    "x",
    ["x"],
    {"a": 1},
    {"a": "b"},
    {"5": 1},
    "json",
    "none",
    "auto",
    "low",
    "enabled",
    [5],
]
VALUES: list[Any] = [
    *PLAIN,
    *([USER, USER], [CUSTOM], [FUNCTION], [{"type": "function", "function": {"name": "f"}}]),
    *({"type": "none"}, {"type": "enabled"}, {"effort": "low"}, {"verbosity": "low"}, {"top_k": 3}, FORM),
    *(
        {"include_obfuscation": True},
        {"type": "json_object"},
        {"regex": "a"},
        {"type": "text"},
        'root ::= "a"',
        ["text"],
    ),
]
"""Values of every kind; a field takes those that are valid for it."""


@cache
def frontend() -> Any:
    return make_frontend()


@cache
def served() -> Application:
    return Application(frontend())


def of_messages(given: dict[str, Any]) -> Any:
    body = anthropic.MessagesRequest.model_validate({"max_tokens": 5, "messages": [USER], **given})
    return message_request(body), unused_of_messages(body)


def of_response(given: dict[str, Any]) -> Any:
    body = responses.ResponsesRequest.model_validate({"input": "a", **given})
    request = response_request(body, [], 20)
    shown = draft(body, request.params, "m", "f")
    return request, unused_of_response(body), [shown[name] for name in ("metadata", "store", "previous_response_id")]


def of_ollama_chat(given: dict[str, Any]) -> Any:
    body = ollama.OllamaChatBody.model_validate({"messages": [USER], **given})
    return ollama_chat(body, frontend()), body.warnings()


def of_ollama_text(given: dict[str, Any]) -> Any:
    body = ollama.OllamaGenerateBody.model_validate({"prompt": "q", **given})
    return plain_prompt(body, frontend()), text_request(body, frontend()), body.warnings()


def of_options(given: dict[str, Any]) -> Any:
    body = ollama.AnswerFields.model_validate({"options": given})
    return params_of(body, frontend()), body.warnings()


def of_show(given: dict[str, Any]) -> Any:
    return ollama.OllamaShowBody.model_validate(given).warnings()


def of_llama(given: dict[str, Any]) -> Any:
    body = LlamaCompletionBody.model_validate({"prompt": "a", **given})
    return llama_params(body, CONFIG), body.warnings()


def of_sglang(given: dict[str, Any]) -> Any:
    body = GenerateBody.model_validate({"text": "a", "sampling_params": given})
    return _params(body, frontend()), body.warnings()


def of_chat(given: dict[str, Any]) -> Any:
    body = openai.ChatBody.model_validate({"messages": [USER], **given})
    return openai_chat(body, CONFIG, "chatcmpl-1"), body.warnings()


def of_completion(given: dict[str, Any]) -> Any:
    body = openai.CompletionBody.model_validate({"prompt": "a", **given})
    return completion_request(body, CONFIG), body.warnings()


def inside(ask: Callable[[dict[str, Any]], Any], name: str, known: dict[str, Any], *, is_list: bool = False) -> Any:
    """Ask with a field that is an object of the `known` fields and the given ones."""
    return lambda given: ask({name: [{**known, **given}] if is_list else {**known, **given}})


MESSAGE_TOOL = inside(of_messages, "tools", CUSTOM, is_list=True)
RESPONSE_TOOL = inside(of_response, "tools", FUNCTION, is_list=True)
WRITTEN = {"model", "stream"}
"""Fields that decide by which name and in which form an answer is written."""
BODIES: dict[str, tuple[type[Body], Callable[[dict[str, Any]], Any], set[str]]] = {
    "messages": (anthropic.MessagesRequest, of_messages, WRITTEN),
    "messages tool": (anthropic.CustomTool, MESSAGE_TOOL, {"type"}),
    "messages thinking": (anthropic.Thinking, inside(of_messages, "thinking", {"type": "adaptive"}), set()),
    "messages output": (anthropic.OutputConfig, inside(of_messages, "output_config", {}), set()),
    "responses": (responses.ResponsesRequest, of_response, WRITTEN),
    "responses tool": (responses.FunctionTool, RESPONSE_TOOL, {"type"}),
    "responses reasoning": (responses.Reasoning, inside(of_response, "reasoning", {}), set()),
    "responses text": (responses.TextConfig, inside(of_response, "text", {}), set()),
    "ollama chat": (ollama.OllamaChatBody, of_ollama_chat, WRITTEN),
    "ollama text": (ollama.OllamaGenerateBody, of_ollama_text, WRITTEN),
    "ollama options": (ollama.OllamaOptions, of_options, set()),
    "ollama show": (ollama.OllamaShowBody, of_show, {"model", "name"}),
    "llama-server": (LlamaCompletionBody, of_llama, {*WRITTEN, "prompt", "return_tokens"}),
    "sglang": (SglangSampling, of_sglang, set()),
    "chat": (openai.ChatBody, of_chat, {*WRITTEN, "return_token_ids", "modalities"}),
    "completions": (
        openai.CompletionBody,
        of_completion,
        {*WRITTEN, "return_token_ids", "echo", "add_special_tokens"},
    ),
}
"""Name -> the model of the fields, what a request becomes, and fields that are read elsewhere."""
FIELDS = [(name, field) for name, (model, _, read) in BODIES.items() for field in sorted(model.known - read)]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_field_changes_the_request_or_is_refused_or_is_told_as_without_effect(name: str, field: str) -> None:
    _, ask, _ = BODIES[name]
    plain, taken = ask({}), 0
    for value in VALUES:
        try:
            found = ask({field: value})
        except ValidationError:
            continue
        except (InvalidRequest, SamplingError):
            return
        taken += 1
        if found != plain:
            return
    raise AssertionError(f"{field} took {taken} values, and none of them changed anything")


@pytest.mark.parametrize(
    ("path", "body", "field", "value"),
    [
        ("/v1/messages/count_tokens", {"messages": [USER]}, "mcp_servers", [{"name": "x"}]),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}, "mcp_servers", [{"name": "x"}]),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}, "container", "c"),
        ("/v1/responses/input_tokens", {"input": "a"}, "conversation", "conv_1"),
        ("/v1/responses", {"input": "a"}, "conversation", "conv_1"),
        ("/v1/responses", {"input": "a"}, "background", True),
    ],
)
def test_what_this_server_does_not_have_is_refused_where_tokens_are_counted_too(
    path: str, body: Any, field: str, value: Any
) -> None:
    refused = served().send("POST", path, {**body, field: value})
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(f"{field}: "), refused.text
