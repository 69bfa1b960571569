"""An app without a model inside the middleware, for tests of the middleware and of connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiEvent

from sglcore.config.server_config import ServerConfig
from sglcore.serving.http.middleware import with_middleware
from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.metrics.server_metrics import Metrics


@dataclass
class StillFrontend:
    """The parts of a frontend that the middleware uses."""

    config: ServerConfig
    numbers: EngineStats = field(default_factory=EngineStats)

    def __post_init__(self) -> None:
        self.metrics = Metrics("tiny", "1.2.3", lambda: [("0", "ready", self.numbers)])

    def stats(self) -> EngineStats:
        return self.numbers


def wrapped(app: ASGIApp, config: ServerConfig, numbers: EngineStats | None = None) -> tuple[ASGIApp, StillFrontend]:
    """The app inside all middleware."""
    frontend = StillFrontend(config, numbers or EngineStats())
    return with_middleware(app, cast(Any, frontend)), frontend


@dataclass
class Answered:
    """The messages that an app sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    sent: list[AsgiEvent] = field(default_factory=list)

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body."""
    length = 0
    while True:
        message = await receive()
        length += len(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body = str(length).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


async def call(
    app: ASGIApp,
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    chunks: Sequence[bytes] = (),
    ends: bool = True,
    asked_again: Exception | None = None,
    pause: float = 0.0,
) -> Answered:
    """Send one request. `ends` False: the body never ends, and no more of it arrives.
    `asked_again`: raised if the app receives again after the body's end. `pause`: seconds before
    each part of the body."""
    named = {"host": "localhost", **(headers or {})}
    if chunks and "content-length" not in named:
        named["transfer-encoding"] = "chunked"
    waiting = list(chunks)
    answered = Answered()

    async def receive() -> AsgiEvent:
        if not waiting and not ends:
            await asyncio.Event().wait()
        if not waiting and asked_again is not None:
            raise asked_again
        if pause:
            await asyncio.sleep(pause)
        body = waiting.pop(0) if waiting else b""
        return {"type": "http.request", "body": body, "more_body": bool(waiting) or not ends}

    async def send(message: AsgiEvent) -> None:
        answered.sent.append(message)
        if message["type"] == "http.response.start":
            answered.status = message["status"]
            answered.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        answered.body += message.get("body", b"")

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 5),
    }
    await app(scope, receive, send)
    return answered
