"""The channel on which a rank reports its state, at the end of the leader and of the rank."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from sglcore.engine.ranks.rank_process import LEADER_GONE, Control
from sglcore.engine.ranks.wire import Channel, Kind

BEAT = 0.01


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes with which a process of its own would have ended."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)  # ends the thread

    monkeypatch.setattr(os, "_exit", end)
    yield codes
    assert not [thread for thread in threading.enumerate() if thread.name == "beats" and not ended(thread)]


def ended(thread: threading.Thread) -> bool:
    thread.join(10.0)
    return not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_ends_when_its_leader_is_gone(exits: list[int]) -> None:
    near, far = socket.socketpair()
    Control(Channel(near, 0), BEAT)
    far.close()
    until = time.monotonic() + 10.0
    while not exits and time.monotonic() < until:
        time.sleep(BEAT)
    assert exits[0] == LEADER_GONE


def test_a_rank_that_is_closed_ends_by_itself_when_its_leader_hangs_up(exits: list[int]) -> None:
    near, far = socket.socketpair()
    control = Control(Channel(near, 0), BEAT)
    control.let_go()
    far.close()
    control.say(Kind.BEAT, [0, "closing"])
    time.sleep(5 * BEAT)
    assert exits == []
