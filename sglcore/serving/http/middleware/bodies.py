"""Request bodies: taken whole before the app runs, within a size, a time, and a sum over all that are arriving."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiEvent

from sglcore.serving.http.middleware.refusal import body_length, has_body, header, refuse
from sglcore.serving.replicas.errors import INVALID, Failure
from sglcore.serving.replicas.metrics import Metrics

ARRIVING = 32
"""So many bodies of the greatest size may be arriving at once; beyond that, requests are told to come again."""


class Bodies:
    """Hands the app a body that is complete."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float, metrics: Metrics) -> None:
        """`max_bytes` of a body, which has to arrive in `seconds`."""
        self._app, self._max_bytes, self._seconds, self._metrics = app, max_bytes, seconds, metrics
        self._arriving = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses with 413 (too large), 408 (too slow), 415 (compressed) or 429 (too many at once)."""
        if scope["type"] != "http" or not has_body(scope):
            return await self._app(scope, receive, send)
        body = self._refused_at_once(scope) or await self._read(receive)
        if body is None:
            return
        if isinstance(body, Failure):
            self._metrics.refused(body.code or "")
            return await refuse(body, scope, receive, send)
        await self._app(scope, _once(body, receive), send)

    def _refused_at_once(self, scope: Scope) -> Failure | None:
        encoding = (header(scope, b"content-encoding") or b"identity").decode("latin-1")
        if encoding.lower() != "identity":
            message = f"the body's content-encoding is {encoding!r}; send it as it is, without compression"
            return Failure(415, message, INVALID, None, "unsupported_encoding")
        length = body_length(scope)
        return self._too_large(f"{length} bytes") if length is not None and length > self._max_bytes else None

    def _too_large(self, found: str) -> Failure:
        message = (
            f"the request has {found}, where {self._max_bytes} are the most; "
            "send less at once, or start the server with a greater --max-request-bytes"
        )
        return Failure(413, message, INVALID, None, "request_too_large")

    async def _read(self, receive: Receive) -> bytes | Failure | None:
        """The body, why there is none, or None if the client left."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                return await self._collect(body, receive)
        except TimeoutError:
            message = f"{len(body)} bytes of the body arrived in {self._seconds:g} s, and not its end; send it faster"
            return Failure(408, message, INVALID, None, "request_timeout")
        finally:
            self._arriving -= len(body)

    async def _collect(self, body: bytearray, receive: Receive) -> bytes | Failure | None:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunk = message.get("body", b"")
            body += chunk
            self._arriving += len(chunk)
            if len(body) > self._max_bytes:
                return self._too_large(f"more than {self._max_bytes} bytes")
            if self._arriving > ARRIVING * self._max_bytes:
                text = "too many large requests are arriving at once; try again later"
                return Failure(429, text, "rate_limit_error", None, "overloaded", {"retry-after": "1"})
            if not message.get("more_body", False):
                return bytes(body)


def _once(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body first, and then what the connection says."""
    waiting = [body]

    async def inward() -> AsgiEvent:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return inward
