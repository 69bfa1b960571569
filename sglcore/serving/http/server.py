"""One server from start to end: it listens before the model is loaded, and completes open requests
when a signal tells it to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.engine.disaggregation.disaggregation_start import options_of, settled
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.http.connection import Bounds, Connection
from sglcore.serving.http.http_app import running_app
from sglcore.serving.http.logs import Logs
from sglcore.serving.http.middleware import with_middleware
from sglcore.serving.http.opentelemetry_spans import spans_of
from sglcore.serving.replicas.metrics.server_metrics import Metrics

UNANSWERED = 1
"""The exit code of a stop that left requests unanswered."""
LAST_WORDS = 2.0
"""Seconds for the last answers after the engine has ended, or after the drain timeout."""
_SPARE_FILES = 256
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

OnListening = Callable[[ChatFrontend, str], None]

log = logging.getLogger("sglcore.serving")


async def serve(
    config: EngineConfig, server: ServerConfig, *, chosen: Sequence[str] = (), on_listening: OnListening | None = None
) -> int:
    """Run a server until a signal tells it to stop or the model cannot be served any more, and
    return the exit code: 0, UNANSWERED if requests were cut off, or the engine's. Waits.

    `chosen`: the device of each replica, encoded. `on_listening` gets the frontend and the URL once
    connections are accepted, before the model is loaded. Raises ConfigError for what prevents a
    start: a port in use, no checkpoint, no tokenizer.
    """
    config = settled(config, options_of(server))
    tls = tls_of(server)
    sockets = bind(server)
    frontend = ChatFrontend(config, server, chosen=chosen)
    traces = spans_of(server, frontend.names[0])
    logs = Logs(server)
    frontend.metrics.lost_log_records = lambda: logs.lost
    frontend.metrics.lost_spans = lambda: 0 if traces is None else traces.lost
    try:
        async with running_app(frontend) as app:
            await frontend.start()
            clean = await run_server(
                with_middleware(app, frontend, traces),
                server,
                tls=tls,
                on_drain=frontend.drain,
                stopped=frontend.supervisor.stopped,
                sockets=sockets,
                on_listening=None if on_listening is None else lambda url: on_listening(frontend, url),
                metrics=frontend.metrics,
                on_overdue=frontend.give_up,
            )
    finally:
        await frontend.stop()
        if traces is not None:
            traces.close()
        logs.close()
    return frontend.supervisor.exit_code or (0 if clean else UNANSWERED)


def bind(config: ServerConfig) -> list[socket.socket]:
    """Return sockets on all addresses of the configured host, with one port; they do not listen
    yet. With port 0 a free one is chosen. Raises ConfigError, and leaves no socket open, if the
    host is unknown or the port is in use."""
    bound: list[socket.socket] = []
    port = config.port
    try:
        found = socket.getaddrinfo(config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            bound.append(_bound(family, (address[0], port, *address[2:])))
            port = bound[0].getsockname()[1]
    except OSError as error:
        for each in bound:
            each.close()
        reason = error.strerror or str(error)
        is_hosts = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = "choose another --host, an address of this machine" if is_hosts else "choose another --port"
        raise ConfigError(f"cannot listen at {config.host} port {port}: {reason}", remedy=remedy) from None
    return bound


def tls_of(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context of the server's connections; None: no TLS is configured. With
    `ssl_ca_certs` clients must have a certificate. Raises ConfigError for files that cannot be
    used."""
    if config.ssl_certfile is None:
        return None
    certificate = config.ssl_certfile
    try:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.ssl_ca_certs)
        # Without a password OpenSSL would ask for that of an encrypted key on the terminal.
        tls.load_cert_chain(certificate, config.ssl_keyfile, config.ssl_keyfile_password or "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile {certificate}, its key, or ssl_ca_certs cannot be used: {error}",
            wanted="PEM files: a certificate and its private key",
            remedy="correct ssl_certfile, ssl_keyfile, ssl_keyfile_password or ssl_ca_certs",
        ) from None
    if config.ssl_ca_certs is not None:
        tls.verify_mode = ssl.CERT_REQUIRED
    return tls


def address_of(sockets: Sequence[socket.socket], scheme: str = "http") -> str:
    """Return the URL by which this machine reaches the server at the first of these bound sockets;
    the wildcard addresses become localhost."""
    host, port = sockets[0].getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"{scheme}://[{host}]:{port}" if ":" in str(host) else f"{scheme}://{host}:{port}"


