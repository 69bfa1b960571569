"""Answers that stream, and answers that wait: both end when the client goes, and what they waited for with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglcore.serving.apis.answer import Stream, warned

_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which readers of events skip."""


class EventStream(Response):
    """A `Stream` as it is sent. When the client goes, what makes the events is closed."""

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, keep_alive: float) -> None:
        """`keep_alive`: seconds without an event after which a comment is sent, for those who give up on silent streams."""
        self.stream = stream
        self.status_code = 200
        self.background = None
        self.body = b""
        told = warned(stream.warnings, stream.outputs)
        extra = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in told.items())
        self.raw_headers = [*_HEADERS, *extra]
        self._keep_alive = keep_alive
        self._has_begun = self._is_sending = False
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when the client is gone. Waits for the client to take them."""
        async with self.stream.held:
            pinging = asyncio.ensure_future(self._ping(send))
            try:
                await first_to_end(self._send_all(send), disconnected(receive))
            finally:
                pinging.cancel()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self.stream.events) as events:
            try:
                async for event in events:
                    await self._send(send, event)
            except Exception as error:
                if not self._has_begun:
                    raise
                await self._send(send, self.stream.on_error(error))
        await self._send(send, b"", is_last=True)

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        self._is_sending = True
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self._sent_at, self._is_sending = time.monotonic(), False

    async def _ping(self, send: Send) -> None:
        """A comment whenever nothing was sent for a while; it begins the answer, if nothing has."""
        while True:
            rest = self._sent_at + self._keep_alive - time.monotonic()
            if rest > 0 or self._is_sending:
                await asyncio.sleep(max(rest, self._keep_alive / 4))
            else:
                await self._send(send, KEEP_ALIVE)


async def disconnected(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_to_end(work: Coroutine[Any, Any, Any], limit: Coroutine[Any, Any, None]) -> Any:
    """The result of `work`, or None if `limit` ends first; the other one is cancelled, and waited for."""
    working, limiting = asyncio.ensure_future(work), asyncio.ensure_future(limit)
    try:
        await asyncio.wait((working, limiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, limiting):
            task.cancel()
        for task in (working, limiting):
            with suppress(asyncio.CancelledError, Exception):
                await task


async def while_connected(request: Request, work: Coroutine[Any, Any, Response | Stream]) -> Response | Stream:
    """The answer that `work` makes; if the client goes first, `work` is cancelled and nobody reads the answer."""
    found = await first_to_end(work, disconnected(request.receive))
    return found if found is not None else Response(status_code=499)
