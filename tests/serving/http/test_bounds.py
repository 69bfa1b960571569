"""Bounds on the cost of a request: wrong bodies are not read to their end, and limits on amounts
are named in the error."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.anthropic.body import MessagesRequest
from sglcore.serving.apis.openai.body import ChatBody, CompletionBody, Message
from sglcore.serving.apis.responses.body import ResponsesRequest
from sglcore.serving.chat.run import LONG_TALK, LONG_TEXT, ChatRequest, render
from sglcore.serving.http.middleware.exchanges import Exchange, Exchanges
from sglcore.serving.http.routes import LARGE, JsonRoute
from tests.serving.servers import Server

MESSAGES = [{"role": "user", "content": "hi"}]
MANY = 20_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [*[1] * MANY, *["x"] * MANY]}),
        (CompletionBody, {"prompt": [["x"]] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(key): "x" for key in range(MANY)}}),
        (CompletionBody, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["x"] * MANY}),
        (ChatBody, {"messages": [1] * MANY}),
        (ChatBody, {"messages": [{"rolee": "user"}] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatBody, {"messages": MESSAGES, "tools": [{}] * MANY}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ResponsesRequest, {"input": [{}] * MANY}),
        (ResponsesRequest, {"input": "a", "metadata": {str(key): 1 for key in range(MANY)}}),
    ],
)
def test_a_body_of_many_errors_is_refused_for_the_first_ones(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert raised.value.error_count() < 10


@pytest.mark.parametrize(
    ("prompt", "param", "wanted"),
    [
        ([1, 2, "x"], "prompt[2]", "an integer"),
        (["a", 2], "prompt[1]", "wanted text"),
        ([[1], [1, "x"]], "prompt[1][1]", "an integer"),
        (5, "prompt", "wanted text"),
    ],
)
def test_a_prompt_of_mixed_items_is_refused_at_the_wrong_one(
    server: Server, prompt: Any, param: str, wanted: str
) -> None:
    error = server.refusal("/v1/completions", {"prompt": prompt})
    assert error["param"] == param and wanted in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "number"),
    [
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 65}, "stop", "64"),
        ("/v1/completions", {"prompt": "a", "stop": "x" * 1025}, "stop", "1024"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 4097}, "stop_token_ids", "4096"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(4097)}}, "logit_bias", "4096"),
        ("/v1/completions", {"prompt": ["a"] * 17, "n": 64}, "n", "1024"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "stop_sequences": ["x"] * 65}, None, "64"),
        ("/v1/responses", {"input": "a", "stop": ["x"] * 65}, "stop", "64"),
    ],
)
def test_amounts_have_limits(server: Server, path: str, body: dict[str, Any], param: str | None, number: str) -> None:
    error = server.refusal(path, body)
    assert error.get("param") == param and number in error["message"]


def test_what_nests_deeper_than_encoders_go_is_refused(server: Server) -> None:
    for levels in (255, 256, 945):
        deep = '{"a":' * levels + "1" + "}" * levels
        answer = server.client.post("/v1/completions", content='{"prompt": "a", "guided_json": ' + deep + "}")
        assert answer.status_code == 400, answer.text
        assert ("nests too deep" in answer.text) is (levels > 255)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"$ref": "https://example.org/a"}}}),
        ("guided_regex", "(unclosed"),
        ("structured_outputs", {"regex": "(unclosed"}),
    ],
)
def test_a_form_that_the_engine_refuses_is_blamed_by_its_field(server: Server, field: str, value: Any) -> None:
    for stream in (False, True):
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
        ):
            error = server.refusal(path, {**body, field: value, "stream": stream, "max_tokens": 4})
            assert error["param"].startswith(field), error


def test_a_form_of_responses_is_blamed_by_its_name_there(server: Server) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"$ref": "https://example.org/a"}}
    error = server.refusal("/v1/responses", {"input": "a", "text": {"format": form}})
    assert error["param"] == "text.format.schema"


def test_a_forced_call_is_blamed_on_the_tools_schema(tool_server: Server) -> None:
    for schema in ({"x-guidance": {}}, {"$anchor": "a"}):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        error = tool_server.refusal(
            "/v1/chat/completions", {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
        )
        assert error["param"] == "tools" and next(iter(schema)) in error["message"]


def test_options_of_streams_without_a_stream_are_not_dropped_in_silence(server: Server) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        error = server.refusal(path, {**body, "stream_options": {"include_usage": True}})
        assert error["param"] == "stream_options"
        answer = server.send(path, {**body, "return_progress": True, "max_tokens": 1})
        assert answer.headers["x-sglcore-warnings"] == "ignored: return_progress"


def test_a_strict_tool_that_may_stay_uncalled_is_a_warning(tool_server: Server) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}], "max_tokens": 1}
    assert "tools.function.strict" in tool_server.send("/v1/chat/completions", body).headers["x-sglcore-warnings"]
    forced = tool_server.send("/v1/chat/completions", {**body, "tool_choice": "required"})
    assert forced.status_code == 200 and "x-sglcore-warnings" not in forced.headers


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["missing", "null"])
@pytest.mark.parametrize("role", sorted({*get_args(Message.model_fields["role"].annotation)} - {"assistant"}))
def test_a_message_without_content_is_refused(server: Server, role: str, content: dict[str, Any]) -> None:
    message = {"role": role, "tool_call_id": "a"} if role == "tool" else {"role": role}
    error = server.refusal("/v1/chat/completions", {"messages": [{**message, **content}]})
    assert "content" in error["message"] and error["param"] == "messages[0]"


@pytest.mark.parametrize(
    ("messages", "is_beside"),
    [
        (MESSAGES, False),
        (MESSAGES * (LONG_TALK + 1), True),
        ([{"role": "user", "content": "x" * (LONG_TEXT + 1)}], True),
        ([{"role": "user", "content": [{"type": "text", "text": "x" * LONG_TEXT}] * 2}], True),
        ([{"role": "assistant", "content": None}], False),
    ],
)
def test_long_conversations_are_rendered_beside_the_event_loop(messages: Any, is_beside: bool) -> None:
    threads: list[int] = []
    form = SimpleNamespace(render=lambda messages, **_: threads.append(threading.get_ident()))
    request = ChatRequest(messages=messages, params=SamplingParams())
    codec = SimpleNamespace(need_text=lambda what: None)
    asyncio.run(render(cast(Any, SimpleNamespace(format=form, codec=codec)), request))
    assert (threads != [threading.get_ident()]) is is_beside


class Large(BaseModel):
    """A body that knows which thread made it."""

    text: str
    made_by: int = 0

    def model_post_init(self, context: Any) -> None:
        self.made_by = threading.get_ident()


def test_a_large_body_becomes_its_model_beside_the_event_loop() -> None:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/")
    async def read(body: Large) -> dict[str, Any]:
        return {"size": len(body.text), "is_beside": body.made_by != threading.get_ident()}

    app = FastAPI()
    app.include_router(router)
    client = TestClient(app)
    for size, is_beside in ((10, False), (LARGE, True)):
        assert client.post("/", json={"text": "x" * size}).json() == {"size": size, "is_beside": is_beside}
    assert client.post("/", json={"text": ["x" * LARGE]}).status_code == 422


def test_methods_that_nobody_uses_make_no_series_of_their_own() -> None:
    counted: list[str] = []
    metrics = SimpleNamespace(responded=lambda method, endpoint, status: counted.append(method))
    log = SimpleNamespace(isEnabledFor=lambda level: False)
    exchanges = Exchanges(cast(Any, None), cast(Any, metrics), cast(Any, log))
    for method in ("GET", "BREW", "X" * 5000):
        exchanges._note(Exchange("id", method, "/"), {})
    assert counted == ["GET", "other", "other"]
