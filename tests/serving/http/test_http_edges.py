"""The edges of a server's limits: what is exactly at one, and what is left when a request ends in
the middle."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message as AsgiEvent
from starlette.types import Receive, Scope, Send

from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.serving.http import connection
from sglcore.serving.http import server as http
from sglcore.serving.http.logs import Logs
from sglcore.serving.http.middleware.bodies import ARRIVING, FILES, Bodies
from tests.serving.clients.test_slow_clients import GET, error, run, served, status
from tests.serving.stubs import Application, make_frontend
from tests.serving.wrapped import call, echo, wrapped


def head(size: int) -> bytes:
    """A request whose head has so many bytes by the server's count."""
    rest = size - len("/livez") - len("hostlocalhost") - len("connectionclose") - len("x") - 3 * 4
    return GET.replace(b"host:", b"connection: close\r\nx: " + b"y" * rest + b"\r\nhost:")


@pytest.mark.parametrize(("more", "wanted"), [(0, 200), (1, 431)])
def test_a_head_may_be_as_large_as_its_limit(more: int, wanted: int) -> None:
    async def work() -> None:
        async with served(max_header_bytes=1000) as server:
            assert status(await server.exchange(head(1000 + more))) == wanted

    run(work())


@pytest.mark.parametrize(("size", "wanted"), [(1000, 408), (1001, 431)])
def test_a_head_that_is_not_complete_may_have_as_many_bytes_as_its_limit(size: int, wanted: int) -> None:
    async def work() -> None:
        async with served(max_header_bytes=1000, header_timeout=0.2) as server:
            answer = await server.exchange(b"GET /livez HTTP/1.1\r\nx: ".ljust(size, b"y"))
            assert status(answer) == wanted

    run(work())


def test_connections_beyond_those_that_are_answered_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_REFUSED", 2)
    monkeypatch.setattr(connection, "LINGER_SECONDS", 60.0)

    async def work() -> None:
        async with served(max_connections=1) as server:
            links = [await server.connect() for _ in range(4)]
            for reader, _ in links[1:3]:
                answer = await reader.read()
                assert (status(answer), error(answer)["code"]) == (503, "overloaded")
            with pytest.raises(ConnectionResetError):
                assert not await links[3][0].read()
                raise ConnectionResetError
            links[0][1].write(GET)
            assert status(await links[0][0].readuntil(b"\r\n\r\n")) == 200
            for _, writer in links:
                writer.transport.abort()

    run(work())


