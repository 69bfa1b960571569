"""Clients that are slow, too many, too large or gone cost no more than the bounds, and do not
affect others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from sglcore.config.server_config import ServerConfig
from sglcore.serving.http import connection
from sglcore.serving.http import server as http
from sglcore.serving.http.connection import Connection
from tests.serving import idle_clock
from tests.serving.servers import Server
from tests.serving.wrapped import echo, wrapped

SHORT = 0.15
GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
END = b"\r\n0\r\n\r\n"
"""The end of a chunked body."""
PATIENCE = 20.0
"""Seconds after which a test gives up; no test waits for them to pass."""


@dataclass
class Served:
    """A server on this event loop."""

    port: int
    task: asyncio.Task[bool]
    stopped: asyncio.Event
    drained: list[str] = field(default_factory=list)
    url: str = ""

    async def connect(self, tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = None if tls is None else "localhost"
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24, ssl=tls, server_hostname=name)

    async def exchange(self, data: bytes) -> bytes:
        """Send the data; return everything that the server sends until it closes."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await reader.read()
        writer.close()
        return answer

    async def is_well(self) -> bool:
        """Whether another client is answered."""
        reader, writer = await self.connect()
        writer.write(GET)
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return answer.startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def served(
    app: ASGIApp = echo,
    *,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    on_overdue: Callable[[], None] | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """The wrapped app on real sockets."""
    config = ServerConfig(**{"port": 0, **settings})
    whole, frontend = wrapped(app, config)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stopped, drained = asyncio.Event(), []

    async def note() -> None:
        drained.append("drained")

    task = asyncio.create_task(
        http.run_server(
            whole,
            config,
            on_drain=on_drain or note,
            stopped=stopped,
            on_listening=listening.set_result,
            on_overdue=on_overdue,
            metrics=frontend.metrics,
            tls=http.tls_of(config),
        )
    )
    await asyncio.wait([task, listening], return_when=asyncio.FIRST_COMPLETED)
    url = listening.result() if listening.done() else str(task.result())
    yield Served(int(url.rpartition(":")[2]), task, stopped, drained, url)
    stopped.set()
    await task


def run(work: Coroutine[Any, Any, None]) -> None:
    idle_clock.run(work, PATIENCE)


async def whole(reader: asyncio.StreamReader) -> bytes:
    """Read an answer of the announced length; the later state of the connection does not matter."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.partition(b":")[2]))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error(answer: bytes) -> dict[str, Any]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


class TestHeads:
    def test_a_head_that_does_not_end_is_408_though_bytes_keep_coming(self) -> None:
        async def work() -> None:
            async with served(header_timeout=SHORT) as server:
                reader, writer = await server.connect()
                writer.write(b"GET / HTTP/1.1\r\n")
                answer = asyncio.create_task(reader.read())
                while not answer.done():
                    writer.write(b"x: y\r\n")
                    assert await server.is_well()
                    await asyncio.wait([answer], timeout=SHORT / 5)
                assert (status(answer.result()), error(answer.result())["code"]) == (408, "request_timeout")

        run(work())

    def test_a_connection_that_says_nothing_is_closed(self) -> None:
        async def work() -> None:
            async with served(header_timeout=SHORT) as server:
                assert await server.exchange(b"") == b""

        run(work())

    def test_the_next_head_of_a_connection_has_its_own_time(self) -> None:
        async def work() -> None:
            async with served(header_timeout=SHORT) as server:
                reader, writer = await server.connect()
                writer.write(GET)
                assert status(await reader.readuntil(b"\r\n\r\n")) == 200
                writer.write(b"GET / HTT")
                assert b"408" in await reader.read()

        run(work())

    @pytest.mark.parametrize("pieces", [1, 40])
    def test_a_head_over_the_limit_is_431_whether_it_comes_at_once_or_not(self, pieces: int) -> None:
        async def work() -> None:
            async with served(max_header_bytes=2000) as server:
                reader, writer = await server.connect()
                head = b"GET / HTTP/1.1\r\nx: " + b"y" * 4000
                for start in range(0, len(head), len(head) // pieces + 1):
                    writer.write(head[start : start + len(head) // pieces + 1])
                    await asyncio.sleep(0)
                answer = await reader.read()
                assert (status(answer), error(answer)["code"]) == (431, "header_too_large")
                assert "2000 bytes" in error(answer)["message"]

        run(work())

    def test_the_heads_of_a_connection_are_measured_one_by_one(self) -> None:
        async def work() -> None:
            async with served(max_header_bytes=100) as server:
                reader, writer = await server.connect()
                for _ in range(5):
                    writer.write(GET[:30])
                    await asyncio.sleep(0.001)
                    writer.write(GET[30:])
                    assert status(await reader.readuntil(END)) == 200
                writer.close()

        run(work())

    def test_an_idle_connection_is_kept_for_as_long_as_it_was_said(self) -> None:
        async def work() -> None:
            async with served(keep_alive=SHORT) as server:
                reader, writer = await server.connect()
                writer.write(GET)
                await reader.readuntil(END)
                begin = asyncio.get_running_loop().time()
                assert await reader.read() == b""
                assert asyncio.get_running_loop().time() - begin < 10 * SHORT

        run(work())

    def test_what_is_not_http_is_400_in_our_schema(self) -> None:
        async def work() -> None:
            async with served() as server:
                answer = await server.exchange(b"\x16\x03\x01 hello\r\n\r\n")
                assert (status(answer), error(answer)["code"]) == (400, "malformed_request")

        run(work())

    def test_who_is_refused_and_does_not_leave_is_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the reason for the refusal, and though the client never closes its own half."""
        lost = asyncio.Queue[None]()

        class Watched(Connection):
            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                lost.put_nowait(None)

        monkeypatch.setattr(http, "Connection", Watched)
        monkeypatch.setattr(connection, "LINGER_SECONDS", SHORT)

        async def work() -> None:
            async with served(max_connections=1, max_header_bytes=100, header_timeout=SHORT) as server:
                for data in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 200, b"GET / HTT"):
                    reader, writer = await server.connect()
                    writer.write(data)
                    assert status(await reader.read()) in (400, 408, 431)
                    await lost.get()
                    writer.close()
                _, first = await server.connect()
                first.write(GET)
                reader, writer = await server.connect()
                assert status(await reader.read()) == 503
                await lost.get()
                writer.close()
                first.close()

        run(work())

    def test_one_connection_too_many_is_503_until_another_ends(self) -> None:
        async def work() -> None:
            async with served(max_connections=2) as server:
                others = [await server.connect() for _ in range(2)]
                answer = await server.exchange(GET)
                assert (status(answer), error(answer)["code"]) == (503, "overloaded")
                assert b"retry-after: 1" in answer
                others[0][1].close()
                await others[0][1].wait_closed()
                while status(answer) != 200:
                    answer = await server.exchange(GET.replace(b"host:", b"connection: close\r\nhost:"))
                others[1][1].close()

        run(work())


