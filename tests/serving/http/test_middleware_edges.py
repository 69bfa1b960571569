"""Middleware at its edges: which hosts and pages a server for others answers, what counts as load,
and how a connection goes on after a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message as AsgiEvent
from starlette.types import Receive, Scope, Send

from sglcore.config.server_config import ServerConfig
from sglcore.serving.http.connection import ANSWERING
from sglcore.serving.http.middleware import refusal
from sglcore.serving.http.middleware.bodies import FILES, Bodies
from sglcore.serving.http.middleware.exchanges import Exchange, _exchange, line
from sglcore.serving.http.middleware.refusal import Refusals, TurnedAway, body_length, has_body
from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.metrics.server_metrics import CALLER, CLOCKS
from sglcore.serving.replicas.server_errors import INVALID
from tests.serving import idle_clock
from tests.serving.wrapped import Answered, call, echo, wrapped

APP = "http://app.example"


def status_of(config: ServerConfig, **headers: str) -> int:
    return asyncio.run(call(wrapped(echo, config)[0], headers=headers)).status


@pytest.mark.parametrize(
    ("settings", "host", "origin", "status"),
    [
        ({"host": "0.0.0.0", "allowed_hosts": ("box.lan",)}, "box.lan", "", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ("box.lan",)}, "other.lan", "", 403),
        ({"host": "0.0.0.0", "allowed_hosts": ("box.lan",)}, "box.lan", APP, 403),
        ({"host": "0.0.0.0", "allowed_hosts": ("box.lan",), "cors_origins": (APP,)}, "box.lan", APP, 200),
        ({"host": "0.0.0.0", "cors_origins": (APP,)}, "any.lan", "http://other.example", 200),
        ({"host": "0.0.0.0"}, "any.lan", APP, 200),
        ({}, "", "", 200),
        ({}, "", APP, 403),
        ({"cors_origins": (APP,)}, "", APP, 200),
        ({"cors_origins": (APP,)}, "localhost", f"{APP}:81", 403),
    ],
)
def test_hosts_and_pages_are_held_to_names_on_this_machine_and_where_names_are_given(
    settings: dict[str, Any], host: str, origin: str, status: int
) -> None:
    assert status_of(ServerConfig(**settings), host=host, **({"origin": origin} if origin else {})) == status


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("POST", 200), ("DELETE", 200), ("PUT", 400)])
def test_pages_may_ask_with_any_header_by_the_methods_that_endpoints_have(method: str, status: int) -> None:
    asked = {
        "origin": APP,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization, x-api-key, anthropic-version",
    }
    app, _ = wrapped(echo, ServerConfig(cors_origins=(APP,), api_key=("key",)))
    answer = asyncio.run(call(app, method="OPTIONS", headers=asked))
    assert answer.status == status
    allowed = {each.strip().lower() for each in answer.headers["access-control-allow-headers"].split(",")}
    assert {"authorization", "x-api-key", "anthropic-version"} <= allowed


@pytest.mark.parametrize("path", ["/v1/completions", "/api/chat", "/tokenize"])
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_requests_in_flight_are_those_that_post_and_each_is_one_of_them(path: str, method: str) -> None:
    holding, release = asyncio.Event(), asyncio.Event()

    async def hold(scope: Scope, receive: Receive, send: Send) -> None:
        holding.set()
        await release.wait()
        await echo(scope, receive, send)

    async def play() -> Answered:
        app, frontend = wrapped(hold, ServerConfig(max_concurrent_requests=1), EngineStats(waiting=5))
        frontend.metrics.retry_after = lambda waiting: 10 + waiting
        first = asyncio.create_task(call(app, path, method=method))
        await holding.wait()
        second = asyncio.create_task(call(app, path))
        while not second.done() and method == "POST":
            await asyncio.sleep(0)
        release.set()
        assert (await first).status == 200
        return await second

    answer = asyncio.run(asyncio.wait_for(play(), 60))
    assert answer.status == (429 if method == "POST" else 200)
    if method == "POST":
        assert answer.headers["retry-after"] == ("10" if path == "/tokenize" else "15"), "as long as the model's queue"


@pytest.mark.parametrize(("path", "status"), [("/v1/score", 429), ("/api/chat", 429), ("/apis", 200), ("/pause", 200)])
def test_a_full_queue_refuses_each_protocol_of_the_model_alone(path: str, status: int) -> None:
    app, frontend = wrapped(echo, ServerConfig(max_queued_requests=7), EngineStats(waiting=8))
    frontend.metrics.retry_after = lambda waiting: waiting
    answer = asyncio.run(call(app, path))
    assert (answer.status, answer.headers.get("retry-after")) == (status, "8" if status == 429 else None)
    assert frontend.metrics.refusals["overloaded"] == (status == 429)


@pytest.mark.parametrize("parts", [[b"x"], [b"x" * 60, b"x" * 60, b"x" * 60]])
def test_a_body_whose_client_leaves_reaches_no_endpoint_and_leaves_no_bytes(parts: list[bytes]) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])

    async def play() -> None:
        events: list[AsgiEvent] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        events.append({"type": "http.disconnect"})

        async def receive() -> AsgiEvent:
            return events.pop(0)

        bodies = Bodies(app, 1000, 60.0, 1000)
        scope = {"path": "/x", "method": "POST", "headers": [(b"transfer-encoding", b"chunked")]}
        await bodies(scope, receive, cast(Any, None))
        assert (seen, bodies._usual.at_once, events) == ([], 0, [])

    asyncio.run(play())


@pytest.mark.parametrize(
    ("size", "pause", "ends", "status"),
    [(60, 0.02, True, 200), (250, 0.04, True, 200), (60, 0.03, True, 408), (60, 0.0, False, 408), (9, 0.0, False, 408)],
)
def test_a_file_has_so_much_time_for_each_step_however_it_is_divided(
    size: int, pause: float, ends: bool, status: int
) -> None:
    """0.05 s for each hundred bytes, and as long once more."""

    async def play() -> None:
        app = Refusals(Bodies(echo, 100, 0.05, 10_000), cast(Any, SimpleNamespace(refused=lambda code: None)))
        answer = await call(app, FILES, chunks=[b"x" * size] * 8, pause=pause, ends=ends)
        assert answer.status == status, answer.body
        if status == 408:
            count = size if ends else 8 * size
            seconds = 0.05 * (1 + count // 100)
            assert answer.error["message"].startswith(f"{count} bytes of the body arrived in {seconds:g} s,")

    idle_clock.run(play(), 60.0)


def test_what_a_request_notes_is_noted_for_no_other_one() -> None:
    seen: list[tuple[Any, str]] = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((CLOCKS.get(), CALLER.get()))
        await echo(scope, receive, send)

    async def play() -> None:
        app, _ = wrapped(look, ServerConfig())
        for name in ("one", "two"):
            await call(app, headers={"x-request-id": name})
            assert (CLOCKS.get(), CALLER.get()) == (None, "")

    asyncio.run(play())
    assert [name for _, name in seen] == ["one", "two"] and seen[0][0] is not seen[1][0]


def test_a_task_whose_client_left_can_be_used_and_cancelled_again() -> None:
    answering = set[Any]()

    async def leaves(scope: Scope, receive: Receive, send: Send) -> None:
        answering.pop().cancel()
        await asyncio.Event().wait()

    async def play() -> None:
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": []}
        scope["state"] = {ANSWERING: answering}
        await wrapped(leaves, ServerConfig())[0](scope, cast(Any, None), cast(Any, None))
        task = asyncio.current_task()
        assert task is not None and not task.cancelling() and not answering
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(play(), 60))


def test_the_answering_task_is_known_to_its_connection_only_while_it_answers() -> None:
    answering, during = set[Any](), list[int]()

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        during.append(len(answering))
        raise ValueError("planted")

    async def send(message: AsgiEvent) -> None: ...

    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": []}
    scope["state"] = {ANSWERING: answering}
    asyncio.run(cast(Any, wrapped(look, ServerConfig())[0](scope, cast(Any, None), send)))
    assert during == [1] and not answering


def test_a_line_names_a_client_that_is_not_known_and_the_path_that_answered(caplog: pytest.LogCaptureFixture) -> None:
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/a", "headers": []}
    assert " client=- GET " in line(_exchange(scope))
    assert " client=- GET " in line(_exchange({**scope, "client": None}))
    assert " client=::1 GET " in line(_exchange({**scope, "client": ("::1", 5)}))
    with caplog.at_level("INFO", "sglcore.requests"):
        asyncio.run(call(wrapped(echo, ServerConfig())[0], "/score"))
    assert '"/v1/score"' in caplog.text and '"/score"' not in caplog.text


def test_a_metric_has_the_path_of_the_route_and_not_the_clients() -> None:
    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = SimpleNamespace(path="/v1/models/{model}")
        await echo(scope, receive, send)

    app, frontend = wrapped(routed, ServerConfig())
    for name in "ab":
        asyncio.run(call(app, f"/v1/models/{name}", method="GET"))
    assert dict(frontend.metrics.responses) == {("GET", "/v1/models/{model}", 200): 2}


def test_a_path_of_another_server_is_replaced_whole() -> None:
    seen: list[tuple[str, bytes | None]] = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["path"], scope.get("raw_path")))
        await echo(scope, receive, send)

    asyncio.run(call(wrapped(look, ServerConfig())[0], "/chat/completions"))
    assert seen == [("/v1/chat/completions", b"/v1/chat/completions")]


@pytest.mark.parametrize(
    ("headers", "has", "length"),
    [
        ({}, False, None),
        ({"content-length": "0"}, False, 0),
        ({"content-length": "5"}, True, 5),
        ({"transfer-encoding": "chunked"}, True, None),
        ({"transfer-encoding": "chunked", "content-length": "0"}, True, 0),
        ({"content-length": "5x"}, True, None),
        ({"content-length": "9" * 19}, True, int("9" * 19)),
        ({"content-length": "9" * 20}, True, None),
    ],
)
def test_a_request_has_a_body_if_its_headers_announce_one(
    headers: dict[str, str], has: bool, length: int | None
) -> None:
    scope = {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    assert (has_body(scope), body_length(scope)) == (has, length)


async def turns_away(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that refuses a request before it has read anything."""
    raise TurnedAway(int(scope["path"][1:]), "no", "odd")


