"""Connections with several requests, old clients and odd heads: each request has an answer of its
own, and a time limit ends with what it limits."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from sglcore.config.server_config import ServerConfig
from sglcore.serving.http import server as http
from sglcore.serving.http.connection import OPEN_ENDED, Connection, Unchunked
from tests.serving.clients.test_slow_clients import GET, PATIENCE, SHORT, Served, run, served, status
from tests.serving.wrapped import echo

LAST = GET.replace(b"host:", b"connection: close\r\nhost:")


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = (b"POST %s HTTP/1.1" % path.encode(), b"host: localhost", *headers)
    return b"\r\n".join((*lines, b"", b"")) + body


async def told(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the path, the body and the names of the headers."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    names = b" ".join(name for name, _ in scope["headers"])
    said = b"%s [%s] %s" % (scope["path"].encode(), body, names)
    headers = [(b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


def test_requests_that_come_together_are_answered_one_by_one_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    links, begun, release = list[Connection](), list[str](), asyncio.Event()

    class Kept(Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            links.append(self)

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        await release.wait()
        await told(scope, receive, send)

    monkeypatch.setattr(http, "Connection", Kept)

    async def work() -> None:
        async with served(held) as server:
            reader, writer = await server.connect()
            requests = [post(f"/{name}", b"1" + name.encode(), b"content-length: 2") for name in "abc"]
            writer.write(b"".join(requests) + LAST.replace(b"/livez", b"/d"))
            while not begun:
                await asyncio.sleep(0)
            assert begun == ["/a"] and len(links[0].pipeline) == 3
            release.set()
            answer = (await reader.read()).decode()
            places = [answer.index(said) for said in ("/a [1a]", "/b [1b]", "/c [1c]", "/d []")]
            assert places == sorted(places) and begun == ["/a", "/b", "/c", "/d"]
            assert answer.count("HTTP/1.1 200") == 4

    run(work())


def test_the_next_request_of_a_connection_has_its_headers_after_one_with_trailers() -> None:
    async def work() -> None:
        async with served(told) as server:
            chunked = post("/a", b"1\r\nx\r\n0\r\nlate: 1\r\n\r\n", b"transfer-encoding: chunked")
            answer = await server.exchange(chunked + LAST.replace(b"host:", b"early: 1\r\nhost:"))
            first, second = answer.split(b"/livez")
            assert b"/a [x] host transfer-encoding" in first and b"late" not in answer and b"early" in second

    run(work())


@pytest.mark.parametrize(
    "codings",
    [(b"chunked", b"gzip"), (b"gzip", b"chunked"), (b"chunked, identity",), (b"identity",), (b"chunked", b"chunked")],
)
def test_a_body_of_several_codings_is_never_taken_for_a_plain_one(codings: tuple[bytes, ...]) -> None:
    async def work() -> None:
        async with served(told) as server:
            headers = [b"transfer-encoding: " + coding for coding in codings]
            answer = await server.exchange(post("/a", b"1\r\nx\r\n0\r\n\r\n", *headers))
            assert status(answer) in (400, 501) and b"[x]" not in answer

    run(work())


def test_a_coding_may_be_written_in_any_case() -> None:
    async def work() -> None:
        async with served(told) as server:
            answer = await server.exchange(
                post("/a", b"1\r\nx\r\n0\r\n\r\n", b"Transfer-Encoding:  CHUNKED ", b"connection: close")
            )
            assert status(answer) == 200 and b"/a [x]" in answer

    run(work())


async def twice(server: Served, pause: float) -> bytes:
    """Send two requests on one connection, with a pause after the first answer, and return both
    answers."""
    reader, writer = await server.connect()
    writer.write(GET)
    first = await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(pause)
    writer.write(LAST)
    rest = await reader.read()
    writer.close()
    return first + rest


@pytest.mark.parametrize("limit", ["header_timeout", "write_timeout", "body_timeout"])
def test_a_connection_may_rest_longer_than_a_part_of_a_request_may_take(limit: str) -> None:
    async def work() -> None:
        settings: dict[str, Any] = {limit: SHORT, "keep_alive": PATIENCE}
        async with served(told, **settings) as server:
            assert (await twice(server, 3 * SHORT)).count(b"HTTP/1.1 200") == 2

    run(work())


@pytest.mark.parametrize("limit", ["header_timeout", "write_timeout", "body_timeout", "keep_alive"])
def test_an_answer_may_take_longer_than_a_part_of_its_request(limit: str) -> None:
    async def thinks(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(3 * SHORT)
        await echo(scope, none_left, send)

    async def none_left() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def work() -> None:
        settings: dict[str, Any] = {limit: SHORT}
        async with served(thinks, **settings) as server:
            for parts in ((b"12345",), (b"12", b"345")):
                reader, writer = await server.connect()
                writer.write(post("/a", b"", b"content-length: 5", b"connection: close"))
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(0.01)
                assert status(await reader.read()) == 200
                writer.close()

    run(work())


class Cycle:
    """The parts of uvicorn's cycle that an answer to a client of HTTP/1.0 sets."""

    chunked_encoding: bool | None = None
    expected_content_length = 0


