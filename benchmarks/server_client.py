"""A minimal streaming client: raw sockets on asyncio, so that the client's own cost is small."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Streamed:
    """One streamed request: HTTP status, seconds to the first event and to the end, how it ended
    ("done", "error", "answered", "left" or "cut"), and the number of events."""

    status: int
    first: float
    whole: float
    ended: str
    events: int


@dataclass(frozen=True, slots=True)
class Served:
    """A ready server: its address and the process id of its frontend."""

    url: str
    pid: int


@contextmanager
def served(*flags: str, port: int = 8321) -> Iterator[Served]:
    """Start a server of the embedded model, wait until it is ready, and end it after the block."""
    command = [sys.executable, "-m", "sglcore.cli", "serve", "--port", str(port), "--quiet", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "SGLCORE_LOG_LEVEL": "warning"})
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url)
        yield Served(url, process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server was not ready in 60 s")


def get(url: str) -> Any:
    """Return the JSON of an address. Waits."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def request_bytes(path: str, body: Mapping[str, Any] | bytes) -> bytes:
    """Return the bytes of an HTTP POST request for one connection."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def stream(port: int, request: bytes, *, leave_after: int | None = None) -> Streamed:
    """Send a request and read its events. `leave_after`: close the connection after this number of
    events."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    first, events, ended, status = 0.0, 0, "cut", 0
    try:
        writer.write(request)
        status = int((await reader.readline()).split()[1])
        while await reader.readline() not in (b"\r\n", b""):
            pass
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                ended = "answered" if line.startswith(b"{") else ended
                continue
            if line.startswith(b"data: [DONE]"):
                ended = "done"
                break
            if line.startswith(b'data: {"error"'):
                ended = "error"
            events += 1
            first = first or time.perf_counter() - begin
            if leave_after is not None and events >= leave_after:
                ended = "left"
                break
    finally:
        writer.close()
    return Streamed(status, first, time.perf_counter() - begin, ended, events)
