"""LiteLLM and LangChain's OpenAI classes work with this server unmodified, and contact no other
host."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.serving.conftest import Server
from tests.serving.strangers import kept_at_home

pytestmark = pytest.mark.needs("clients")

ALONE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "OPENAI_API_KEY": "unused",
}
"""Variables that keep these libraries from contacting other hosts."""
MESSAGES = [{"role": "user", "content": "Tell me a story about a seed."}]
ASKED: Any = {"max_tokens": 12, "temperature": 0.0}


class Weather(BaseModel):
    """What the weather is like."""

    sky: Literal["clear", "cloudy"]
    is_windy: bool


@pytest.fixture(scope="module", autouse=True)
def strangers() -> Iterator[list[str]]:
    """Names of other hosts that were looked up; there must be none."""
    with kept_at_home(ALONE) as found:
        yield found


@pytest.fixture(scope="module")
def litellm(strangers: list[str]) -> Any:
    """LiteLLM, imported after its variables are set."""
    assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    import litellm  # pyright: ignore[reportMissingImports]

    litellm.suppress_debug_info = True
    return litellm


@pytest.fixture(scope="module")
def story(server: Server) -> str:
    """The model's answer to MESSAGES by the plain endpoint."""
    return server.post("/v1/chat/completions", {"messages": MESSAGES, **ASKED})["choices"][0]["message"]["content"]


@pytest.mark.parametrize("provider", ["openai", "anthropic", "hosted_vllm"])
def test_litellm_completes_a_chat_with_each_provider(server: Server, litellm: Any, story: str, provider: str) -> None:
    given = _litellm(server, provider)

    whole = litellm.completion(messages=MESSAGES, **given, **ASKED)
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **given, **ASKED))

    assert whole.choices[0].message.content == story
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == story
    assert chunks[-1].choices[0].finish_reason == "length"


def test_litellm_completes_a_chat_without_blocking(server: Server, litellm: Any, story: str) -> None:
    async def run() -> tuple[str, str]:
        given = {**_litellm(server, "openai"), **ASKED}
        whole = await litellm.acompletion(messages=MESSAGES, **given)
        stream = await litellm.acompletion(messages=MESSAGES, stream=True, **given)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(run()) == (story, story)


def test_litellm_continues_a_text(server: Server, litellm: Any) -> None:
    given = {**_litellm(server, "text-completion-openai"), **ASKED, "prompt": "Once upon a time"}

    whole = litellm.text_completion(**given)
    chunks = list(litellm.text_completion(stream=True, **given))

    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text


def test_litellm_gets_an_object_of_a_schema(server: Server, litellm: Any) -> None:
    given = {**_litellm(server, "openai"), "messages": MESSAGES, "max_tokens": 300, "temperature": 0.0}

    answer = litellm.completion(response_format=Weather, **given)

    assert Weather.model_validate_json(answer.choices[0].message.content)


def test_langchain_chats_and_streams(server: Server, story: str) -> None:
    from langchain_openai import ChatOpenAI  # pyright: ignore[reportMissingImports]

    model = ChatOpenAI(**_langchain(server), **ASKED)

    whole = model.invoke([("user", MESSAGES[0]["content"])])
    pieces = list(model.stream([("user", MESSAGES[0]["content"])]))

    assert whole.text == story
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == 12
    assert "".join(piece.text for piece in pieces) == story


def test_langchain_reads_responses(server: Server, story: str) -> None:
    from langchain_openai import ChatOpenAI  # pyright: ignore[reportMissingImports]

    model = ChatOpenAI(use_responses_api=True, **_langchain(server), **ASKED)

    assert model.invoke(MESSAGES[0]["content"]).text == story
    assert "".join(piece.text for piece in model.stream(MESSAGES[0]["content"])) == story


def test_langchain_gets_an_object_of_a_schema(server: Server) -> None:
    from langchain_openai import ChatOpenAI  # pyright: ignore[reportMissingImports]

    model = ChatOpenAI(**_langchain(server), **{**ASKED, "max_tokens": 300})

    found = model.with_structured_output(Weather, method="json_schema").invoke("What is the weather like?")

    assert isinstance(found, Weather)


def test_langchain_continues_a_text(server: Server) -> None:
    from langchain_openai import OpenAI  # pyright: ignore[reportMissingImports]

    model = OpenAI(**_langchain(server), **ASKED)

    whole = model.invoke("Once upon a time")

    assert whole
    assert "".join(model.stream("Once upon a time")) == whole


def _name(server: Server) -> str:
    return server.get("/v1/models")["data"][0]["id"]


def _litellm(server: Server, provider: str) -> dict[str, Any]:
    base = server.url if provider == "anthropic" else f"{server.url}/v1"
    return {"model": f"{provider}/{_name(server)}", "api_base": base, "api_key": "unused"}


def _langchain(server: Server) -> dict[str, Any]:
    return {"model": _name(server), "base_url": f"{server.url}/v1", "api_key": "unused", "max_retries": 0}
