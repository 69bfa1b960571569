"""The layer between FastAPI and the endpoints, which return an answer or a stream and do not know
the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.testclient import TestClient
from pydantic import BaseModel
from starlette.types import Message

from sglcore.config.server_config import ServerConfig
from sglcore.serving.apis.answer import EVENTS, Stream, as_json, event
from sglcore.serving.apis.openai.body import CompletionBody
from sglcore.serving.http import sse
from sglcore.serving.http.connection import ANSWERING
from sglcore.serving.http.routes import MOST_DEPTH, Routes
from tests.serving import idle_clock
from tests.serving.wrapped import wrapped


class Body(BaseModel):
    """What is sent."""

    text: str


class Nested(BaseModel):
    """Anything."""

    a: object = None


def served(routes: Routes) -> FastAPI:
    app = FastAPI()
    app.include_router(routes)
    return app


def test_an_endpoint_has_what_its_signature_names() -> None:
    routes = Routes()

    @routes.post("/{place}")
    async def read(place: int, body: Body, request: Request, times: int = 1) -> Response:
        return as_json({"found": [place, body.text * times, request.url.path]}, ["colour"])

    @routes.get("/plain")
    async def plain() -> Response:
        return as_json({})

    client = TestClient(served(routes))
    answer = client.post("/3?times=2", json={"text": "ab"})
    assert (answer.json(), answer.headers["x-sglcore-warnings"]) == ({"found": [3, "abab", "/3"]}, "ignored: colour")
    assert client.post("/x", json={"text": "ab"}).status_code == client.post("/3", json={}).status_code == 422
    assert client.get("/plain").json() == {}


@pytest.mark.parametrize("fault", [None, ValueError("it broke")])
def test_a_stream_is_sent_as_it_comes_and_what_it_holds_is_left(fault: Exception | None) -> None:
    routes, left = Routes(), list[bool]()

    @asynccontextmanager
    async def held() -> AsyncGenerator[None, None]:
        yield
        left.append(True)

    async def events() -> AsyncGenerator[bytes, None]:
        yield event(1)
        if fault is not None:
            raise fault

    @routes.post("/")
    async def stream(body: Body) -> Response | Stream:
        return Stream(events(), held(), lambda error: event(str(error)), ["colour"])

    answer = TestClient(served(routes)).post("/", json={"text": ""})
    assert answer.text == "data: 1\n\n" + ("" if fault is None else 'data: "it broke"\n\n')
    assert answer.headers["content-type"].startswith("text/event-stream") and left == [True]
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-sglcore-warnings"] == "ignored: colour"


@pytest.mark.parametrize("fault", [None, ValueError("it broke")])
def test_a_stream_that_has_nothing_to_say_says_that_it_lives(fault: Exception | None) -> None:
    routes = Routes(keep_alive=0.01)
    heard: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(2):
            while heard.count(EVENTS.keep_alive) <= number:
                await asyncio.sleep(0.001)
            yield event(number)
        if fault is not None:
            raise fault

    @routes.get("/")
    async def stream() -> Response | Stream:
        return Stream(events(), nullcontext(), lambda error: event(str(error)))

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    async def send(message: Message) -> None:
        heard.append(message.get("body", b"") if message["type"] == "http.response.body" else b"begin")

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    asyncio.run(asyncio.wait_for(served(routes)(scope, receive, send), 20))
    assert heard[:2] == [b"begin", EVENTS.keep_alive]
    said = [each for each in heard[1:-1] if each != EVENTS.keep_alive]
    assert said == [event(0), event(1), *([] if fault is None else [event("it broke")])]


def test_a_stream_that_speaks_in_time_sends_no_sign_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the last event, not from the beginning."""
    heard: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(8):
            await asyncio.sleep(0.1)
            yield event(number)
        await asyncio.sleep(0.3)
        yield event("late")

    async def receive() -> Message:
        raise AssertionError("a stream does not read")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            heard.append(message["body"])

    async def play() -> None:
        monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
        stream = Stream(events(), nullcontext(), lambda error: event(str(error)))
        await sse.EventStream(stream, 0.2)({"type": "http"}, receive, send)

    idle_clock.run(play(), 20.0)
    assert heard == [*map(event, range(8)), EVENTS.keep_alive, event("late"), b""]


