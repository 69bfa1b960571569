"""A server of ranks started as a user does, and a client of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.laws.engine import environ

ASKED = [{"role": "user", "content": "What is 2 + 3?"}]
ANSWER = "2 + 3 = 5."
SETTINGS = ("serve", "--tp", "2", "--port", "0", "--threads", "1", "--graph", "off")
SERVE = (sys.executable, "-m", "sglcore", *SETTINGS)
SILENCE = 5.0
"""Seconds of silence after which a rank counts as lost."""
PATIENCE = 120.0


def settings_environ() -> dict[str, str]:
    """The lane's variables for a server."""
    return {**environ(), "SGLCORE_DEVICE": os.environ["LANE_DEVICE"], "PYTHONUNBUFFERED": "1"}


def until(is_so: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until `is_so()`, at most `seconds`."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def url_in(log: Path, process: subprocess.Popen[Any]) -> str:
    """The address of a server, once it logs that it serves."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for line in log.read_text().splitlines():
            if "serving " in line and " at http" in line:
                return line.split(" at ")[1].strip()
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"no server came up: {log.read_text()}")


def answer_of(url: str) -> str:
    """The model's answer to ASKED."""
    body = {"model": "sglcore-demo", "messages": ASKED, "temperature": 0, "max_tokens": 20}
    return json.load(_post(f"{url}/v1/chat/completions", body))["choices"][0]["message"]["content"]


def answered_again(url: str) -> None:
    """Ask until a server that restarts its ranks answers."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            assert answer_of(url) == ANSWER
            return
        except OSError:  # urllib raises this for an error response too
            assert time.monotonic() < end
            time.sleep(0.2)


def ledger_of(url: str) -> dict[str, Any]:
    """The rows of the ledger by topic."""
    rows = json.load(urllib.request.urlopen(f"{url}/server_info"))["ledger"]
    return {row["topic"]: row for row in rows}


def stream_until_error(url: str, at_third: Callable[[], None]) -> tuple[str, float]:
    """Stream a long text and call `at_third` at its third piece; return the error that ends the
    stream, and the seconds until then."""
    begin, count = 0.0, 0
    for event in _events(url):
        if (error := event.get("error")) is not None:
            return error["message"], time.monotonic() - begin
        count += 1
        if count == 3:
            at_third()
            begin = time.monotonic()
    raise AssertionError(f"the stream ended after {count} pieces without an error")


def _events(url: str) -> Iterator[dict[str, Any]]:
    body = {"model": "sglcore-demo", "prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}
    for line in _post(f"{url}/v1/completions", body):
        text = line.decode().removeprefix("data: ").strip()
        if text and text != "[DONE]":
            yield json.loads(text)


def _post(url: str, body: dict[str, Any]) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(asked, timeout=PATIENCE)
