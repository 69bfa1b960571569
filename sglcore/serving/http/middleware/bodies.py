"""Request bodies: read whole before the app runs, within a size, a time, and a limit on the sum of
all bodies that are arriving."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiEvent

from sglcore.serving.http.middleware.refusal import TurnedAway, body_length, has_body, header

ARRIVING, ARRIVING_FILES = 32, 2
"""All bodies that are arriving have together at most the bytes of ARRIVING bodies of maximum size;
above that, requests are refused for now (429). ARRIVING_FILES is the same for uploaded files, which
count until they are answered."""
FILES = "/v1/files"
FORM_BYTES = 64 << 10
"""Bytes that an upload's form may have in addition to its file."""


@dataclass(slots=True)
class Limit:
    """The limits of one kind of body, and what counts for them. `most`: maximum bytes of one body;
    `flag`: the flag that sets it, for errors; `most_at_once`: maximum sum of bytes of all bodies;
    `at_once`: the present sum."""

    most: int
    flag: str
    most_at_once: int
    at_once: int = 0


@dataclass(slots=True)
class Arriving:
    """A body in memory. `count`: its bytes so far, which count for its limit until `let_go`."""

    limit: Limit
    count: int = 0

    def add(self, count: int) -> None:
        """Count `count` more bytes, also if it raises. Raises TurnedAway if the body is above
        `most` (413), or all bodies together above `most_at_once` (429)."""
        self.count += count
        self.limit.at_once += count
        if self.count > self.limit.most:
            raise too_large(f"more than {self.limit.most} bytes", self.limit)
        if self.limit.at_once > self.limit.most_at_once:
            text = "too many large requests are arriving at once; try again later"
            raise TurnedAway(429, text, "overloaded", {"retry-after": "1"})

    def let_go(self) -> None:
        """Subtract the body from the sum of its limit, because it has left memory or is complete
        and counted elsewhere.

        Idempotent.
        """
        self.limit.at_once -= self.count
        self.count = 0


class Bodies:
    """ASGI middleware that reads a body before it runs the app, so that the app gets it whole, as
    its first event. A request without a body is passed on at once."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float, max_file_bytes: int) -> None:
        """A body may have `max_bytes` and take `seconds` to arrive; the body of an upload (FILES)
        may have `max_file_bytes` for its file, and take `seconds` for each `max_bytes` of it."""
        self._app, self._seconds, self._step = app, seconds, max_bytes
        self._usual = Limit(max_bytes, "--max-request-bytes", ARRIVING * max_bytes)
        most = max_file_bytes + FORM_BYTES
        self._files = Limit(most, "--max-batch-file-bytes", ARRIVING_FILES * most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for one request; not at all if the client leaves before its body is complete.
        Raises TurnedAway: 413 (too large), 408 (too slow), 415 (compressed), 429 (too many at
        once)."""
        if not has_body(scope):
            return await self._app(scope, receive, send)
        limit = self._files if scope["path"] == FILES else self._usual
        _check(scope, limit)
        with _arriving(limit) as arriving:
            body = await self._read(arriving, receive)
            if limit is self._usual:
                arriving.let_go()
            if body is not None:
                inward = _once(body, receive)
                del body
                await self._app(scope, inward, send)

    async def _read(self, arriving: Arriving, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client disconnected. Raises TurnedAway: 408, 413 or
        429."""
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                return await self._collect(arriving, receive, deadline)
        except TimeoutError:
            seconds = self._seconds * (1 + arriving.count // self._step)
            message = f"{arriving.count} bytes of the body arrived in {seconds:g} s, and not its end; send it faster"
            raise TurnedAway(408, message, "request_timeout") from None

    async def _collect(self, arriving: Arriving, receive: Receive, deadline: asyncio.Timeout) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunk = message.get("body", b"")
            steps = (len(body) + len(chunk)) // self._step - len(body) // self._step
            arriving.add(len(chunk))
            body += chunk
            if not message.get("more_body", False):
                return bytes(body)
            if steps:
                deadline.reschedule((deadline.when() or 0.0) + steps * self._seconds)


@contextmanager
def _arriving(limit: Limit) -> Iterator[Arriving]:
    arriving = Arriving(limit)
    try:
        yield arriving
    finally:
        arriving.let_go()


def too_large(found: str, limit: Limit) -> TurnedAway:
    """Return (not raise) the error 413 for a body; `found`: its size, such as "5 bytes"."""
    message = (
        f"the request has {found}, and at most {limit.most} are allowed; "
        f"send less at once, or start the server with a greater {limit.flag}"
    )
    return TurnedAway(413, message, "request_too_large")


def _check(scope: Scope, limit: Limit) -> None:
    encoding = (header(scope, b"content-encoding") or b"identity").decode("latin-1")
    if encoding.lower() != "identity":
        message = f"the body's content-encoding is {encoding!r}; send it as it is, without compression"
        raise TurnedAway(415, message, "unsupported_encoding")
    length = body_length(scope)
    if length is not None and length > limit.most:
        raise too_large(f"{length} bytes", limit)


def _once(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive function that returns the whole body first, and then what `receive`
    returns."""
    waiting = [body]

    async def inward() -> AsgiEvent:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return inward
