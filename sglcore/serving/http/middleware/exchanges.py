"""The outermost middleware but one: gives each request an id, and counts, logs and traces its
end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiEvent

from sglcore.serving.http.connection import ANSWERING
from sglcore.serving.http.middleware.refusal import header
from sglcore.serving.http.tracing import Answered, Spans
from sglcore.serving.replicas.metrics.server_metrics import CALLER, CLOCKS, Metrics, RequestClock

QUIET = frozenset({"/livez", "/readyz", "/startupz", "/health", "/metrics", "/server_info/stats"})
"""Paths that machines request so often that their log lines have level debug, and no spans."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""HTTP methods that are counted by name.

A client can invent others, and each would be a metric series that stays.
"""
GONE = 499
"""The status that is logged and counted if the client disconnected before the answer began."""
_ID = re.compile(rb"[A-Za-z0-9._:+=/-]{1,128}")


@dataclass(slots=True)
class Exchange:
    """Facts about a request and its answer, never their content; they are set while it is answered.
    `path`: this server's own path; `client`: the address, "-" if it is not known; `started`: by
    `time.perf_counter`; `status` 0: no answer has begun; `clocks`: one for each prompt that was
    sent to an engine."""

    request_id: str
    method: str
    path: str
    client: str = "-"
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    clocks: list[RequestClock] = field(default_factory=list)

    def elapsed(self) -> float:
        """Return the seconds since the request arrived; they go on after its end."""
        return time.perf_counter() - self.started


class Exchanges:
    """ASGI middleware that gives each request an id and counts it; at the end of each, it writes
    the request's log line (level info) and records its trace span. Paths in QUIET have level debug
    and no span."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: logging.Logger, traces: Spans | None = None) -> None:
        """`log` gets one line for each request, `traces` (None: off) one span."""
        self._app, self._metrics, self._log, self._traces = app, metrics, log, traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for one request, and cancel it when the connection ends. The request's id is
        its header x-request-id, if that is a valid id, else a new one; the answer has it in the
        headers x-request-id and request-id."""
        exchange = _exchange(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = exchange.request_id
        # Clients of Anthropic read the second one.
        ids = [(name, exchange.request_id.encode()) for name in (b"x-request-id", b"request-id")]

        async def outward(message: AsgiEvent) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        token, caller = CLOCKS.set(exchange.clocks), CALLER.set(exchange.request_id)
        self._metrics.in_flight += 1
        try:
            with _while_connected(exchange, state.get(ANSWERING, set())):
                await self._app(scope, receive, outward)
        finally:
            self._metrics.in_flight -= 1
            CLOCKS.reset(token)
            CALLER.reset(caller)
            self._note(exchange, scope)

    def _note(self, exchange: Exchange, scope: Scope) -> None:
        method = exchange.method if exchange.method in METHODS else "other"
        endpoint = _endpoint(scope)
        self._metrics.responded(method, endpoint, exchange.status)
        if self._traces is not None and exchange.path not in QUIET:
            self._traces.record(
                Answered(
                    method,
                    endpoint,
                    exchange.path,
                    exchange.request_id,
                    exchange.status,
                    exchange.elapsed(),
                    exchange.clocks,
                ),
                header(scope, b"traceparent"),
            )
        level = logging.DEBUG if exchange.path in QUIET else logging.INFO
        if self._log.isEnabledFor(level):
            self._log.log(level, "%s", line(exchange))


@contextmanager
def _while_connected(exchange: Exchange, answering: set[asyncio.Task[Any]]) -> Iterator[None]:
    """Cancel the block when the connection ends, without raising anything; the exchange then has
    the status GONE, if no answer had begun. Other cancellations are raised. `answering`: the
    connection's set of tasks (ANSWERING), which then has lost this task."""
    task = asyncio.current_task()
    assert task is not None
    answering.add(task)
    try:
        yield
    except asyncio.CancelledError:
        if task in answering:
            raise
        task.uncancel()
        exchange.status = exchange.status or GONE
    finally:
        answering.discard(task)


def line(exchange: Exchange) -> str:
    """Return the log line of a request that has ended: `id=... client=... METHOD "PATH" status=...
    ms=...`, and token counts for prompts that were run."""
    elapsed = _milliseconds(exchange.elapsed())
    words = [f"id={exchange.request_id}", f"client={exchange.client}", exchange.method, json.dumps(exchange.path)]
    words += [f"status={exchange.status}", f"ms={elapsed}"]
    clocks = [clock for clock in exchange.clocks if clock.outcome is not None]
    if clocks:
        words.append(f"prompt_tokens={sum(clock.prompt_tokens for clock in clocks)}")
        words.append(f"cached_tokens={sum(clock.cached_tokens for clock in clocks)}")
        words.append(f"tokens={sum(clock.tokens for clock in clocks)}")
        first = [clock.first_token_seconds for clock in clocks if clock.first_token_seconds is not None]
        words.append(f"first_token_ms={_milliseconds(min(first)) if first else '-'}")
        words.append(f"ended={','.join(sorted({clock.outcome or '' for clock in clocks}))}")
    return " ".join(words)


def _exchange(scope: Scope) -> Exchange:
    given = header(scope, b"x-request-id")
    is_id = given is not None and _ID.fullmatch(given)
    request_id = given.decode() if given is not None and is_id else f"req_{uuid.uuid4().hex}"
    client = scope.get("client")
    return Exchange(request_id, scope["method"], scope["path"], client[0] if client else "-")


def _endpoint(scope: Scope) -> str:
    """Return the path of the route, with names of parameters, or "other" without a route, so that
    clients cannot create unlimited metric series."""
    route = scope.get("route")
    return route.path if route is not None else "other"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
