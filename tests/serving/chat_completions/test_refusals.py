"""A refusal leaves the connection open where the rest of the body is at hand, and closes it where
it is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.serving.http.middleware.refusal import SMALL
from tests.serving import idle_clock
from tests.serving.wrapped import Answered, call, echo, wrapped

LONGEST = 0.2
"""Seconds for which the rest of a body is waited for."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcore.serving.http.middleware.refusal._LONGEST", LONGEST)


def refused(config: ServerConfig, **asked: Any) -> tuple[Answered, float]:
    """The answer to a request that is refused, and the seconds until it was complete."""
    found: list[tuple[Answered, float]] = []

    async def play() -> None:
        begin = asyncio.get_running_loop().time()
        answer = await call(wrapped(echo, config)[0], **asked)
        found.append((answer, asyncio.get_running_loop().time() - begin))

    idle_clock.run(play(), 60.0)
    return found[0]


@pytest.mark.parametrize(
    ("length", "chunks", "ends", "closes"),
    [
        ("0", [], True, False),
        (None, [], True, False),
        ("3", [b"abc"], True, False),
        (str(SMALL), [b"x" * SMALL], True, False),
        (str(SMALL + 1), [b"x" * (SMALL + 1)], True, True),
        (None, [b"abc"], True, True),
        ("9", [b"abc"], False, True),
        ("nine", [b"abc"], True, True),
        ("9" * 20, [b"abc"], True, True),
    ],
)
def test_a_connection_is_closed_unless_its_request_has_ended_or_ends_soon(
    length: str | None, chunks: list[bytes], ends: bool, closes: bool
) -> None:
    headers = {} if length is None else {"content-length": length}
    answer, seconds = refused(ServerConfig(api_key=("key",)), headers=headers, chunks=chunks, ends=ends)
    assert (answer.status, answer.headers.get("connection")) == (401, "close" if closes else None)
    assert answer.sent[-1].get("more_body", False) is False
    assert seconds < 0.5 * LONGEST if ends else 0.9 * LONGEST < seconds < 3 * LONGEST


def test_who_was_too_slow_already_is_not_waited_for_before_the_answer() -> None:
    config = ServerConfig(body_timeout=0.1)
    answer, seconds = refused(config, headers={"content-length": "9"}, chunks=[b"abc"], ends=False)
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert 0.1 + 0.9 * LONGEST < seconds < 0.1 + 1.5 * LONGEST, "the rest is dropped after the answer alone"
