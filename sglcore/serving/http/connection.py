"""The asyncio protocol of a client's connection: a request head must arrive in time and within a
size, and the client must read answers in time.

The parser is httptools, which is compiled.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sglcore.serving.apis.answer import encode, error_body
from sglcore.serving.replicas.server_errors import INVALID, Failure


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits: number of open connections of the server, bytes of a request's head, seconds for a
    head to arrive, and seconds that a full send buffer may take to drain before the connection is
    closed."""

    connections: int
    head_bytes: int
    head_seconds: float
    write_seconds: float


LINGER_SECONDS = 1.0
"""Seconds for which a refused client may continue to send, unread, so that it can read the
answer."""
MOST_REFUSED = 128
"""Maximum number of connections above the limit that get an answer; further ones are closed at
once."""
ANSWERING = "answering"
"""Key in a request's `state`: the set of tasks that make its answer, which are cancelled and
removed when the connection ends."""
OPEN_ENDED = "open-ended"
"""Key in a request's `state`: uvicorn's cycle of a request by HTTP/1.0, which does not support
chunked transfer.

The end of its connection marks the end of an answer of unknown length.
"""
MALFORMED = Failure(400, "what arrived is not a valid HTTP/1.1 request", INVALID, None, "malformed_request")
BAD_CHUNK = Failure(400, "the body of the request is not in valid chunks", INVALID, None, "malformed_request")


class Refused(Exception):
    """Raised in a callback of httptools' parser to stop it, for a head that is too large or names
    an unsupported transfer encoding; the connection then sends its answer."""


class Connection(HttpToolsProtocol):
    """The asyncio protocol of one client's connection: uvicorn's, with the limits of `bounds`. A
    request beyond them gets an error answer where that is still possible, and the connection is
    closed. Trailers are dropped, because nothing reads them."""

    def __init__(self, *, bounds: Bounds, **given: Any) -> None:
        """`given`: the keyword arguments that uvicorn passes to a protocol."""
        super().__init__(**given)
        self.app = Unchunked(self.app)
        self.bounds = bounds
        self._failure = MALFORMED
        self._is_refused = self._in_head = False
        self._head_bytes = 0
        self._answering: set[asyncio.Task[Any]] = set()
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Refuse a connection above the limit, with status 503, or far above it without an answer;
        otherwise start the time limit of the first head. Overrides asyncio's callback."""
        super().connection_made(transport)
        excess = len(self.connections) - self.bounds.connections
        if excess > MOST_REFUSED:
            return self.transport.abort()
        if excess > 0:
            found = f"{self.bounds.connections} connections are open, and no more are allowed; try again later"
            return self._close_with(Failure(503, found, "unavailable_error", None, "overloaded", {"retry-after": "1"}))
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers and the tasks that make an answer. Overrides asyncio's callback."""
        self._stop_answering()
        self._head_timer = _cancelled(self._head_timer)
        self._write_timer = _cancelled(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass the data to the parser, and refuse (431) a head that is incomplete and too large.
        Data after a refusal is dropped. Overrides asyncio's callback."""
        if self._is_refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_refused:
            return
        if not self._awaits_head():
            self._head_bytes = 0
            self._head_timer = _cancelled(self._head_timer)
            return
        self._head_bytes += len(data)
        if self._head_bytes > self.bounds.head_bytes:
            return self._close_with(self._too_large())
        if self._head_timer is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        """Note that a head begins, and share the set ANSWERING with the request. Overrides the
        parser's callback."""
        self._in_head = True
        super().on_message_begin()
        self.scope["state"][ANSWERING] = self._answering  # pyright: ignore[reportTypedDictNotRequiredAccess]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; drop a trailer. Overrides the parser's callback."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the size (else 431) and the transfer encoding (else 501) of the complete head, and
        note a request by HTTP/1.0 for `Unchunked`. Raises Refused, which the parser raises again as
        its own error. Overrides the parser's callback."""
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.bounds.head_bytes:
            self._failure = self._too_large()
            raise Refused
        coding = b", ".join(value for name, value in self.headers if name == b"transfer-encoding").strip().lower()
        if coding not in (b"", b"chunked"):
            self._failure = _unknown_coding(coding)
            raise Refused
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.scope["state"][OPEN_ENDED] = self.cycle  # pyright: ignore[reportTypedDictNotRequiredAccess]

    def on_message_complete(self) -> None:
        """Continue reading after a complete request, unless another one is pipelined, so that the
        end of the connection is noticed. Overrides the parser's callback."""
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Start the time limit of a client that reads too slowly: at its end the connection is
        aborted. Overrides asyncio's callback."""
        super().pause_writing()
        self._expect_progress()

    def resume_writing(self) -> None:
        """Stop the time limit of a client that reads too slowly. Overrides asyncio's callback."""
        super().resume_writing()
        self._write_timer = _cancelled(self._write_timer)

    def on_response_complete(self) -> None:
        """Limit the time for the last bytes of a connection that is closing. Overrides uvicorn's
        method."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_progress()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long, within the time limit for its last bytes.
        Overrides uvicorn's method."""
        super().timeout_keep_alive_handler()
        self._expect_progress()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refused, with the failure in our schema (`msg` is not
        used), and close the connection. Overrides uvicorn's method.

        If a body breaks off before the answer has begun, the tasks that make the answer are
        cancelled.
        """
        if not self._awaits_head() and not self.pipeline and not self.cycle.response_started:
            self.cycle.disconnected = self.cycle.response_complete = True
            self._stop_answering()
            self._failure = BAD_CHUNK
        self._close_with(self._failure)

    def _stop_answering(self) -> None:
        while self._answering:
            self._answering.pop().cancel()

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._head_bytes == 0:
            return self.transport.close()
        found = f"the head of the request did not arrive in {self.bounds.head_seconds:g} s"
        self._close_with(Failure(408, found, INVALID, None, "request_timeout"))

    def _expect_progress(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.bounds.write_seconds, self.transport.abort)

    def _too_large(self) -> Failure:
        found = f"the head of the request has more than {self.bounds.head_bytes} bytes, the limit"
        return Failure(431, found, INVALID, None, "header_too_large")

    def _close_with(self, failure: Failure) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._head_timer = _cancelled(self._head_timer)
        if not self._awaits_head():
            return self.transport.close()
        self.transport.write(_message(failure))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)


class Unchunked:
    """ASGI middleware: an answer of unknown length to a client of HTTP/1.0 has no chunks and ends
    with the connection."""

    def __init__(self, app: ASGIApp) -> None:
        """`app`: the ASGI app to wrap."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for one request. Only answers to HTTP/1.0 without a content-length are
        changed."""
        cycle = scope.get("state", {}).pop(OPEN_ENDED, None)
        if cycle is None:
            return await self._app(scope, receive, send)
        is_open_ended = False

        async def outward(message: Message) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if is_open_ended else None
            elif is_open_ended:
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, outward)


def _unknown_coding(coding: bytes) -> Failure:
    found = (
        f"the request has the transfer encoding {coding.decode('latin-1')[:60]!r}; wanted chunked, or a content-length"
    )
    return Failure(501, found, INVALID, None, "unknown_transfer_encoding")


def _message(failure: Failure) -> bytes:
    body = encode(error_body(failure))
    lines = [f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in failure.headers.items()]
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
