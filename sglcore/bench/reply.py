"""The client side of one streamed answer: `Reply` sends one HTTP/1.1 request and reads chunked
bodies and server-sent events.

It records when text arrived and parses as little as possible, so that the client does not limit the
measurement.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglcore.bench.address import refusal

NULLS = (b'"usage":null', b'"usage": null')


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request failed: `kind`, by which failures are counted, such as "timeout" or "status
    503", and `said`, the message."""

    kind: str
    said: str


class Reply(asyncio.Protocol):
    """An asyncio protocol that sends one request when it is connected, and reads the streamed
    answer.

    `request` is the HTTP request, and `clock` returns the time in seconds. `ended` is done when the
    answer is complete or the connection is lost. `marks` has the times at which text arrived so
    far, and `usage` the server's token counts ({} if it sent none). When `ended` is done, `fault`
    is None for a complete answer. `status` is the HTTP status, or 0 before the response began.
    """

    def __init__(self, request: bytes, clock: Callable[[], float], loop: asyncio.AbstractEventLoop) -> None:
        self.marks: list[float] = []
        self.usage: dict[str, Any] = {}
        self.fault: Fault | None = None
        self.status = 0
        self.ended: asyncio.Future[None] = loop.create_future()
        self._request = request
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._body: Chunked | Plain | None = None
        self._rest = b""
        self._is_done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request; asyncio calls it once the connection is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Read received bytes of the response: record in `marks` when text arrived, and complete
        `ended` at the end of the body."""
        now = self._clock()
        if self._body is None:
            self._rest += data
            head, end, data = self._rest.partition(b"\r\n\r\n")
            if not end:
                return
            self._rest = b""
            self._begin(head)
        assert self._body is not None
        content = self._body.push(data)
        if self.status == 200:
            self._take(content, now)
        else:
            self._rest += content
        if self._body.is_complete:
            self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer; asyncio calls it. Without a length or chunks, this is the regular end of
        a body; otherwise it is a fault, unless the answer had ended already."""
        self._end("" if isinstance(self._body, Plain) and self._body.length is None else "connection lost")

    def close(self) -> None:
        """Close the connection at once, without waiting, so that the server aborts the request;
        without a connection it does nothing."""
        if self._transport is not None:
            self._transport.abort()

    def _begin(self, head: bytes) -> None:
        first, _, fields = head.partition(b"\r\n")
        self.status = int(first.split(b" ", 2)[1])
        named: dict[bytes, bytes] = {}
        for line in fields.lower().split(b"\r\n"):
            name, _, value = line.partition(b":")
            named[name] = value.strip()
        length = named.get(b"content-length")
        is_chunked = named.get(b"transfer-encoding") == b"chunked"
        self._body = Chunked() if is_chunked else Plain(None if length is None else int(length))

    def _take(self, content: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._is_done = True
            return
        if b'"error"' in payload and self._is_failure(payload):
            return
        if b'"text":' in payload and (b'"text":""' not in payload or b'"finish_reason":null' in payload):
            self.marks.append(now)
        if b'"usage"' in payload and not any(null in payload for null in NULLS):
            self.usage = json.loads(payload).get("usage") or {}

    def _is_failure(self, payload: bytes) -> bool:
        """Return whether an event (its JSON text) is an error, and record the first one in `fault`.
        An "error" elsewhere in the event does not count."""
        is_failure = bool(json.loads(payload).get("error"))
        if is_failure:
            self.fault = self.fault or Fault("error in the stream", refusal(payload))
        return is_failure

    def _end(self, lost: str) -> None:
        if self.ended.done():
            return
        if self.status not in (0, 200):
            self.fault = Fault(f"status {self.status}", refusal(self._rest))
        elif self.fault is None and not self._is_done:
            self.fault = Fault(lost or "no [DONE]", "the stream ended before the answer did")
        self.ended.set_result(None)
        self.close()


class Chunked:
    """Decoder of a chunked HTTP body, fed with `push`. `is_complete` is True after the last chunk,
    of length 0."""

    __slots__ = ("_left", "_rest", "is_complete")

    def __init__(self) -> None:
        self.is_complete = False
        self._rest = b""
        self._left = 0

    def push(self, data: bytes) -> bytes:
        """Return the content in received bytes, without the chunk headers. Bytes of an incomplete
        header are kept for the next call."""
        data = self._rest + data
        found: list[bytes] = []
        while not self.is_complete:
            if self._left > 2:
                part = data[: self._left - 2]
                found.append(part)
                self._left -= len(part)
                data = data[len(part) :]
                if self._left > 2:
                    break
            if len(data) < self._left:
                break
            data, self._left = data[self._left :], 0
            size, end, after = data.partition(b"\r\n")
            if not end:
                break
            length = int(size.partition(b";")[0], 16)
            data, self._left, self.is_complete = after, length + 2, length == 0
        self._rest = data
        return b"".join(found)


class Plain:
    """Decoder of an HTTP body that is not chunked, fed with `push`. `length` is in bytes; None if
    the body ends with the connection."""

    __slots__ = ("_seen", "length")

    def __init__(self, length: int | None) -> None:
        self.length = length
        self._seen = 0

    @property
    def is_complete(self) -> bool:
        """Whether the whole body has arrived. Always False without a length."""
        return self.length is not None and self._seen >= self.length

    def push(self, data: bytes) -> bytes:
        """Return the received bytes unchanged, and count them for `is_complete`."""
        self._seen += len(data)
        return data
