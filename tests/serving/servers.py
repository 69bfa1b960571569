"""Servers as users start them: a process of `sglcore serve` on a free port, with its log in a
file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

LONGEST_START_S = 180.0
LONGEST_END_S = 60.0


@dataclass(frozen=True)
class Server:
    """A running server. `stderr` is the file with its log."""

    url: str
    process: subprocess.Popen[str]
    stderr: Path
    client: httpx.Client

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.url.rpartition(":")[2])

    def send(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """POST a JSON body."""
        return self.client.post(path, json=body, headers=headers)

    def post(self, path: str, body: Any) -> Any:
        """The JSON answer of a POST that must succeed."""
        answer = self.send(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        """The JSON answer of a GET that must succeed."""
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a POST that must be refused."""
        answer = self.send(path, body)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    def events(self, path: str, body: Mapping[str, Any]) -> list[str]:
        """The data of all events of a stream."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            lines = list(answer.iter_lines())
            assert answer.status_code == 200, lines
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in lines if line]


def start_server(folder: Path, *flags: str, environ: Mapping[str, str] | None = None) -> Server:
    """Start `sglcore serve` with the flags, and wait until it serves; fails with its log if it
    ends."""
    stderr = folder / "stderr.txt"
    with stderr.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglcore.cli", "serve", "--port", "0", "--quiet", *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        )
    assert process.stdout is not None
    overdue = threading.Timer(LONGEST_START_S, process.kill)
    overdue.start()
    line = next((line for line in process.stdout if line.startswith("serving ")), "")
    overdue.cancel()
    assert line, f"the server ended with {process.wait()}:\n{stderr.read_text()[-4000:]}"
    url = line.split()[-1].rstrip("/")
    return Server(url, process, stderr, httpx.Client(base_url=url, timeout=60.0, trust_env=False))


def nearly(found: Any, wanted: Any) -> bool:
    """Whether two JSON values are equal up to small differences of floats: with speculation, the
    rows of a step depend on timing."""
    if isinstance(wanted, float):
        return isinstance(found, float) and abs(found - wanted) < 1e-3
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(nearly(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(nearly, found, wanted))
    return found == wanted


@contextmanager
def running(folder: Path, *flags: str, environ: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A running server; at the end it is told to stop and must exit with code 0."""
    server = start_server(folder, *flags, environ=environ)
    try:
        yield server
    finally:
        server.client.close()
        server.process.terminate()
        try:
            code = server.process.wait(LONGEST_END_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise
    assert code == 0, server.stderr.read_text()[-4000:]
