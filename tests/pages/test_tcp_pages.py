"""The reference page transfer alone: which bytes are written where, and what closes a
connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.disaggregation import tcp_frames, tcp_transfer
from sglcore.engine.disaggregation.tcp_frames import MAGIC, Frame, Kind, Lost, receive_frame, send_frame
from sglcore.worker.page_transfer import Bytes, Ints, Layout, PeerLost, Progress, Region, Told, layout_of
from tests.engine.drips import Drips

PAGES, SIZES = 12, (8, 8, 20)


class Memory:
    """Host pages of bytes; each region is filled with its own number."""

    page_size = 4
    cells = "bytes"

    def __init__(self, first: int = 0) -> None:
        self.regions = tuple(Region(n // 2, f"kind {n % 2}", 0, size, PAGES, "uint8") for n, size in enumerate(SIZES))
        self.data = [np.full((PAGES, size), first + n, np.uint8) for n, size in enumerate(SIZES)]

    def read(self, region: int, pages: Ints) -> Bytes:
        return self.data[region][pages]

    def write(self, region: int, pages: Ints, data: Bytes) -> None:
        self.data[region][pages] = data


class Ends:
    """Two connected ends: a listening source, and a target."""

    def __init__(self, stack: ExitStack, silence: float = 30.0) -> None:
        self.source_memory, self.target_memory = Memory(100), Memory()
        layout = layout_of(self.source_memory, "m")
        self.source = tcp_transfer.TcpPages(self.source_memory, layout, "127.0.0.1:0", "word", silence)
        stack.callback(self.source.close)
        self.target = tcp_transfer.TcpPages(self.target_memory, layout, "", "word", silence)
        stack.callback(self.target.close)
        self.at_target = self.target.connect(self.source.address)
        until(lambda: bool(self.source.peers))
        (self.at_source,) = self.source.peers


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def ends(stack: ExitStack) -> Ends:
    return Ends(stack)


def until(reached: Callable[[], bool]) -> None:
    """Wait until `reached()`, at most 30 seconds."""
    end = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


def heard(end: tcp_transfer.TcpPages, count: int = 1) -> list[Told]:
    """The next `count` messages."""
    found: list[Told] = []
    end_time = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < end_time
        found += end.receive(0.01)
    return found


def is_hung_up(stream: socket.socket) -> bool:
    """Whether the other side closes the connection without sending anything."""
    stream.settimeout(30)
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def test_pages_are_written_where_they_were_offered_and_nowhere_else(ends: Ends) -> None:
    lease = ends.target.offer(ends.at_target, ints(3, 9, 1))
    first = ends.source.write(ends.at_source, lease, ints(5, 6), ints(9, 1))
    second = ends.source.write(ends.at_source, lease, ints(7), ints(3), layers=(1, 2))
    ends.source.tell(ends.at_source, b"all there")
    assert heard(ends.target) == [Told(ends.at_target, b"all there")]
    until(lambda: second.progress is not Progress.PENDING)
    assert (first.progress, second.progress) == (Progress.DONE, Progress.DONE)
    for n, data in enumerate(ends.target_memory.data):
        written = [1, 3, 9] if n == 2 else [1, 9]
        wanted = np.full_like(data, n)
        wanted[written] = 100 + n
        np.testing.assert_array_equal(data, wanted)


@pytest.mark.parametrize(
    ("layers", "regions"),
    [(None, {0, 1, 2}), ((0, 1), {0, 1}), ((1, 2), {2}), ((0, 2), {0, 1, 2}), ((2, 9), set()), ((0, 0), set())],
)
def test_pages_of_the_layers_that_are_named_are_written(
    ends: Ends, layers: tuple[int, int] | None, regions: set[int]
) -> None:
    lease = ends.target.offer(ends.at_target, ints(3))
    transfer = ends.source.write(ends.at_source, lease, ints(5), ints(3), layers)
    assert regions or transfer.progress is Progress.DONE
    ends.source.tell(ends.at_source, b"all there")
    assert heard(ends.target) == [Told(ends.at_target, b"all there")]
    until(lambda: transfer.progress is Progress.DONE)
    assert {n for n, data in enumerate(ends.target_memory.data) if (data[3] == 100 + n).all()} == regions


def test_a_peer_ends_and_writes_its_own_leases_and_no_other_peers(ends: Ends, stack: ExitStack) -> None:
    second = tcp_transfer.TcpPages(Memory(50), layout_of(Memory(), "m"), "127.0.0.1:0", "word", 30.0)
    stack.callback(second.close)
    other = ends.target.connect(second.address)
    until(lambda: bool(second.peers))
    lease, own = ends.target.offer(ends.at_target, ints(3)), ends.target.offer(other, ints(4))
    second._queue(second.peers[0], Kind.DRAINED, lease)
    second.tell(second.peers[0], b"drained")
    heard(ends.target)
    assert not ends.target.drained(lease)
    second.write(second.peers[0], lease, ints(1), ints(3))
    (told,) = heard(ends.target)
    assert told.peer == other and told.lost.endswith(f"it wrote pages that lease {lease} does not have")
    assert (ends.target_memory.data[0][3] == 0).all() and ends.target.peers == (ends.at_target,)
    assert ends.target.drained(own) and not ends.target.drained(lease)
    assert ends.target.drained(ends.target.offer(other, ints(5))), "nobody will write it"


def test_a_region_that_the_memory_does_not_have_breaks_the_connection(ends: Ends) -> None:
    lease = ends.target.offer(ends.at_target, ints(2))
    connection = ends.source._connections[ends.at_source]
    connection.queue(Kind.PAGES, len(SIZES), lease, (ints(2).tobytes(), bytes(8)))
    assert "wrote pages" in heard(ends.target)[0].lost


def test_a_welcome_does_not_tell_the_secret(ends: Ends) -> None:
    host, _, port = ends.source.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as stream:
        hello = tcp_transfer.Hello(asdict(layout_of(Memory(), "m")), "word")
        send_frame(stream, Kind.HELLO, parts=(msgspec.msgpack.encode(hello),))
        answer = receive_frame(stream)
    assert answer.kind is Kind.WELCOME
    assert msgspec.msgpack.decode(answer.body, type=tcp_transfer.Hello).secret == ""


@pytest.mark.parametrize("target", [(4, 2), (2, PAGES + 3)])
def test_a_write_outside_its_lease_breaks_the_connection_and_writes_nothing(
    ends: Ends, target: tuple[int, int]
) -> None:
    lease = ends.target.offer(ends.at_target, ints(2, 3))
    before = [each.copy() for each in ends.target_memory.data]
    ends.source.write(ends.at_source, lease, ints(5, 6), ints(*target))
    (told,) = heard(ends.target)
    assert told.lost.endswith(f"it wrote pages that lease {lease} does not have")
    assert ends.target.drained(lease)
    assert not ends.target.peers
    for found, wanted in zip(ends.target_memory.data, before, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("is_drained", [False, True])
def test_a_write_to_a_lease_that_has_ended_breaks_the_connection(is_drained: bool, ends: Ends) -> None:
    lease = ends.target.offer(ends.at_target, ints(2))
    ends.source._queue(ends.at_source, Kind.DRAINED, lease) if is_drained else ends.target.end(lease)
    ends.source.write(ends.at_source, lease, ints(5), ints(2))
    assert "wrote pages" in heard(ends.target)[0].lost


def test_a_lease_is_drained_behind_all_that_was_written_to_it(ends: Ends) -> None:
    lease = ends.target.offer(ends.at_target, ints(2, 3))
    ends.target.cancel(lease)
    ends.source.write(ends.at_source, lease, ints(5, 6), ints(2, 3))
    assert not ends.target.drained(lease)
    assert heard(ends.source) == [Told(ends.at_source, cancelled=lease)]
    until(lambda: bool(ends.target.receive(0.01)) or ends.target.drained(lease))
    assert (ends.target_memory.data[0][[2, 3]] == 100).all()


def test_a_lease_of_a_peer_that_is_gone_is_drained(ends: Ends) -> None:
    lease = ends.target.offer(ends.at_target, ints(2))
    ends.source.close()
    assert heard(ends.target)[0].lost.startswith(f"the engine at {ends.source.address} is gone: ")
    assert ends.target.drained(lease)
    assert ends.target.write(ends.at_target, 1, ints(1), ints(1)).progress is Progress.FAILED


def test_a_peer_that_says_nothing_is_lost_and_one_that_has_nothing_to_say_is_not(stack: ExitStack) -> None:
    ends = Ends(stack, silence=0.4)
    time.sleep(1.0)
    assert ends.target.receive() == []
    connection = ends.source._connections[ends.at_source]
    connection._silence = 1e6
    assert heard(ends.target)[0].lost.endswith("it has sent nothing for 0.4 s")


def test_other_layouts_are_refused_with_both(ends: Ends, stack: ExitStack) -> None:
    other = tcp_transfer.TcpPages(Memory(), Layout("n", 8, "bytes", "something"), secret="word")
    stack.callback(other.close)
    with pytest.raises(ConfigError) as caught:
        other.connect(ends.source.address)
    assert "page_size 4" in str(caught.value)
    assert "page_size 8" in str(caught.value)


def test_who_does_not_know_the_secret_is_refused(ends: Ends, stack: ExitStack) -> None:
    other = tcp_transfer.TcpPages(Memory(), layout_of(Memory(), "m"), secret="another")
    stack.callback(other.close)
    with pytest.raises(ConfigError, match="the secret differs"):
        other.connect(ends.source.address)


def test_nobody_at_an_address_is_told_so(stack: ExitStack) -> None:
    end = tcp_transfer.TcpPages(Memory(), layout_of(Memory(), "m"))
    stack.callback(end.close)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerLost, match=f"there is no prompt engine at 127.0.0.1:{port}"):
        end.connect(f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="start it, or correct --peers"):
        tcp_transfer.wait_for(end, f"127.0.0.1:{port}", 0.1)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" * 9, MAGIC.to_bytes(2, "little") + b"\0" * 22])
def test_noise_on_the_port_harms_nobody(ends: Ends, noise: bytes) -> None:
    host, _, port = ends.source.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stream:
        stream.sendall(noise)
        assert is_hung_up(stream)
    ends.source.tell(ends.at_source, b"still here")
    assert heard(ends.target) == [Told(ends.at_target, b"still here")]


class KnowsWho(tcp_transfer.TcpPages):
    """Records for each message whether its sender was a known peer at that time."""

    def __init__(self, *given: Any) -> None:
        self.known: list[bool] = []
        super().__init__(*given)

    def _post(self, each: Frame | Lost) -> None:
        self.known.append(each.peer in self.peers)
        super()._post(each)


def test_who_speaks_at_once_is_known_by_then(stack: ExitStack) -> None:
    memory = Memory()
    source = KnowsWho(memory, layout_of(memory, "m"), "127.0.0.1:0", "word", 30.0)
    stack.callback(source.close)
    host, _, port = source.address.rpartition(":")
    for number in range(40):
        stream = stack.enter_context(socket.create_connection((host, int(port))))
        hello = msgspec.msgpack.encode({"layout": asdict(layout_of(memory, "m")), "secret": "word"})
        send_frame(stream, Kind.HELLO, parts=(hello,))
        send_frame(stream, Kind.TOLD, parts=(b"%d" % number,))
    until(lambda: len(source.known) == 40)
    assert all(source.known)


def test_who_connects_and_does_not_say_who_it_is_is_hung_up_on_in_time(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_transfer, "GREETING", 0.3)
    host, _, port = ends.source.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stream:
        assert is_hung_up(stream)


def test_a_greeting_has_one_limit_for_all_of_it_on_both_sides_and_none_is_sent_for_longer(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def receive(stream: socket.socket, **given: Any) -> Frame:
        limits.extend((given["seconds"], stream.gettimeout()))
        return receive_frame(stream, **given)

    monkeypatch.setattr(tcp_transfer, "receive_frame", receive)
    Ends(stack)
    assert limits == [tcp_transfer.GREETING] * 4


def test_a_frame_that_comes_byte_by_byte_is_waited_for_no_longer_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = tcp_frames._HEAD.pack(MAGIC, Kind.HELLO, 0, 0, 8) + b"it is me"
    for seconds, comes in ((0.25 * len(frame), True), (0.25 * len(frame) - 1, False), (2.0, False)):
        stream = Drips(frame, monkeypatch, tcp_frames)
        if comes:
            assert receive_frame(stream, seconds=seconds).body == b"it is me"
            continue
        with pytest.raises(TimeoutError, match="it has sent too little data for too long"):
            receive_frame(stream, seconds=seconds)
        assert stream.now == seconds


def test_nobody_waits_for_another_that_says_nothing(ends: Ends, stack: ExitStack) -> None:
    host, _, port = ends.source.address.rpartition(":")
    silent = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(4)]
    other = tcp_transfer.TcpPages(Memory(), layout_of(Memory(), "m"), secret="word")
    stack.callback(other.close)
    peer = other.connect(ends.source.address)
    until(lambda: len(ends.source.peers) == 2)
    for stream in silent:
        stream.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            stream.recv(1)
    assert other.peers == (peer,)


def test_a_prompt_engine_that_does_not_answer_in_time_is_none_and_is_hung_up_on(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_transfer, "GREETING", 0.3)
    end = tcp_transfer.TcpPages(Memory(), layout_of(Memory(), "m"))
    stack.callback(end.close)
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    with pytest.raises(PeerLost, match="there is no prompt engine at 127.0.0.1:.*sent too little data for too long"):
        end.connect(f"127.0.0.1:{listener.getsockname()[1]}")
    with listener.accept()[0] as stream:
        stream.settimeout(30)
        while stream.recv(1000):
            pass


def test_a_frame_of_another_kind_first_is_refused(ends: Ends) -> None:
    host, _, port = ends.source.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stream:
        send_frame(stream, Kind.PAGES, 0, 1, (b"\1",))
        assert is_hung_up(stream)
