"""Request bodies: taken whole before the app runs, within a size, a time, and a sum over all that are arriving."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiEvent

from sglcore.serving.http.middleware.refusal import TurnedAway, body_length, has_body, header

ARRIVING = 32
"""So many bodies of the greatest size may be arriving at once; beyond that, requests are told to come again."""


class Bodies:
    """Hands the app a body that is complete."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        """`max_bytes` of a body, which has to arrive in `seconds`."""
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds
        self._arriving = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises TurnedAway: 413 (too large), 408 (too slow), 415 (compressed), 429 (too many at once)."""
        if not has_body(scope):
            return await self._app(scope, receive, send)
        self._check(scope)
        body = await self._read(receive)
        if body is not None:
            await self._app(scope, _once(body, receive), send)

    def _check(self, scope: Scope) -> None:
        encoding = (header(scope, b"content-encoding") or b"identity").decode("latin-1")
        if encoding.lower() != "identity":
            message = f"the body's content-encoding is {encoding!r}; send it as it is, without compression"
            raise TurnedAway(415, message, "unsupported_encoding")
        length = body_length(scope)
        if length is not None and length > self._max_bytes:
            raise self._too_large(f"{length} bytes")

    def _too_large(self, found: str) -> TurnedAway:
        message = (
            f"the request has {found}, where {self._max_bytes} are the most; "
            "send less at once, or start the server with a greater --max-request-bytes"
        )
        return TurnedAway(413, message, "request_too_large")

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if the client left."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                return await self._collect(body, receive)
        except TimeoutError:
            message = f"{len(body)} bytes of the body arrived in {self._seconds:g} s, and not its end; send it faster"
            raise TurnedAway(408, message, "request_timeout") from None
        finally:
            self._arriving -= len(body)

    async def _collect(self, body: bytearray, receive: Receive) -> bytes | None:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunk = message.get("body", b"")
            body += chunk
            self._arriving += len(chunk)
            if len(body) > self._max_bytes:
                raise self._too_large(f"more than {self._max_bytes} bytes")
            if self._arriving > ARRIVING * self._max_bytes:
                text = "too many large requests are arriving at once; try again later"
                raise TurnedAway(429, text, "overloaded", {"retry-after": "1"})
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