@pytest.mark.parametrize(
    ("limits", "wanted", "found"),
    [
        ((100, 1000), 500, 500),
        ((100, 200), 500, 200),
        ((600, 1000), 500, 600),
        ((100, resource.RLIM_INFINITY), 500, 500),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 500, 500),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(
    limits: tuple[int, int], wanted: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [limits]

    def set_limit(kind: int, new: tuple[int, int]) -> None:
        assert new[1] == limits[1], "the hard limit stays"
        now[0] = new

    monkeypatch.setattr(http.resource, "getrlimit", lambda kind: now[0])
    monkeypatch.setattr(http.resource, "setrlimit", set_limit)
    assert http._file_limit(wanted) == found
    assert now[0][0] == (limits[0] if limits[0] in (600, resource.RLIM_INFINITY) else found)


def test_a_limit_of_files_that_can_not_be_raised_is_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, new: tuple[int, int]) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(http.resource, "getrlimit", lambda kind: (100, 1000))
    monkeypatch.setattr(http.resource, "setrlimit", refuse)
    assert http._file_limit(500) == 100


@pytest.mark.parametrize(("files", "connections"), [(100_000, 50), (256 + 20, 20), (256, 1), (10, 1)])
def test_so_many_connections_are_taken_as_there_are_files_for(
    files: int, connections: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[int]()

    def limit(wanted: int) -> int:
        asked.append(wanted)
        return min(files, wanted)

    monkeypatch.setattr(http, "_file_limit", limit)
    config = ServerConfig(
        max_connections=50, max_header_bytes=999, header_timeout=3.0, write_timeout=4.0, keep_alive=5.5
    )
    found = http.uvicorn_config(cast(Any, echo), config)
    bounds = cast(Any, found.http).keywords["bounds"]
    assert bounds == connection.Bounds(connections, 999, 3.0, 4.0) and asked == [50 + 256]
    assert (found.timeout_keep_alive, found.proxy_headers, found.server_header, found.ws) == (5.5, False, False, "none")
    assert ("ulimit" in caplog.text) is (connections < 50)


def test_an_address_that_is_taken_frees_those_that_were_bound_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.1", "127.0.0.2")]
        monkeypatch.setattr(http.socket, "getaddrinfo", lambda *given, **named: found)
        with pytest.raises(ConfigError, match="--port"):
            http.bind(ServerConfig(port=port))
        with socket.socket() as again:
            again.bind(("127.0.0.1", port))


def test_a_host_of_another_machine_is_refused_by_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.1", 0))]
    monkeypatch.setattr(http.socket, "getaddrinfo", lambda *given, **named: found)
    with pytest.raises(ConfigError, match="--host"):
        http.bind(ServerConfig(port=0))


def test_a_socket_is_no_childs_and_may_be_bound_again_at_once() -> None:
    (bound,) = http.bind(ServerConfig(port=0))
    assert not bound.get_inheritable() and bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    assert http.address_of([bound], "https").startswith("https://127.0.0.1:")
    bound.close()


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_error_after_the_answer_has_begun_ends_its_connection(has_begun: bool) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("planted")

    app, frontend = wrapped(fails, ServerConfig())
    if has_begun:
        with pytest.raises(ValueError, match="planted"):
            asyncio.run(call(app))
    else:
        assert asyncio.run(call(app)).status == 500
    assert dict(frontend.metrics.responses) == {("POST", "other", 200 if has_begun else 500): 1}
    assert frontend.metrics.in_flight == 0 and not frontend.metrics.refusals


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_leaves_is_counted_by_the_status_that_it_was_sent(has_begun: bool) -> None:
    answering = set[Any]()

    async def leaves(scope: Scope, receive: Receive, send: Send) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 206, "headers": []})
        answering.pop().cancel()
        await asyncio.Event().wait()

    async def send(message: AsgiEvent) -> None: ...

    app, frontend = wrapped(leaves, ServerConfig())
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": []}
    scope["state"] = {connection.ANSWERING: answering}
    asyncio.run(asyncio.wait_for(app(scope, cast(Any, None), send), 60))
    assert dict(frontend.metrics.responses) == {("GET", "other", 206 if has_begun else 499): 1}


def test_work_that_is_cancelled_by_others_than_its_client_stays_cancelled() -> None:
    begun = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def play() -> None:
        app, frontend = wrapped(waits, ServerConfig())
        asking = asyncio.create_task(call(app))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert frontend.metrics.in_flight == 0

    asyncio.run(play())


def test_bodies_that_have_arrived_make_room_for_others_and_files_do_not_until_they_are_kept() -> None:
    release, inside = asyncio.Event(), list[str]()

    async def hold(scope: Scope, receive: Receive, send: Send) -> None:
        inside.append(scope["path"])
        await release.wait()
        await echo(scope, receive, send)

    async def play() -> None:
        bodies = Bodies(hold, 100, 60.0, 1000)
        asking = [asyncio.create_task(call(bodies, chunks=[b"x" * 100])) for _ in range(ARRIVING + 5)]
        asking += [asyncio.create_task(call(bodies, FILES, chunks=[b"x" * 70]))]
        asking += [asyncio.create_task(call(bodies, f"{FILES}/a", chunks=[b"x" * 70]))]
        while len(inside) < len(asking):
            await asyncio.sleep(0)
        assert (bodies._usual.at_once, bodies._files.at_once) == (0, 70)
        release.set()
        assert {answer.status for answer in await asyncio.gather(*asking)} == {200}
        assert (bodies._usual.at_once, bodies._files.at_once) == (0, 0)

    asyncio.run(asyncio.wait_for(play(), 60))