@pytest.mark.parametrize(
    ("headers", "chunks", "status", "closes"),
    [
        ({}, [], 403, False),
        ({"content-length": "0"}, [], 403, False),
        ({"content-length": "6"}, [b"abc", b"def"], 403, False),
        ({"content-length": str(refusal.SMALL)}, [b"x" * refusal.SMALL], 429, False),
        ({"content-length": str(refusal.SMALL + 1)}, [b"x" * (refusal.SMALL + 1)], 429, True),
        ({}, [b"abc"], 403, True),
        ({"content-length": "6"}, [b"abc", b"def"], 408, True),
    ],
)
def test_a_connection_is_kept_after_a_refusal_if_the_rest_of_the_body_is_small(
    headers: dict[str, str], chunks: list[bytes], status: int, closes: bool
) -> None:
    counted: list[str] = []
    app = Refusals(turns_away, cast(Any, SimpleNamespace(refused=counted.append)))
    answer = asyncio.run(call(app, f"/{status}", headers=headers, chunks=chunks))
    assert (answer.status, answer.headers.get("connection")) == (status, "close" if closes else None)
    assert [each.get("more_body") for each in answer.sent] == ([None, True, False] if closes else [None, False])
    assert answer.error["type"] == ("rate_limit_error" if status == 429 else INVALID) and counted == ["odd"]


