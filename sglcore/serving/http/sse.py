"""Answers that stream, and answers that wait: both end when the client goes, and what they waited for with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglcore.serving.replicas.errors import told

DONE = b"data: [DONE]\n\n"
_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))

encode = msgspec.json.Encoder().encode
"""UTF-8 JSON of plain values."""


def event(value: Any) -> bytes:
    """One server-sent event with a JSON value."""
    return b"data: " + encode(value) + b"\n\n"


def error_event(error: Exception) -> bytes:
    """The last event of a stream that can not go on, in OpenAI's schema."""
    return event(told(error).openai())


class EventStream(Response):
    """An answer made of chunks as they come. When the client goes, the generator is closed.

    The status is sent with the first chunk: what is refused before it is an answer like any other, what goes wrong
    after it is one more event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        held: AbstractAsyncContextManager[Any],
        *,
        headers: Mapping[str, str] | None = None,
        on_error: Callable[[Exception], bytes] = error_event,
    ) -> None:
        """`chunks` are whole events. `held` is left when the answer has ended, however it ends."""
        self.chunks = chunks
        self.held = held
        self.on_error = on_error
        self.status_code = 200
        self.background = None
        self.body = b""
        extra = ((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items())
        self.raw_headers = [*_HEADERS, *extra]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all chunks, or stop when the client is gone. Waits for the client to take them."""
        async with self.held:
            await first_to_end(self._send_all(send), disconnected(receive))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self.chunks) as chunks:
            first = await anext(chunks, b"")
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                await send({"type": "http.response.body", "body": self.on_error(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer that `work` makes; if the client goes first, `work` is cancelled and nobody reads the answer."""
    found = await first_to_end(work, disconnected(request.receive))
    return found if found is not None else Response(status_code=499)
