"""Sends a `Stream` as an HTTP response, with keep-alives."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglcore.serving.apis.answer import Stream, warned


class EventStream(Response):
    """The HTTP response that sends the events of a `Stream`; it is used once."""

    def __init__(self, stream: Stream, keep_alive: float) -> None:
        """`keep_alive`: seconds without an event after which the bytes `stream.form.keep_alive` are
        sent."""
        self.stream = stream
        self.media_type = stream.form.media_type
        self.status_code = 200
        self.background = None
        self.body = b""
        told = {"content-type": stream.form.media_type, "cache-control": "no-cache"}
        told |= warned(stream.warnings, stream.outputs)
        self.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told.items()]
        self._keep_alive = keep_alive
        self._has_begun = self._is_sending = False
        self._sent_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, at the speed of the client, inside the stream's context `held`. An error
        before anything was sent is raised; a later one is sent as the last event. If this is
        cancelled, the generator of the events is closed."""
        async with self.stream.held:
            self._watch(send, self._keep_alive)
            try:
                await self._send_all(send)
            finally:
                for each in (self._timer, self._ping):
                    if each is not None:
                        each.cancel()

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

    def _watch(self, send: Send, seconds: float) -> None:
        """Check in `seconds` whether a keep-alive is due, and again from then on; does not wait. A
        keep-alive also begins the answer if nothing was sent before."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look, send)

    def _look(self, send: Send) -> None:
        rest = self._sent_at + self._keep_alive - time.monotonic()
        if rest <= 0 and not self._is_sending:
            self._ping = asyncio.ensure_future(self._send(send, self.stream.form.keep_alive))
        self._watch(send, max(rest, self._keep_alive / 4))
