"""Requests of the server to its own endpoints, without a connection: `ask` sends a JSON body to the
ASGI app and returns status and body."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message


async def ask(app: ASGIApp, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """POST a JSON body to `path` of the app, under the id `request_id`, and return status and body
    of the whole answer. Waits. If this is cancelled, the request ends. An error that the app does
    not answer is raised."""
    unread, status, answer = [body], 0, bytearray()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("this event is never set")

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            answer.extend(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"}
    scope |= {"scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
    scope |= {"headers": headers, "client": None, "server": None, "state": {"request_id": request_id}}
    await app(scope, receive, send)
    return status, bytes(answer)