def test_the_work_for_a_client_that_leaves_is_cancelled_and_counted() -> None:
    routes, told, answering = Routes(), list[str](), set[asyncio.Task[None]]()

    @routes.get("/")
    async def wait() -> Response:
        answering.pop().cancel()  # as when the connection has ended
        try:
            await asyncio.Event().wait()
        finally:
            told.append("cancelled")
        return as_json({})

    async def receive() -> Message:
        raise AssertionError("there is no body")

    async def send(message: Message) -> None:
        told.append(message["type"])

    app, frontend = wrapped(served(routes), ServerConfig())
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": [],
        "state": {ANSWERING: answering},
    }
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    assert told == ["cancelled"] and frontend.metrics.responses == {("GET", "/", 499): 1}


def test_nothing_is_sent_beside_an_event_that_a_client_has_not_taken_yet_and_nothing_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[bytes] = []
    sending = 0

    async def events() -> AsyncGenerator[bytes, None]:
        yield event(1)
        await asyncio.sleep(0.01)
        yield event(2)

    async def receive() -> Message:
        raise AssertionError("a stream does not read")

    async def send(message: Message) -> None:
        nonlocal sending
        sending += 1
        assert sending == 1, "two at once"
        if message["type"] == "http.response.body":
            heard.append(message["body"])
            await asyncio.sleep(0.1)
        sending -= 1

    async def play() -> None:
        monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
        stream = Stream(events(), nullcontext(), lambda error: event(str(error)))
        await sse.EventStream(stream, 0.03)({"type": "http"}, receive, send)
        await asyncio.sleep(0.1)

    idle_clock.run(play(), 60.0)
    assert heard == [event(1), event(2), b""]


@pytest.mark.parametrize(("levels", "status"), [(MOST_DEPTH, 200), (MOST_DEPTH + 1, 400)])
def test_a_body_may_have_as_many_levels_as_the_limit_says(levels: int, status: int) -> None:
    routes = Routes()

    @routes.post("/")
    async def read(body: Nested) -> Response:
        return as_json({})

    deep = '{"a":' * levels + "1" + "}" * levels
    answer = TestClient(served(routes)).post("/", content=deep, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("is_read", [True, False])
def test_a_stream_whose_client_leaves_ends_its_events_first_and_sends_nothing_more(is_read: bool) -> None:
    """Whether it has taken all that was sent or not."""
    told: list[str] = []

    @asynccontextmanager
    async def held() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            told.append("left")

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield event(1)
            await asyncio.Event().wait()
        finally:
            told.append("ended")

    async def receive() -> Message:
        raise AssertionError("a stream does not read")

    async def send(message: Message) -> None:
        told.append(message["type"])
        if message["type"] == "http.response.body" and not is_read:
            await asyncio.Event().wait()

    async def play() -> None:
        stream = sse.EventStream(Stream(events(), held(), lambda error: event(str(error))), 0.01)
        sending = asyncio.ensure_future(stream({"type": "http"}, receive, send))
        while "http.response.body" not in told:
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert told[-2:] == ["ended", "left"]
        await asyncio.sleep(0.05)
        assert told[-2:] == ["ended", "left"], "no sign that it lives"

    idle_clock.run(play(), 20.0)


def test_fields_are_told_of_only_where_there_are_some_that_are_not_known() -> None:
    told: list[list[str]] = []
    routes = Routes(on_unknown=lambda request, names: told.append(list(names)))

    @routes.post("/")
    async def read(body: CompletionBody) -> Response | Stream:
        async def events() -> AsyncGenerator[bytes, None]:
            yield event(body.prompt)

        return Stream(events(), nullcontext(), lambda error: b"") if body.stream else as_json({})

    @routes.get("/")
    async def plain() -> Response:
        return as_json({})

    client = TestClient(served(routes))
    for more, warned in (({}, None), ({"colour": 1}, "colour"), ({"colour": 1, "stream": True}, "colour")):
        answer = client.post("/", json={"prompt": "a", **more})
        assert answer.status_code == 200
        assert answer.headers.get("x-sglcore-warnings") == (warned and f"unknown: {warned}")
    assert client.get("/").json() == {} and told == [["colour"], ["colour"]]