@pytest.mark.parametrize(("most", "left"), [(10, 2), (11, 1), (100, 0)])
def test_of_the_rest_of_a_body_so_many_bytes_are_read_and_no_more(
    most: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal, "_MOST", most)
    rest = [b"x" * 5] * 4

    async def receive() -> AsgiEvent:
        return {"type": "http.request", "body": rest.pop(), "more_body": bool(rest)}

    assert asyncio.run(refusal._drop(receive)) is (left == 0)
    assert len(rest) == left


@pytest.mark.parametrize(
    "ends", [lambda: {"type": "http.disconnect"}, lambda: {"type": "http.request", "body": b"x", "more_body": True}]
)
def test_a_body_that_breaks_off_or_drips_has_no_end(ends: Callable[[], Any]) -> None:
    async def receive() -> AsgiEvent:
        await asyncio.sleep(0.3)
        return ends()

    async def play() -> None:
        begin = asyncio.get_running_loop().time()
        assert not await refusal._drop(receive)
        assert asyncio.get_running_loop().time() - begin < 1.5

    idle_clock.run(play(), 60.0)


def test_an_exchange_that_takes_no_prompt_says_nothing_of_one() -> None:
    found = line(Exchange("id", "GET", "/a b", status=204))
    assert found.startswith('id=id client=- GET "/a b" status=204 ms=') and "tokens" not in found
