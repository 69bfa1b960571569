"""Reads from descriptors have one time limit for the whole read, work for high descriptor numbers,
and are the same everywhere."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from types import SimpleNamespace

import pytest

from sglcore.engine import timed_read
from sglcore.engine.disaggregation import tcp_frames
from sglcore.engine.ranks import wire
from sglcore.engine.timed_read import DAY, is_readable, read_exactly
from sglcore.worker.page_transfer import PeerLost
from tests.engine.drips import Drips

CORE = Path(__file__).parents[3] / "sglcore"
HIGH = 1500
LONG = 1e6


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a stream; the first has a descriptor number too high for `select`."""
    soft, hard = getrlimit(RLIMIT_NOFILE)
    if hard < 2 * HIGH:
        pytest.skip(f"this machine allows {hard} open files")
    setrlimit(RLIMIT_NOFILE, (max(soft, 2 * HIGH), hard))
    low, there = socket.socketpair()
    try:
        with low, there, socket.socket(fileno=fcntl(low, F_DUPFD, HIGH)) as here:
            yield here, there
    finally:
        setrlimit(RLIMIT_NOFILE, (soft, hard))


def test_what_is_readable_is_known_of_any_descriptor(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    assert here.fileno() >= HIGH and not is_readable(here)
    there.send(b"a")
    assert is_readable(here) and is_readable(here.fileno())
    here.recv(1)
    there.shutdown(socket.SHUT_WR)
    assert is_readable(here, LONG)
    here.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        is_readable(here)


def test_nothing_in_the_core_asks_select_which_takes_no_descriptor_from_1024_on() -> None:
    asking = [path.name for path in CORE.rglob("*.py") if "select.select(" in path.read_text(encoding="utf-8")]
    assert not asking


@pytest.mark.parametrize("until", [None, LONG * 1e3])
def test_exactly_what_is_asked_for_is_read(ends: tuple[socket.socket, socket.socket], until: float | None) -> None:
    here, there = ends
    there.sendall(b"abcdef")
    assert [read_exactly(here, size, until) for size in (1, 4, 0)] == [b"a", b"bcde", b""]
    there.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        read_exactly(here, 2, until)


def test_a_limit_for_reading_is_none_for_the_sender(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    here.settimeout(5.0)
    there.sendall(b"ab")
    read_exactly(here, 2, LONG * 1e3)
    assert here.gettimeout() == 5.0
    with pytest.raises(TimeoutError):
        read_exactly(here, 1, -1.0)
    assert here.gettimeout() == 5.0


def test_what_drips_is_waited_for_no_longer_than_the_limit_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Drips(b"abcdefgh", monkeypatch)
    assert read_exactly(stream, 8, 2.0) == b"abcdefgh"
    for until in (1.875, 1.75, 0.125):
        stream = Drips(b"abcdefgh", monkeypatch)
        with pytest.raises(TimeoutError, match="it has sent too little data for too long"):
            read_exactly(stream, 8, until)
        assert stream.now == until


def test_what_comes_without_a_pause_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Drips(b"a" * 100, monkeypatch)
    monkeypatch.setattr("sglcore.engine.timed_read.is_readable", lambda *_: True)
    monkeypatch.setattr(stream, "monotonic", iter(range(100)).__next__)
    with pytest.raises(TimeoutError):
        read_exactly(stream, 100, 10.0)


def channel_reads(here: socket.socket) -> bytes:
    """Read a frame of a rank."""
    channel = wire.Channel(here, epoch=0)
    channel.wait_at_most(LONG)
    return bytes(channel.receive().body)


def page_reads(here: socket.socket) -> bytes:
    """Read a frame of KV pages."""
    return bytes(tcp_frames.receive_frame(here, seconds=LONG).body)


FRAMES: tuple[tuple[Callable[[socket.socket], bytes], bytes, type[Exception]], ...] = (
    (channel_reads, struct.pack("<HHIQ", wire.MAGIC, wire.Kind.BEAT, 0, 3) + b"abc", wire.Gone),
    (page_reads, struct.pack("<HHIQQ", tcp_frames.MAGIC, tcp_frames.Kind.BEAT, 0, 0, 3) + b"abc", PeerLost),
)


@pytest.mark.parametrize(("read", "frame", "gone"), FRAMES)
def test_frames_are_read_from_any_descriptor_and_a_frame_that_ends_early_is_the_end_of_the_peer(
    ends: tuple[socket.socket, socket.socket],
    read: Callable[[socket.socket], bytes],
    frame: bytes,
    gone: type[Exception],
) -> None:
    here, there = ends
    there.sendall(frame + frame[:-1])
    assert read(here) == b"abc"
    there.shutdown(socket.SHUT_WR)
    with pytest.raises(gone, match="closed"):
        read(here)


CHANNEL, PAGES = struct.Struct("<HHIQ"), struct.Struct("<HHIQQ")
BEAT, TOLD = wire.Kind.BEAT, tcp_frames.Kind.TOLD
MISTAKES = {
    "channel": [(0, BEAT, 0, 3), (wire.MAGIC + 1, BEAT, 0, 3), (wire.MAGIC, BEAT, 0, 4)],
    "pages": [
        (0, TOLD, 0, 0, 3),
        (tcp_frames.MAGIC, TOLD, 0, 0, 4),
        (tcp_frames.MAGIC, 0, 0, 0, 3),
        (tcp_frames.MAGIC, tcp_frames.Kind.DRAINED + 1, 0, 0, 3),
    ],
}


@pytest.mark.parametrize("head", MISTAKES["channel"])
def test_a_channel_takes_frames_up_to_the_limit_and_nothing_else(head: tuple[int, ...]) -> None:
    here, there = socket.socketpair()
    with closing(wire.Channel(here, epoch=0)) as channel, closing(there):
        other, own = (CHANNEL.pack(wire.MAGIC, BEAT, epoch, 3) for epoch in (1, 0))
        there.sendall(other + b"old" + own + b"abc" + CHANNEL.pack(*head) + b"abcd")
        assert channel.receive(most=3).body == b"abc" and channel.dropped == 1
        with pytest.raises(wire.Gone, match="data that is not a frame"):
            channel.receive(most=3)


@pytest.mark.parametrize("head", MISTAKES["pages"])
def test_pages_are_received_in_frames_up_to_the_limit_and_in_nothing_else(head: tuple[int, ...]) -> None:
    here, there = socket.socketpair()
    with closing(here), closing(there):
        there.sendall(PAGES.pack(tcp_frames.MAGIC, TOLD, 5, 6, 3) + b"abc" + PAGES.pack(*head) + b"abcd")
        found = tcp_frames.receive_frame(here, peer=9, most=3)
        assert found == tcp_frames.Frame(9, TOLD, 5, 6, bytearray(b"abc"))
        with pytest.raises(PeerLost, match="data that is not a frame of this protocol"):
            tcp_frames.receive_frame(here, most=3)


def test_a_channel_that_is_closed_here_says_that_it_is_gone() -> None:
    here, there = socket.socketpair()
    with closing(there):
        channel = wire.Channel(here, epoch=0)
        channel.wait_at_most(LONG)
        channel.close()
        with pytest.raises(wire.Gone, match=os.strerror(9)):
            channel.receive()


@pytest.mark.parametrize(
    ("seconds", "milliseconds"),
    [(0.0, 0.0), (-5.0, 0.0), (0.05, 50.0), (1.5, 1500.0), (DAY, DAY * 1e3), (1e9, DAY * 1e3)],
)
def test_a_wait_is_as_long_as_is_said_and_at_most_a_day(
    seconds: float, milliseconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    poll = SimpleNamespace(register=lambda number, events: None, poll=lambda wait: waits.append(wait))
    monkeypatch.setattr(timed_read.select, "poll", lambda: poll)
    assert not is_readable(3, seconds)
    assert waits == [pytest.approx(milliseconds)]


def test_what_can_be_written_to_is_not_therefore_readable(ends: tuple[socket.socket, socket.socket]) -> None:
    assert not is_readable(ends[0]) and not is_readable(ends[0].fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        is_readable(-1)