class TestComplete:
    def test_a_whole_head_over_the_limit_is_431(self) -> None:
        async def work() -> None:
            async with served(max_header_bytes=2000) as server:
                answer = await server.exchange(GET.replace(b"host:", b"x: " + b"y" * 3000 + b"\r\nhost:"))
                assert status(answer) == 431

        run(work())

    def test_a_client_is_who_it_is_and_not_who_it_says(self) -> None:
        async def names(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": scope["client"][0].encode()})

        async def work() -> None:
            async with served(names) as server:
                answer = await server.exchange(
                    GET.replace(b"host:", b"connection: close\r\nx-forwarded-for: 9.9.9.9\r\nhost:")
                )
                assert b"127.0.0.1" in answer and b"9.9.9.9" not in answer and b"\r\nserver:" not in answer.lower()

        run(work())

    def test_trailers_do_not_become_headers(self) -> None:
        async def headers(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive()).get("more_body"):
                pass
            names = b",".join(name for name, _ in scope["headers"])
            await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": names})

        async def work() -> None:
            async with served(headers) as server:
                head = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
                answer = await server.exchange(head + b"1\r\nx\r\n0\r\nauthorization: Bearer x\r\n\r\n")
                assert b"transfer-encoding" in answer.partition(b"\r\n\r\n")[2] and b"authorization" not in answer

        run(work())


class TestBodies:
    def test_a_body_that_drips_is_408_and_others_are_answered(self) -> None:
        async def work() -> None:
            async with served(body_timeout=SHORT) as server:
                reader, writer = await server.connect()
                writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
                answer = asyncio.create_task(whole(reader))
                while not answer.done():
                    writer.write(b"x")
                    assert await server.is_well()
                    await asyncio.wait([answer], timeout=SHORT / 5)
                assert status(answer.result()) == 408

        run(work())

    def test_a_client_that_sends_all_before_it_reads_gets_to_read_413(self) -> None:
        async def work() -> None:
            async with served(max_request_bytes=1000) as server:
                size = 4 << 20
                head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % size
                reader, writer = await server.connect()
                writer.write(head + b"x" * size)
                await writer.drain()
                answer = await whole(reader)
                assert (status(answer), error(answer)["code"]) == (413, "request_too_large")

        run(work())


class Fountain:
    """An app that streams until it is stopped, and counts chunks."""

    def __init__(self) -> None:
        self.chunks = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/stream":
            return await echo(scope, receive, send)
        try:
            await asyncio.wait(
                [asyncio.create_task(self.flow(send)), asyncio.create_task(self.left(receive))],
                return_when="FIRST_COMPLETED",
            )
        finally:
            self.ended.set()

    async def flow(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.ended.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.chunks += 1
            await asyncio.sleep(0)

    async def left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class TestReaders:
    def test_who_takes_nothing_holds_little_and_is_cut_off_in_the_end(self) -> None:
        async def work() -> None:
            fountain = Fountain()
            async with served(fountain, write_timeout=4 * SHORT) as server:
                _, writer = await server.connect()
                writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
                writer.write(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert await server.is_well()
                await fountain.ended.wait()
                assert fountain.chunks < 512
                writer.transport.abort()

        run(work())

    @pytest.mark.parametrize("keeps", [False, True])
    def test_the_rest_of_a_last_answer_is_not_kept_for_ever_for_who_does_not_take_it(
        self, keeps: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Even if it is too little for the server to pause writing. `keeps`: whether the connection
        would be kept alive afterwards."""
        lost = asyncio.Event()

        class Roomy(Connection):
            def connection_made(self, transport: asyncio.Transport) -> None:
                super().connection_made(transport)
                transport.set_write_buffer_limits(high=1 << 30)

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                lost.set()

        async def large(scope: Scope, receive: Receive, send: Send) -> None:
            body = b"x" * (8 << 20)
            head = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": body})

        monkeypatch.setattr(http, "Connection", Roomy)

        async def work() -> None:
            async with served(large, write_timeout=2 * SHORT, keep_alive=SHORT) as server:
                _, writer = await server.connect()
                writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
                writer.write(GET if keeps else GET.replace(b"host:", b"connection: close\r\nhost:"))
                await lost.wait()
                writer.transport.abort()

        run(work())

    def test_who_has_caught_up_may_wait_for_more_as_long_as_it_takes(self) -> None:
        async def pauses(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x" * (4 << 20), "more_body": True})
            await asyncio.sleep(0.08)
            await send({"type": "http.response.body", "body": b"the end"})

        async def work() -> None:
            async with served(pauses, write_timeout=0.04) as server:
                answer = await server.exchange(GET.replace(b"host:", b"connection: close\r\nhost:"))
                assert b"the end" in answer[-30:]

        run(work())

    def test_a_client_that_leaves_is_told_to_the_app_at_once(self) -> None:
        async def work() -> None:
            fountain = Fountain()
            async with served(fountain) as server:
                reader, writer = await server.connect()
                writer.write(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
                await reader.readexactly(100_000)
                writer.transport.abort()
                await fountain.ended.wait()

        run(work())

    def test_work_that_sends_nothing_ends_when_its_client_leaves_however_much_that_had_sent(self) -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def works(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] != "/work":
                return await echo(scope, receive, send)
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def work() -> None:
            async with served(works) as server:
                _, writer = await server.connect()
                writer.write(
                    b"POST /work HTTP/1.1\r\nhost: localhost\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000
                )
                await begun.wait()
                writer.transport.abort()
                await ended.wait()
                assert await server.is_well()

        run(work())


class TestStopping:
    async def _held(self, server: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request that is being answered."""
        reader, writer = await server.connect()
        writer.write(b"POST /held HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\nx")
        await self.arrived.wait()
        return reader, writer

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/held":
            self.arrived.set()
            await self.release.wait()
        await echo(scope, receive, send)

    def setup_method(self) -> None:
        self.arrived, self.release = asyncio.Event(), asyncio.Event()

    def test_the_first_signal_drains_and_the_request_in_flight_is_answered(self) -> None:
        async def work() -> None:
            async with served(self.app) as server:
                reader, _ = await self._held(server)
                os.kill(os.getpid(), signal.SIGTERM)
                while not server.drained:
                    await asyncio.sleep(0.001)
                assert await server.is_well(), "probes are answered while it drains"
                self.release.set()
                assert status(await reader.read()) == 200
                assert await server.task

        run(work())

    def test_the_second_signal_stops_at_once(self) -> None:
        async def work() -> None:
            async with served(self.app) as server:
                reader, _ = await self._held(server)
                os.kill(os.getpid(), signal.SIGINT)
                while not server.drained:
                    await asyncio.sleep(0.001)
                os.kill(os.getpid(), signal.SIGINT)
                assert await server.task is False
                assert b"200" not in await reader.read()

        run(work())

    def test_draining_ends_when_the_engine_has_ended(self) -> None:
        """Whatever time is left: without an engine, requests in flight are never answered."""

        async def work() -> None:
            async with served(self.app, drain_timeout=100 * PATIENCE) as server:
                _, writer = await self._held(server)
                os.kill(os.getpid(), signal.SIGTERM)
                while not server.drained:
                    await asyncio.sleep(0.001)
                server.stopped.set()
                assert await server.task is False
                writer.close()

        run(work())

    def test_draining_ends_when_its_time_is_over(self) -> None:
        async def work() -> None:
            async with served(self.app, drain_timeout=SHORT) as server:
                _, writer = await self._held(server)
                os.kill(os.getpid(), signal.SIGTERM)
                assert await server.task is False
                writer.close()

        run(work())

    def test_requests_that_are_overdue_can_still_be_told(self) -> None:
        async def work() -> None:
            async with served(self.app, drain_timeout=SHORT, on_overdue=self.release.set) as server:
                reader, _ = await self._held(server)
                os.kill(os.getpid(), signal.SIGTERM)
                assert status(await reader.read()) == 200
                assert await server.task is False

        run(work())

    def test_a_drain_that_fails_is_not_clean(self) -> None:
        async def fails() -> None:
            raise RuntimeError("planted")

        async def work() -> None:
            async with served(self.app, on_drain=fails) as server:
                os.kill(os.getpid(), signal.SIGTERM)
                assert await server.task is False

        run(work())

    def test_when_the_engine_has_ended_answers_that_are_ready_still_go_out(self) -> None:
        async def work() -> None:
            async with served(self.app) as server:
                reader, _ = await self._held(server)
                server.stopped.set()
                self.release.set()
                assert status(await reader.read()) == 200
                assert await server.task
                assert not server.drained

        run(work())

    def test_signals_are_the_process_own_again_afterwards(self) -> None:
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

        async def work() -> None:
            async with served() as server:
                assert await server.is_well()

        run(work())
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    taken = http.bind(ServerConfig(port=0))
    port = taken[0].getsockname()[1]
    taken[0].listen()
    with pytest.raises(http.ConfigError, match=f"cannot listen at 127.0.0.1 port {port}: .*--port"):
        http.bind(ServerConfig(port=port))
    taken[0].close()


def test_all_addresses_of_a_host_have_one_port_though_any_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.1", "127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(http.socket, "getaddrinfo", lambda *given, **named: found)
    bound = http.bind(ServerConfig(port=0))
    assert [each.getsockname()[0] for each in bound] == ["127.0.0.1", "127.0.0.2"]
    assert len({each.getsockname()[1] for each in bound}) == 1 and http.address_of(bound).endswith(
        f":{bound[0].getsockname()[1]}"
    )
    for each in bound:
        each.close()


def test_a_host_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(http.ConfigError, match="no-such-host.invalid"):
        http.bind(ServerConfig(host="no-such-host.invalid"))


@pytest.mark.parametrize(
    ("bound", "wanted"),
    [
        (("127.0.0.1", 80), "http://127.0.0.1:80"),
        (("0.0.0.0", 80), "http://localhost:80"),
        (("::", 80, 0, 0), "http://localhost:80"),
        (("::1", 80, 0, 0), "http://[::1]:80"),
    ],
)
def test_the_address_is_one_that_this_machine_can_ask(bound: tuple[Any, ...], wanted: str) -> None:
    assert http.address_of([cast(socket.socket, SimpleNamespace(getsockname=lambda: bound))]) == wanted


def test_who_reads_a_byte_now_and_then_keeps_no_place_on_the_device(server: Server) -> None:
    given = {"prompt": "Once upon", "max_tokens": 100, "ignore_eos": True, "stream": True, "logprobs": 5}
    body = json.dumps(given).encode()
    head = "POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json"
    due = server.get("/server_info/stats")["generation_tokens"] + 102
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall("\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body)
        read = slow.recv(1)
        assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})["usage"]["completion_tokens"] == 2
        while (stats := server.get("/server_info/stats"))["running"] or stats["generation_tokens"] < due:
            read += slow.recv(1)
        assert read.startswith(b"H") and len(read) < 20_000
    assert server.get("/server_info/audit")["problems"] == []
