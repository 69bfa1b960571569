"""The endpoints of completions, chats and models: names that are looked up, fields that are told,
and what only a tokenizer can answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from sglcore.config.server_config import ServerConfig
from sglcore.engine.outputs import TextDelta
from sglcore.serving.apis.answer import WARNINGS
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.scripted import Stage, call, content, staged
from tests.serving.stubs import Application, gives, make_frontend

NAMES = ("org/first", "second", "a/b/c")
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "How is it?"}]
VERSION = {"anthropic_version": "2023-06-01"}


def frontend(**given: Any) -> Any:
    made: Any = make_frontend(gives(TextDelta("r", 0, "A", (5,), "stop")), **given)
    made.names, made.created = NAMES, 1_700_000_000
    return made


@pytest.fixture(scope="module")
def served() -> Application:
    return Application(frontend())


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig()) as stage:
        yield stage


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_the_same_alone_and_in_the_list_by_either_protocol(served: Application, name: str) -> None:
    for headers in ({}, VERSION):
        listed = served.send("GET", "/v1/models", **headers).json()["data"]
        (wanted,) = [each for each in listed if each["id"] == name]
        assert served.send("GET", f"/v1/models/{name}", **headers).json() == wanted
        missed = served.send("GET", f"/v1/models/{name}x", **headers)
        assert missed.status_code == 404 and repr(f"{name}x") in missed.text
    assert wanted["created_at"] == "2023-11-14T22:13:20Z" and wanted["display_name"] == name


def test_a_model_has_its_root_its_age_and_its_length_once_that_is_known(served: Application) -> None:
    starting = Application(frontend(health=Health()))
    for asked, length in ((served, 64), (starting, None)):
        cards = asked.send("GET", "/v1/models").json()
        assert cards["object"] == "list" and [each["id"] for each in cards["data"]] == list(NAMES)
        for card in cards["data"]:
            about = {"object": "model", "created": 1_700_000_000, "owned_by": "sglcore"}
            assert card == {"id": card["id"], **about, "max_model_len": length, "root": NAMES[0], "parent": None}
            Model.model_validate(card, strict=True)


@pytest.mark.parametrize(
    ("path", "body", "kind", "prefix", "whole"),
    [
        (CHAT, {"messages": MESSAGES}, ChatCompletion, "chatcmpl", "chat.completion"),
        (TEXTS, {"prompt": "a"}, Completion, "cmpl", "text_completion"),
    ],
)
def test_an_answer_has_an_id_of_its_kind_and_the_time_of_its_request(
    served: Application, path: str, body: Any, kind: Any, prefix: str, whole: str
) -> None:
    before = int(time.time())
    answers = [served.send("POST", path, body).json() for _ in range(2)]
    for answer in answers:
        kind.model_validate(answer)
        assert re.fullmatch(prefix + "-[0-9a-f]{24}", answer["id"]) and answer["object"] == whole
        assert type(answer["created"]) is int and before <= answer["created"] <= time.time()
    assert answers[0]["id"] != answers[1]["id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": ""}, "reasoning_effort"),
        (
            {"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"},
            "chat_template_kwargs.a, reasoning_effort",
        ),
        (
            {"chat_template_kwargs": {"reasoning_effort": "low", "a": 1}, "user": "u", "store": True},
            "store, user, chat_template_kwargs.a, chat_template_kwargs.reasoning_effort",
        ),
        (
            {"chat_template_kwargs": {"a": 1}, "thinking_token_budget": 5},
            "chat_template_kwargs.a, thinking_token_budget",
        ),
    ],
)
def test_what_the_template_does_not_read_is_told_by_the_field_that_had_it(
    stage: Stage, given: Any, told: str, stream: bool
) -> None:
    unread = ("a", "reasoning_effort")
    names = (*given.get("chat_template_kwargs", {}), *(name for name in unread if name in given))
    stage.speak(content("x"), ignored=tuple(name for name in unread if name in names))
    body = {"messages": MESSAGES, "stream": stream, **given}
    answer = httpx.post(stage.url + CHAT, json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200 and answer.headers[WARNINGS] == f"ignored: {told}"


def test_a_stream_of_calls_and_text_is_what_the_client_joins_to_the_whole_answer(stage: Stage) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    body: dict[str, Any] = {"messages": MESSAGES, "tools": tools, "logprobs": True}
    stage.speak(content("A"), *call("f", '{"x"', ":1}"), *call("g", "{}", index=1))
    whole = httpx.post(stage.url + CHAT, json=body, trust_env=False, timeout=60).json()["choices"][0]["message"]
    lines = httpx.post(stage.url + CHAT, json={**body, "stream": True}, trust_env=False, timeout=60).text.splitlines()
    found: dict[int, dict[str, str]] = {}
    for line in filter(None, lines[:-2]):
        for part in (
            ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")).choices[0].delta.tool_calls or ()
        ):
            own = found.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
            assert part.function is not None
            own["id"] += part.id or ""
            own["name"] += part.function.name or ""
            own["arguments"] += part.function.arguments or ""
    calls = [{"id": each["id"], **each["function"]} for each in whole["tool_calls"]]
    assert [found[index] for index in sorted(found)] == calls and sorted(found) == [0, 1]
    assert [each["arguments"] for each in calls] == ['{"x":1}', "{}"]


@pytest.fixture(scope="module")
def textless() -> Application:
    """An application whose checkpoint has no tokenizer."""
    made = frontend()

    def need_text(what: str, param: str | None = None) -> None:
        raise InvalidRequest(f"{what} needs a tokenizer", param=param)

    made.codec.need_text = need_text
    return Application(made)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0, "stream": False}, "prompt_logprobs"),
        ({"echo": False}, None),
        ({"echo": None, "logprobs": None, "prompt_logprobs": None}, None),
    ],
)
def test_without_a_tokenizer_what_shows_text_of_tokens_is_refused_by_its_field(
    textless: Application, given: Any, param: str | None, stream: bool
) -> None:
    answer = textless.send("POST", TEXTS, {"prompt": [5], "stream": stream, **given})
    assert answer.status_code == (200 if param is None else 400), answer.text
    assert param is None or answer.json()["error"]["param"] == param
