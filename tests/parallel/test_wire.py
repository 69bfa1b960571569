"""Frames between ranks and hosts: a stranger can neither block the leader nor use up its memory."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sglcore.engine.ranks.wire import LONGEST_HELLO, MAGIC, Channel, Gone, Kind

HEAD = struct.Struct("<HHIQ")
MOST = 3000
"""Number of pieces after which a receiver that should have given up in time has not."""


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the other end of its stream."""
    here, there = socket.socketpair()
    channel = Channel(here, epoch=7)
    yield channel, there
    channel.close()
    there.close()


@contextmanager
def repeating(there: socket.socket, piece: bytes) -> Iterator[None]:
    """Send a piece repeatedly until the context is left."""
    is_over = threading.Event()

    def send() -> None:
        for _ in range(MOST):
            if is_over.wait(0.01):
                return
            there.send(piece)
        there.shutdown(socket.SHUT_RDWR)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    try:
        yield
    finally:
        is_over.set()
        sending.join()


def test_a_frame_that_drips_is_not_waited_for_longer_than_a_silent_one(ends: tuple[Channel, socket.socket]) -> None:
    channel, there = ends
    there.sendall(HEAD.pack(MAGIC, Kind.HELLO, 7, 1 << 16))
    channel.wait_at_most(0.1)
    with repeating(there, b"x"), pytest.raises(TimeoutError):
        channel.receive()


def test_frames_of_other_epochs_do_not_make_the_wait_longer(ends: tuple[Channel, socket.socket]) -> None:
    channel, there = ends
    channel.wait_at_most(0.1)
    with repeating(there, HEAD.pack(MAGIC, Kind.BEAT, 6, 0)), pytest.raises(TimeoutError):
        channel.receive()
    assert channel.dropped > 1


def test_a_first_word_that_is_too_long_is_refused_before_there_is_memory_for_it(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, there = ends
    there.sendall(HEAD.pack(MAGIC, Kind.HELLO, 7, LONGEST_HELLO + 1))
    with pytest.raises(Gone, match="not a frame"):
        channel.receive(LONGEST_HELLO)


def test_after_a_limit_there_may_be_none(ends: tuple[Channel, socket.socket]) -> None:
    channel, there = ends
    channel.wait_at_most(0.05)
    with pytest.raises(TimeoutError):
        channel.receive()
    channel.wait_at_most(None)
    there.sendall(HEAD.pack(MAGIC, Kind.STEP, 7, 3) + b"abc")
    found = channel.receive()
    assert (found.kind, bytes(found.body)) == (Kind.STEP, b"abc")
