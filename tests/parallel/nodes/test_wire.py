"""Frames between ranks and hosts: a stranger can neither block the leader nor use up its memory."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglcore.engine.ranks.wire import LONGEST_HELLO, MAGIC, Channel, Gone, Kind, connect, listen, tcp_address

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


@pytest.mark.parametrize(("size", "fits"), [(5, True), (6, False)])
def test_a_frame_may_be_as_long_as_its_limit(size: int, fits: bool, ends: tuple[Channel, socket.socket]) -> None:
    channel, there = ends
    there.sendall(HEAD.pack(MAGIC, Kind.STEP, 7, size) + bytes(size))
    if fits:
        assert bytes(channel.receive(5).body) == bytes(size)
        return
    with pytest.raises(Gone, match="not a frame"):
        channel.receive(5)


def test_a_stream_over_tcp_knows_both_addresses_and_waits_for_nothing() -> None:
    """A small frame is sent at once, and a stream has no limit until one is set."""
    listener, address = listen(None, "127.0.0.2")
    assert address == f"tcp:127.0.0.2:{listener.getsockname()[1]}"
    stream = connect(address, 5.0)
    accepted, _ = listener.accept()
    assert stream.gettimeout() is None
    theirs, ours = Channel(stream, 7), Channel(accepted, 7)
    assert theirs.addresses == ("127.0.0.2", ours.addresses[0]) and ours.addresses[1] == "127.0.0.2"
    for each in (stream, accepted):
        assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    for each in (theirs, ours, listener):
        each.close()
    assert stream.fileno() == accepted.fileno() == -1
    with pytest.raises(OSError):
        _ = ours.addresses


def test_a_leader_listens_at_the_port_that_it_is_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    listener, address = listen(None, "127.0.0.1", port)
    assert address == tcp_address("127.0.0.1", port) and listener.getsockname() == ("127.0.0.1", port)
    listener.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="the machine has no longer addresses")
def test_a_longer_address_is_listened_at_and_found() -> None:
    try:
        listener, address = listen(None, "::1")
    except OSError:
        pytest.skip("the machine has no longer loopback address")
    stream = connect(address, 5.0)
    assert stream.getpeername()[0] == "::1"
    stream.close()
    listener.close()


def test_a_folder_has_the_address_of_its_leader(tmp_path: Path) -> None:
    listener, address = listen(tmp_path)
    assert address == f"unix:{tmp_path / 'ranks'}"
    theirs = Channel(connect(address), 7)
    ours = Channel(listener.accept()[0], 7)
    theirs.send(Kind.BEAT, b"x")
    assert bytes(ours.receive().body) == b"x"
    for each in (theirs, ours, listener):
        each.close()


def test_who_sends_to_an_end_that_is_gone_is_told(ends: tuple[Channel, socket.socket]) -> None:
    channel, there = ends
    there.close()
    with pytest.raises(Gone, match="the other end of a channel is gone"):
        while True:
            channel.send(Kind.BEAT, bytes(4096))
    channel.close()
    channel.close()
    channel.hang_up()


@pytest.mark.parametrize("seconds", [0.5, None])
def test_the_limit_of_a_channel_is_also_that_of_its_sender(seconds: float | None) -> None:
    here, there = socket.socketpair()
    channel = Channel(here, 7)
    channel.wait_at_most(2.0)
    channel.wait_at_most(seconds)
    assert here.gettimeout() == seconds
    channel.close()
    there.close()


@pytest.mark.parametrize("seconds", [0.5, None])
def test_a_leader_over_tcp_is_waited_for_as_long_as_is_said(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[tuple[str, int], float | None]] = []

    def create_connection(where: tuple[str, int], timeout: float | None) -> socket.socket:
        asked.append((where, timeout))
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", create_connection)
    with pytest.raises(TimeoutError):
        connect(tcp_address("fd00::1", 5), seconds)
    assert asked == [(("fd00::1", 5), seconds)]
