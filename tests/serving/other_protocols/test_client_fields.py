"""The fields that the protocols' own clients may send are known by their names, so none of them is
reported as unknown."""

from __future__ import annotations

from typing import Any

import ollama
import pytest
from anthropic import types as messages
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import responses
from openai.types.responses import input_token_count_params, response_create_params, response_input_item_param
from openai.types.shared_params import Reasoning

from sglcore.serving.apis.anthropic import body as anthropic_body
from sglcore.serving.apis.ollama import body as ollama_body
from sglcore.serving.apis.responses import body as responses_body
from sglcore.serving.apis.shared_body import Body
from sglcore.serving.apis.unknown import CHANGING

NEW = {"prompt_cache_breakpoint"}
"""Fields of the newest clients that this server reports as unknown."""
PAIRS: list[tuple[type[Body], Any]] = [
    (anthropic_body.TextBlock, messages.TextBlockParam),
    (anthropic_body.ThinkingBlock, messages.ThinkingBlockParam),
    (anthropic_body.RedactedThinkingBlock, messages.RedactedThinkingBlockParam),
    (anthropic_body.ToolUseBlock, messages.ToolUseBlockParam),
    (anthropic_body.ToolResultBlock, messages.ToolResultBlockParam),
    (anthropic_body.CustomTool, messages.ToolParam),
    (anthropic_body.ToolChoice, messages.ToolChoiceToolParam),
    (anthropic_body.Thinking, messages.ThinkingConfigEnabledParam),
    (anthropic_body.OutputConfig, messages.OutputConfigParam),
    (anthropic_body.MessagesRequest, message_create_params.MessageCreateParamsStreaming),
    (anthropic_body.CountRequest, message_count_tokens_params.MessageCountTokensParams),
    (responses_body.MessageItem, responses.ResponseOutputMessageParam),
    (responses_body.MessageItem, responses.EasyInputMessageParam),
    (responses_body.MessageItem, response_input_item_param.Message),
    (responses_body.TextPart, responses.ResponseOutputTextParam),
    (responses_body.TextPart, responses.ResponseInputTextParam),
    (responses_body.RefusalPart, responses.ResponseOutputRefusalParam),
    (responses_body.CallItem, responses.ResponseFunctionToolCallParam),
    (responses_body.ReasoningItem, responses.ResponseReasoningItemParam),
    (responses_body.FunctionTool, responses.FunctionToolParam),
    (responses_body.NamedTool, responses.ToolChoiceFunctionParam),
    (responses_body.TextConfig, responses.ResponseTextConfigParam),
    (responses_body.SchemaFormat, responses.ResponseFormatTextJSONSchemaConfigParam),
    (responses_body.Reasoning, Reasoning),
    (responses_body.StreamOptions, response_create_params.StreamOptions),
    (responses_body.ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
    (responses_body.CountRequest, input_token_count_params.InputTokenCountParams),
    (ollama_body.OllamaOptions, ollama.Options),
    (ollama_body.OllamaMessage, ollama.Message),
    (ollama_body.OllamaFunction, ollama.Message.ToolCall.Function),
    (ollama_body.OllamaTool, ollama.Tool),
]


@pytest.mark.parametrize(("own", "theirs"), PAIRS, ids=lambda each: each.__name__)
def test_a_field_of_a_client_is_known(own: type[Body], theirs: Any) -> None:
    names = set(theirs.model_fields if hasattr(theirs, "model_fields") else theirs.__annotations__)
    assert names and names - own.known - CHANGING - NEW == set()
