"""/v1/responses of real models by OpenAI's client: every form of a request gives the same answer,
and conversations continue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.serving.conftest import Server

TOOL: Any = {"type": "function", "name": "weather", "description": "Tells it", "parameters": {"type": "object"}}
STORY = "Tell me a story about a seed."


class Weather(BaseModel):
    """What the weather is like."""

    sky: Literal["clear", "cloudy"]
    is_windy: bool


@pytest.fixture(scope="module")
def real(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_the_embedded_model_answers_the_same_in_every_way_of_asking(server: Server, real: openai.OpenAI) -> None:
    given: Any = {"model": "", "input": STORY, "temperature": 0, "extra_body": {"stop": ["."]}}

    async def ask_async() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            whole = await client.responses.create(**given)
            stream = await client.responses.create(stream=True, **given)
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return whole.output_text, "".join(pieces)

    whole = real.responses.create(**given)
    with real.responses.stream(**given) as stream:
        streamed = stream.get_final_response()

    assert whole.status == "completed" and len(whole.output_text) > 20
    assert [streamed.output_text, *asyncio.run(ask_async())] == [whole.output_text] * 3


def test_the_embedded_model_fills_a_pydantic_model(real: openai.OpenAI) -> None:
    response = real.responses.parse(
        model="", input="How is it?", text_format=Weather, temperature=0, max_output_tokens=300
    )

    assert isinstance(response.output_parsed, Weather)


def test_the_embedded_model_goes_on_with_a_conversation(real: openai.OpenAI) -> None:
    first = real.responses.create(input=STORY, temperature=0, max_output_tokens=8)
    counted = real.responses.input_tokens.count(input="Go on.", previous_response_id=first.id)

    second = real.responses.create(input="Go on.", previous_response_id=first.id, max_output_tokens=4)

    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens == counted.input_tokens
    assert second.usage.input_tokens > first.usage.input_tokens + 8


def test_the_prompt_of_a_model_with_tools_has_them_with_calls_and_results(tool_server: Server) -> None:
    items: Any = [
        {"role": "user", "content": "How is it?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Who knows?"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"at": "sea"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="unused", max_retries=0) as client:
        counts = [
            client.responses.input_tokens.count(input=items[:1]),
            client.responses.input_tokens.count(input=items[:1], tools=[TOOL]),
            client.responses.input_tokens.count(input=items, tools=[TOOL]),
        ]
        answer = client.responses.create(input=items, tools=[TOOL], max_output_tokens=3)

    plain, with_tools, with_result = (count.input_tokens for count in counts)
    assert plain < with_tools < with_result
    assert answer.usage is not None and answer.usage.input_tokens == with_result
