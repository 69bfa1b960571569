"""Refuses a request in such a way that the client reads the reason even if it is still sending."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiEvent

from sglcore.serving.apis.answer import encode
from sglcore.serving.http.http_errors import body_of
from sglcore.serving.replicas.metrics.server_metrics import Metrics
from sglcore.serving.replicas.server_errors import INVALID, NO_HEADERS, Failure, Unanswered, told

SMALL = 64 << 10
"""Maximum bytes of a body whose rest is read before the answer, so that the connection can be
reused."""
_LONGEST, _MOST = 1.0, 64 << 20


class TurnedAway(Unanswered):
    """The error that middleware raises to refuse a request, which `Refusals` answers; refusals are
    counted by `code`."""

    def __init__(self, status: int, found: str, code: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """`status`: the HTTP status; `found`: the message; `code`: for programs; `headers`: further
        headers of the answer."""
        kind = "rate_limit_error" if status == 429 else INVALID
        super().__init__(Failure(status, found, kind, None, code, headers))
        self.code = code


class Refusals:
    """ASGI middleware that answers requests for which the app raises an error, and counts those
    that middleware refused (TurnedAway).

    An unexpected error gets an id, which the log has too, so that no traceback reaches a client.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """`app`: the ASGI app that may raise; `metrics` counts the refusals."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for one request. An error after the answer has begun is raised again: only
        closing the connection can report it."""
        has_begun, is_complete = False, not has_body(scope)

        async def inward() -> AsgiEvent:
            nonlocal is_complete
            message = await receive()
            is_complete = message["type"] == "http.request" and not message.get("more_body", False)
            return message

        async def outward(message: AsgiEvent) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, inward, outward)
        except Exception as error:
            if has_begun:
                raise
            if isinstance(error, TurnedAway):
                self._metrics.refused(error.code)
            failure = told(error)
            await _refuse(failure, is_complete or await _ends_soon(failure, scope, receive), scope, receive, send)


async def _refuse(failure: Failure, is_complete: bool, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the failure. `is_complete`: the whole body has been received.

    Otherwise the rest that the client sends is read and dropped, for at most a second and 64 MiB:
    closing a socket with unread bytes would discard the answer.
    """
    body = encode(body_of(failure, scope))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += _encoded(failure.headers.items())
    if not is_complete:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": not is_complete})
    if not is_complete:
        await _drop(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def has_body(scope: Scope) -> bool:
    """Return whether the headers of the request announce a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def body_length(scope: Scope) -> int | None:
    """Return the length in bytes that the header content-length announces; None without it, or if
    it is not a number of at most 19 digits."""
    value = header(scope, b"content-length")
    return int(value) if value is not None and value.isdigit() and len(value) < 20 else None


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first value of a header, not decoded; None if it is missing. `name`: in lower
    case."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def _ends_soon(failure: Failure, scope: Scope, receive: Receive) -> bool:
    """Read and drop the rest of a body of at most SMALL bytes, for at most a second, and return
    whether it has ended. False at once for a larger or unknown length, or if the failure is 408."""
    is_small = (body_length(scope) or SMALL + 1) <= SMALL
    return failure.status != 408 and is_small and await _drop(receive)


async def _drop(receive: Receive) -> bool:
    """Read and drop the rest of the body, for at most a second and 64 MiB; returns whether it has
    ended then. False also if the client disconnects."""
    count = 0
    try:
        async with asyncio.timeout(_LONGEST):
            while count < _MOST:
                message = await receive()
                count += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return message["type"] == "http.request"
    except TimeoutError:
        pass
    return False


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
