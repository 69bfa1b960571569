"""From a model's text to the `openai` client and back, for formats with answers that are not plain
text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.grammar_spec import Thinking
from sglcore.serving.chat.format import ChatFormat
from tests.serving.chat.checkpoints import codec_of
from tests.serving.scripted import MODEL, Stage, staged

QUESTION: Any = {"role": "user", "content": "Rain?"}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@contextmanager
def served(family: str, folder: Path) -> Iterator[tuple[Stage, openai.OpenAI]]:
    """A server with a scripted model in a chat format, and a client of it."""
    with (
        staged(ServerConfig(), ChatFormat.detect(codec_of(family, folder))) as stage,
        openai.OpenAI(base_url=f"{stage.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield stage, client


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, openai.OpenAI]]:
    with served("harmony", tmp_path_factory.mktemp("harmony")) as found:
        yield found


def called(client: openai.OpenAI, **given: Any) -> Any:
    """The choice and the only call of a whole answer, after a check that the streamed answer has
    the same."""
    whole = client.chat.completions.create(messages=[QUESTION], **given).choices[0]
    with client.chat.completions.stream(messages=[QUESTION], **given) as stream:
        streamed = stream.get_final_completion().choices[0]
    (call,) = whole.message.tool_calls or [None]
    (same,) = streamed.message.tool_calls or [None]
    assert call and same
    assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)  # pyright: ignore[reportAttributeAccessIssue]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert not whole.message.content and not streamed.message.content
    return whole, call


ANALYSIS = ("<|channel|>", "analysis", "<|message|>", "Look", " it up.", "<|end|>", "<|start|>", "assistant")
CALL = ("<|channel|>", "commentary", " to=functions.", "weather ", "<|constrain|>", "json", "<|message|>")


def test_harmony_is_thought_called_answered_and_told(harmony: tuple[Stage, openai.OpenAI]) -> None:
    stage, client = harmony
    given: Any = {"model": MODEL, "tools": TOOLS}
    stage.speak(*ANALYSIS, *CALL, '{"at":', ' "Rome"}')
    choice, call = called(client, **given)
    assert choice.message.to_dict()["reasoning_content"] == "Look it up."
    assert (call.function.name, call.function.arguments) == ("weather", '{"at": "Rome"}')

    script = stage.speak(*ANALYSIS, "<|channel|>", "final", "<|message|>", "It", " rains.")
    talk = [QUESTION, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "wet"}]
    answer = client.chat.completions.create(messages=talk, **given).choices[0].message
    assert answer.content == "It rains." and not answer.tool_calls
    assert "<|message|>Look it up.<|end|><|start|>assistant to=functions.weather<|channel|>" in script.prompts[0]
    assert script.params[0].stop_token_ids and not script.params[0].skip_special_tokens


def test_a_form_is_bound_inside_the_final_channel_behind_what_is_thought(harmony: tuple[Stage, openai.OpenAI]) -> None:
    stage, client = harmony
    final = "<|channel|>final<|message|>"
    script = stage.speak("<|channel|>analysis<|message|>", "Hm.", f"<|end|><|start|>assistant{final}", "true")
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    answer = client.chat.completions.create(model=MODEL, messages=[QUESTION], response_format=form).choices[0].message
    assert answer.content == "true" and answer.to_dict()["reasoning_content"] == "Hm."
    assert script.prompts[0].endswith("<|start|>assistant")
    assert script.params[0].thinking == Thinking(final, f"<|end|><|start|>assistant{final}", "<|channel|>")
    stage.speak("Yes.")
    client.chat.completions.create(model=MODEL, messages=[QUESTION])
    assert stage.script.prompts[0].endswith("<|start|>assistant")


def test_glm_thinks_and_calls_with_values_of_the_declared_types(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"at": {"type": "string"}, "days": {"type": "integer"}}}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    with served("glm", tmp_path) as (stage, client):
        say = (
            "\n<think>",
            "Look.",
            "</think>",
            "\n",
            "<tool_call>",
            "weather\n",
            "<arg_key>",
            "at",
            "</arg_key>",
            "\n",
        )
        value = (
            "<arg_value>",
            "Ro",
            "me",
            "</arg_value>",
            "\n",
            "<arg_key>",
            "days",
            "</arg_key>\n",
            "<arg_value>",
            "3",
        )
        stage.speak(*say, *value, "</arg_value>", "\n", "</tool_call>")
        choice, call = called(client, model=MODEL, tools=tools)
        assert choice.message.to_dict()["reasoning_content"] == "Look."
        assert (call.function.name, call.function.arguments) == ("weather", '{"at": "Rome", "days": 3}')

        script = stage.speak("\n<think>", "</think>\n", "It rains.")
        talk = [QUESTION, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "wet"}]
        answer = client.chat.completions.create(model=MODEL, messages=talk, tools=tools).choices[0].message
        assert answer.content == "It rains."
        assert "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>" in script.prompts[0]