async def run_server(
    app: ASGIApp,
    config: ServerConfig,
    *,
    on_drain: Callable[[], Awaitable[None]],
    stopped: asyncio.Event,
    tls: ssl.SSLContext | None = None,
    sockets: Sequence[socket.socket] | None = None,
    on_listening: Callable[[str], None] | None = None,
    on_overdue: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
) -> bool:
    """Serve until a signal tells it to stop; returns whether every request in progress was
    answered.

    At the first SIGTERM or SIGINT, wait for `on_drain`, which should make the app refuse new
    requests, and for all requests in progress, at most `drain_timeout` seconds; then `on_overdue`
    may fail them, and 2 seconds are left for the answers. The second signal stops at once.
    `stopped`, set when the engine has ended, also leaves 2 seconds. `on_listening` gets the URL
    once connections are accepted. `tls` encrypts connections (None: no TLS); `sockets`: from `bind`
    (None: they are made here); `metrics` gets the number of connections. Call it on the main
    thread; on others, no signals are received.
    """
    sockets = list(sockets or bind(config))
    server = _Server(uvicorn_config(app, config), tls)
    if metrics is not None:
        metrics.connections = lambda: len(server.server_state.connections)
    told, again = asyncio.Event(), asyncio.Event()
    with _signals(lambda: again.set() if told.is_set() else told.set()):
        async with _serving(server, sockets) as serving:
            if on_listening is not None:
                on_listening(address_of(sockets, "http" if tls is None else "https"))
            await _first(serving, told, stopped)
            if serving.done():
                return False
            if stopped.is_set():
                return await _idle(server, LAST_WORDS, again)
            is_clean = await _drained(server, config.drain_timeout, on_drain, again, stopped)
            if not is_clean and on_overdue is not None and not again.is_set():
                on_overdue()
                await _idle(server, LAST_WORDS, again)
            return is_clean


class _Server(uvicorn.Server):
    """A uvicorn server that does not handle signals, and sets the event `listens` when it listens.
    `leave` ends it."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        config.load()
        config.ssl = tls
        super().__init__(config)
        self.listens = asyncio.Event()
        self._leaves = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals. Overrides uvicorn's method."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then set `listens`. Overrides uvicorn's method."""
        await super().startup(sockets)
        self.listens.set()

    async def main_loop(self) -> None:
        """Update the date in headers each second, until `leave`. Overrides uvicorn's method."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaves.wait(), 1.0)

    def leave(self) -> None:
        """Make `main_loop` end, so that the server shuts down; does not wait."""
        self.should_exit = True
        self._leaves.set()


def uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's configuration: our `Connection` with its limits, without uvicorn's signals,
    lifespan and logs. Increases this process's limit of open files if possible; if not, allows
    fewer connections and logs a warning."""
    most = min(config.max_connections, _file_limit(config.max_connections + _SPARE_FILES) - _SPARE_FILES)
    if most < config.max_connections:
        log.warning("the file limit of this process allows at most %d connections; raise `ulimit -n`", most)
    bounds = Bounds(max(most, 1), config.max_header_bytes, config.header_timeout, config.write_timeout)
    protocol: Any = partial(Connection, bounds=bounds)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=config.keep_alive,  # pyright: ignore[reportArgumentType]
        timeout_graceful_shutdown=1,
    )


@contextlib.asynccontextmanager
async def _serving(server: _Server, sockets: list[socket.socket]) -> AsyncIterator[asyncio.Task[None]]:
    """Run the server inside the context, which begins when it listens and yields its task;
    afterwards none of its tasks and connections are left. Raises the error of a server that ends
    before it listens."""
    serving = asyncio.create_task(server.serve(sockets))
    await _first(serving, server.listens)
    try:
        yield serving
    finally:
        tasks = list(server.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        server.leave()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await serving
        for connection in list(server.server_state.connections):
            connection.transport.abort()


async def _drained(
    server: _Server,
    seconds: float,
    on_drain: Callable[[], Awaitable[None]],
    again: asyncio.Event,
    stopped: asyncio.Event,
) -> bool:
    log.info("draining: %d requests in flight have %g s", len(server.server_state.tasks), seconds)
    draining = asyncio.ensure_future(on_drain())
    is_clean = await _idle(server, seconds, again, stopped, draining)
    if not draining.done():
        draining.cancel()
    failed = (await asyncio.gather(draining, return_exceptions=True))[0]
    if isinstance(failed, Exception):
        log.error("draining failed: %s", failed, exc_info=failed)
    is_clean = is_clean and failed is None
    if not is_clean:
        log.warning("stopping with %d requests in flight", len(server.server_state.tasks))
    return is_clean


async def _idle(
    server: _Server, seconds: float, again: asyncio.Event, *others: asyncio.Event | asyncio.Future[Any]
) -> bool:
    """Wait until no request is in progress and the futures in `others` are done, and return True;
    return False after `seconds`, or when `again` or an event in `others` is set."""
    events = [again, *(each for each in others if isinstance(each, asyncio.Event))]
    futures = [each for each in others if isinstance(each, asyncio.Future)]
    deadline = asyncio.get_running_loop().time() + seconds
    while server.server_state.tasks or not all(each.done() for each in futures):
        if any(event.is_set() for event in events) or asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def _first(serving: asyncio.Task[None], *events: asyncio.Event) -> None:
    """Wait until one of the events is set or the task `serving` has ended; which one is not
    returned. Raises the error that ended the task."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    done, _ = await asyncio.wait([serving, *waits], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if serving in done:
        serving.result()


@contextlib.contextmanager
def _signals(told: Callable[[], None]) -> Iterator[None]:
    """Call `told` for each SIGTERM and SIGINT inside the context, on the event loop. Does nothing
    on other threads than the main thread, which alone receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for each in _SIGNALS:
        loop.add_signal_handler(each, told)
    try:
        yield
    finally:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    each = socket.socket(family, socket.SOCK_STREAM)
    try:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        each.bind(address)
    except OSError:
        each.close()
        raise
    each.set_inheritable(False)
    return each


def _file_limit(wanted: int) -> int:
    """Increase this process's limit of open files to `wanted` if it is lower and that is possible;
    returns the limit that holds then (`wanted` if there is none)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    best = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < best:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else soft
