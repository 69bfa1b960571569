"""The `openai` client as users install it: whole and streamed answers, blocking and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.serving.conftest import TOOLS, Server

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a seed."}]
GREEDY: Any = {"temperature": 0.0, "max_tokens": 12}


class Trip(BaseModel):
    """Where to go, and for how long."""

    city: Literal["Rome", "Oslo"]
    sunny: bool


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def tool_client(tool_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models_are_listed_and_found(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("none")
    assert raised.value.code == "model_not_found"


def test_completions_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="Once upon a time", logprobs=1, **GREEDY)
    parts = list(client.completions.create(model=model, prompt="Once upon a time", stream=True, **GREEDY))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.tokens or []) == 12
    assert whole.system_fingerprint


def test_chats_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    parts = list(stream)
    text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    assert text == whole.choices[0].message.content
    streamed = parts[-1].usage
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert streamed is not None and streamed.prompt_tokens_details == whole.usage.prompt_tokens_details
    assert streamed.total_tokens == whole.usage.total_tokens  # accepted tokens depend on timing
    assert whole.model_extra == {} and (whole.choices[0].model_extra or {})["seed_used"] >= 0


def test_the_streaming_helper_puts_an_answer_together(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=MESSAGES, temperature=0, stop=".") as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


def test_fields_of_our_own_go_in_the_extra_body(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, seed=3, extra_body={"top_k": 1, "ignore_eos": True}
    )
    greedy = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == greedy.choices[0].message.content


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Trip, max_tokens=100, seed=2)
    assert isinstance(answer.choices[0].message.parsed, Trip)


def test_a_tool_is_called_and_its_result_sent_back(tool_client: openai.OpenAI) -> None:
    name = tool_client.models.list().data[0].id
    given: Any = {"model": name, "messages": MESSAGES, "tools": TOOLS, "seed": 6, "max_tokens": 150}
    message = tool_client.chat.completions.create(tool_choice="required", **given).choices[0].message
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert isinstance(json.loads(call.function.arguments), dict)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    given["messages"] = [*MESSAGES, message, result]
    assert tool_client.chat.completions.create(**{**given, **GREEDY}).choices[0].finish_reason


def test_a_streamed_call_is_put_together_by_the_client(tool_client: openai.OpenAI) -> None:
    name = tool_client.models.list().data[0].id
    given: Any = {"model": name, "messages": MESSAGES, "tools": TOOLS, "seed": 6, "max_tokens": 150}
    whole = tool_client.chat.completions.create(tool_choice="required", **given).choices[0].message
    with tool_client.chat.completions.stream(tool_choice="required", **given) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.tool_calls and whole.tool_calls
    found = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
    assert found == [(call.function.name, call.function.arguments) for call in whole.tool_calls]  # pyright: ignore[reportAttributeAccessIssue]


def test_the_client_raises_our_errors_as_its_own(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=model, prompt="a", temperature=-1)
    assert raised.value.param == "temperature" and raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[5] * 2000)
    assert long.value.code == "context_length_exceeded" and long.value.param == "prompt"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="none", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


def test_ignored_fields_are_told_in_a_header(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, user="me", store=True, **GREEDY
    )
    assert raw.headers["x-sglcore-warnings"] == "ignored: store, user"
    assert raw.parse().choices


def test_many_at_once_without_blocking(server: Server, model: str) -> None:
    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

            async def whole(seed: int) -> str:
                answer = await client.completions.create(model=model, prompt="Once", max_tokens=16, seed=seed)
                return answer.choices[0].text

            async def streamed(seed: int) -> str:
                stream = await client.completions.create(
                    model=model, prompt="Once", max_tokens=16, seed=seed, stream=True
                )
                return "".join([part.choices[0].text async for part in stream])

            seeds = range(8)
            return (
                list(await asyncio.gather(*(whole(seed) for seed in seeds))),
                list(await asyncio.gather(*(streamed(seed) for seed in seeds))),
            )

    first, second = asyncio.run(run())
    assert first == second and len(set(first)) > 1


def test_chats_without_blocking(server: Server, model: str) -> None:
    async def run() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            given: Any = {"model": model, "messages": MESSAGES, **GREEDY}
            whole = await client.chat.completions.create(**given)
            stream = await client.chat.completions.create(stream=True, **given)
            parts = [choice.delta.content or "" async for part in stream for choice in part.choices]
            return whole.choices[0].message.content, "".join(parts)

    whole, text = asyncio.run(run())
    assert whole == text


def test_embeddings_come_as_the_client_asks_for_them(encoder_server: Server) -> None:
    with openai.OpenAI(base_url=f"{encoder_server.url}/v1", api_key="unused", max_retries=0) as client:
        name = client.models.list().data[0].id
        packed = client.embeddings.create(model=name, input=["A fox ran.", "Rates rose."])
        plain = client.embeddings.create(model=name, input="A fox ran.", encoding_format="float")
        assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
        assert len(packed.data) == 2 and packed.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=name, messages=MESSAGES)