@pytest.mark.parametrize(
    ("headers", "chunked", "expected"),
    [
        ([], False, 5),
        ([(b"content-type", b"text/plain")], False, 5),
        ([(b"content-length", b"5")], None, 0),
        ([(b"x", b"y"), (b"Content-Length", b"5")], None, 0),
    ],
)
def test_an_answer_of_unknown_length_to_an_old_client_counts_its_own_bytes(
    headers: list[tuple[bytes, bytes]], chunked: bool | None, expected: int
) -> None:
    cycle, states, sent = Cycle(), list[dict[str, Any]](), list[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        states.append(dict(scope["state"]))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"abc", b"", b"de"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "state": {OPEN_ENDED: cycle, "kept": 1}}
    asyncio.run(Unchunked(app)(scope, None, send))  # pyright: ignore[reportArgumentType]
    assert (cycle.chunked_encoding, cycle.expected_content_length) == (chunked, expected)
    assert states == [{"kept": 1}] and len(sent) == 5


def test_a_server_whose_engine_has_ended_waits_for_answers_for_a_moment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "LAST_WORDS", SHORT)
    begun = asyncio.Event()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def work() -> None:
        async with served(held, drain_timeout=100 * PATIENCE) as server:
            _, writer = await server.connect()
            writer.write(GET)
            await begun.wait()
            server.stopped.set()
            assert await server.task is False and not server.drained
            writer.close()

    run(work())


@pytest.mark.parametrize(("seconds", "is_clean"), [(2 * SHORT, True), (None, False)])
def test_a_drain_without_requests_is_waited_for_as_long_as_it_may_take_and_then_ended(
    seconds: float | None, is_clean: bool
) -> None:
    told: list[str] = []

    async def drains() -> None:
        try:
            await (asyncio.Event().wait() if seconds is None else asyncio.sleep(seconds))
            told.append("drained")
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def work() -> None:
        async with served(on_drain=drains, drain_timeout=SHORT if seconds is None else PATIENCE) as server:
            os.kill(os.getpid(), signal.SIGTERM)
            assert await server.task is is_clean and told == ["drained" if is_clean else "cancelled"]

    run(work())


def test_what_is_no_request_after_an_answer_has_begun_is_not_answered_within_it() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def work() -> None:
        async with served(streams) as server:
            reader, writer = await server.connect()
            writer.write(GET)
            await begun.wait()
            writer.write(b"nonsense\r\n\r\n")
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1 ") == 1 and b"one" in answer
            await ended.wait()
            writer.close()

    run(work())


def test_a_server_that_ends_keeps_no_connection_of_who_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = asyncio.Event()

    class Roomy(Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=1 << 30)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (8 << 20)})

    monkeypatch.setattr(http, "Connection", Roomy)

    async def work() -> None:
        async with served(large, write_timeout=100 * PATIENCE) as server:
            _, writer = await server.connect()
            writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
            writer.write(LAST)
            await asyncio.sleep(SHORT)
            server.stopped.set()
            await server.task
            await lost.wait()
            writer.transport.abort()

    run(work())


def test_a_host_of_both_families_is_bound_in_both_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs addresses of IPv6")
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", 0)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::", 0, 0, 0)),
    ]
    monkeypatch.setattr(http.socket, "getaddrinfo", lambda *given, **named: found)
    bound = http.bind(ServerConfig(port=0))
    assert [each.family for each in bound] == [socket.AF_INET, socket.AF_INET6]
    assert len({each.getsockname()[1] for each in bound}) == 1
    for each in bound:
        each.listen()
    for each in bound:
        each.close()
