"""OpenAI's agents, Pydantic AI and Instructor work with this server unmodified: tools, handoffs,
response formats, retries, streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from sglcore.config.server_config import ServerConfig
from sglcore.serving.chat.format import ChatFormat
from tests.serving.chat.checkpoints import codec_of
from tests.serving.scripted import MODEL, Stage, staged
from tests.serving.strangers import kept_at_home

pytestmark = pytest.mark.needs("clients")

ALONE = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_API_KEY": "unused"}
"""Variables that keep these libraries from contacting other hosts."""
FORM = '{"mm": 1.5, "places": ["Rome", "Oslo"]}'
QUESTION = "Rain?"


class Rain(BaseModel):
    """How much rain there was."""

    mm: float
    places: list[str]


FOUND = Rain(mm=1.5, places=["Rome", "Oslo"])


def weather(city: str) -> str:
    """What the weather is like."""
    return f"wet in {city}"


def pieces(text: str, size: int = 7) -> list[str]:
    """A text, cut into tokens of a model."""
    return [text[at : at + size] for at in range(0, len(text), size)]


def calls(name: str, arguments: str) -> list[str]:
    """A call as a model of the Hermes family writes it."""
    return pieces(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')


ROME = calls("weather", '{"city": "Rome"}')
UNREADABLE = calls("weather", '{"city": Rome}')


@pytest.fixture(scope="module", autouse=True)
def strangers() -> Iterator[list[str]]:
    """Names of other hosts that were looked up; there must be none."""
    with kept_at_home(ALONE) as found:
        yield found


@pytest.fixture(scope="module")
def stage(strangers: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server with a model that takes scripted turns."""
    form = ChatFormat.detect(codec_of("hermes", tmp_path_factory.mktemp("agents")))
    with staged(ServerConfig(), form) as found:
        yield found


# OpenAI's agents


def agent(stage: Stage, protocol: str, name: str = "A", **given: Any) -> Any:
    """An agent over one of the two protocols."""
    import agents  # pyright: ignore[reportMissingImports]

    client = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", max_retries=0)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    return agents.Agent(name=name, model=kinds[protocol](model=MODEL, openai_client=client), **given)


def ran(first: Any, *, streams: bool) -> Any:
    """The result of an agent's run."""
    from agents import Runner  # pyright: ignore[reportMissingImports]

    async def run() -> Any:
        if not streams:
            return await Runner.run(first, QUESTION)
        result = Runner.run_streamed(first, QUESTION)
        events = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in events and "run_item_stream_event" in events
        return result

    return asyncio.run(run())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_an_agent_calls_a_tool_again_after_a_call_that_nobody_can_read(
    stage: Stage, protocol: str, streams: bool
) -> None:
    from agents import function_tool  # pyright: ignore[reportMissingImports]

    script = stage.converse(UNREADABLE, ROME, pieces(FORM))
    first = agent(stage, protocol, tools=[function_tool(weather)], output_type=Rain)
    assert ran(first, streams=streams).final_output == FOUND
    assert "wet in Rome" in script.prompts[-1] and '{\\"city\\": Rome' in script.prompts[-1]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_an_agent_hands_over_to_another(stage: Stage, protocol: str, streams: bool) -> None:
    stage.converse(calls("transfer_to_b", "{}"), ["I am", " B."])
    result = ran(agent(stage, protocol, handoffs=[agent(stage, protocol, "B")]), streams=streams)
    assert (result.last_agent.name, result.final_output) == ("B", "I am B.")


# Pydantic AI


@pytest.mark.parametrize("mode", ["ToolOutput", "NativeOutput", "PromptedOutput"])
@pytest.mark.parametrize("protocol", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_gets_an_object_in_each_mode(stage: Stage, protocol: str, mode: str) -> None:
    import pydantic_ai  # pyright: ignore[reportMissingImports]
    from pydantic_ai.models import openai as models  # pyright: ignore[reportMissingImports]
    from pydantic_ai.providers.openai import OpenAIProvider  # pyright: ignore[reportMissingImports]

    model = getattr(models, protocol)(MODEL, provider=OpenAIProvider(base_url=f"{stage.url}/v1"))
    asked = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, mode)(Rain), tools=[weather])
    last = calls("final_result", FORM) if mode == "ToolOutput" else pieces(FORM)

    async def run() -> tuple[Any, list[Any]]:
        stage.converse(UNREADABLE, ROME, last)
        whole = await asked.run(QUESTION)
        stage.converse(ROME, last)
        async with asked.run_stream(QUESTION) as stream:
            return whole.output, [part async for part in stream.stream_output()]

    whole, parts = asyncio.run(run())
    assert whole == parts[-1] == FOUND


# Instructor


def say(mode: str, text: str) -> list[str]:
    """The model's output for a form in this mode."""
    if "TOOLS" in mode:
        return calls("Rain", text)
    return pieces(f"Here:\n```json\n{text}\n```" if mode == "MD_JSON" else text)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS"])
def test_instructor_gets_an_object_after_one_that_is_none_and_part_by_part(stage: Stage, mode: str) -> None:
    import instructor  # pyright: ignore[reportMissingImports]

    with openai.OpenAI(base_url=f"{stage.url}/v1", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
        given: Any = {"model": MODEL, "response_model": Rain, "messages": [{"role": "user", "content": QUESTION}]}
        script = stage.converse(say(mode, '{"mm": x'), say(mode, '{"mm": "much"}'), say(mode, FORM))
        assert client.chat.completions.create(max_retries=3, **given).model_dump() == FOUND.model_dump()
        assert len(script.prompts) == 3
        stage.converse(say(mode, FORM))
        parts = list(client.chat.completions.create_partial(**given))
        assert json.loads(parts[-1].model_dump_json()) == json.loads(FORM)