def test_the_sum_of_bodies_may_be_as_large_as_its_limit() -> None:
    async def play() -> None:
        bodies = Bodies(echo, 100, 60.0, 1000)
        asking = [asyncio.create_task(call(bodies, chunks=[b"x" * 100], ends=False)) for _ in range(ARRIVING)]
        while bodies._usual.at_once < 100 * ARRIVING:
            await asyncio.sleep(0)
        assert not any(each.done() for each in asking)
        with pytest.raises(Exception, match="too many large requests"):
            await call(bodies, chunks=[b"x"])
        assert bodies._usual.at_once == 100 * ARRIVING
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert bodies._usual.at_once == 0

    asyncio.run(asyncio.wait_for(play(), 60))


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({"authorization": "Bearer other", "x-api-key": "own"}, 200),
        ({"authorization": "Bearer own", "x-api-key": "other"}, 200),
        ({"authorization": "Basic own", "x-api-key": "own"}, 200),
        ({"authorization": "BEARER own "}, 200),
        ({"authorization": "Bearer other", "x-api-key": "another"}, 401),
    ],
)
def test_of_two_keys_one_that_fits_is_enough(headers: dict[str, str], wanted: int) -> None:
    assert asyncio.run(call(wrapped(echo, ServerConfig(api_key=("own",)))[0], headers=headers)).status == wanted


def test_an_address_with_a_slash_too_many_is_no_other_address() -> None:
    served = Application(make_frontend())
    for method, path in (("POST", "/v1/completions/"), ("GET", "/livez/")):
        assert served.send(method, path, {} if method == "POST" else None).status_code == 404


def test_a_log_goes_on_where_it_ended_and_is_no_others_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logger = logging.getLogger("sglcore.serving")
    before = [(each, each.level) for each in (logging.getLogger("sglcore"), logging.getLogger("uvicorn"))]
    try:
        for number in range(2):
            logs = Logs(ServerConfig(log_file=str(path), log_level="info"))
            logger.info("line \udcff%d", number)
            logger.debug("not asked for")
            assert not logging.getLogger("sglcore").propagate and not logging.getLogger("uvicorn").propagate
            logs.close()
            assert logging.getLogger("sglcore").propagate and logs.lost == 0
    finally:
        for each, level in before:
            each.setLevel(level)
    assert [text.partition("serving ")[2] for text in path.read_text().splitlines()] == [
        "line \\udcff0",
        "line \\udcff1",
    ]


@pytest.mark.parametrize(("level", "shown"), [("debug", True), ("info", False), ("warning", False), ("error", False)])
def test_the_http_librarys_own_lines_are_shown_with_those_for_debugging_alone(level: str, shown: bool) -> None:
    before = [(each, each.level) for each in (logging.getLogger("sglcore"), logging.getLogger("uvicorn"))]
    logs = Logs(ServerConfig(log_level=level))
    try:
        own = logging.getLogger("uvicorn")
        assert own.isEnabledFor(logging.DEBUG) is own.isEnabledFor(logging.INFO) is shown
        assert own.isEnabledFor(logging.WARNING) is (level != "error") and own.isEnabledFor(logging.ERROR)
        assert logging.getLogger("sglcore").isEnabledFor(logging.INFO) is (level in ("debug", "info"))
    finally:
        logs.close()
        for each, number in before:
            each.setLevel(number)


def test_a_batch_asks_its_own_server_under_the_id_of_its_line() -> None:
    from sglcore.serving.http.internal_requests import ask

    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(SimpleNamespace(**scope))
        message = await receive()
        await send({"type": "http.response.start", "status": 207, "headers": []})
        for part in (message["body"], b"!"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    assert asyncio.run(ask(app, "/v1/completions", b'{"a":1}', "mine")) == (207, b'{"a":1}!')
    (scope,) = seen
    assert (scope.method, scope.path, scope.state) == ("POST", "/v1/completions", {"request_id": "mine"})
    assert dict(scope.headers) == {b"content-type": b"application/json", b"content-length": b"7"}
