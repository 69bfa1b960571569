"""What is left of a transfer of KV pages when a connection, or the whole transfer, has ended; and
at which addresses engines meet."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.disaggregation import tcp_transfer
from sglcore.engine.disaggregation.tcp_frames import Kind, receive_frame, send_frame
from sglcore.engine.disaggregation.tcp_transfer import TcpPages, wait_for
from sglcore.worker.page_transfer import PeerLost, Told, layout_of
from tests.pages.test_tcp_frames import pair
from tests.pages.test_tcp_pages import Ends, Memory, heard, ints, is_hung_up, until
from tests.parallel.test_ranks_start import open_files

LAYOUT = layout_of(Memory(), "m")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("pages")}


def of_connections() -> list[threading.Thread]:
    """Return the threads of connections, whose names have the peer's address."""
    return [each for each in threads() if ":" in each.name]


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted as Linux lists them")
def test_a_transfer_that_is_closed_leaves_no_thread_and_no_open_file() -> None:
    files, before = open_files(), threads()
    with ExitStack() as stack:
        Ends(stack)
        assert open_files() > files and threads() > before
    assert open_files() == files and threads() == before


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted as Linux lists them")
def test_a_connection_that_is_lost_is_closed_here_too(stack: ExitStack) -> None:
    ends = Ends(stack)
    until(lambda: len(of_connections()) == 4)
    known = of_connections()
    files = open_files()
    ends.source._connections[ends.at_source].break_off("it is enough")
    assert heard(ends.target)[0].lost and heard(ends.source)[0].lost.endswith("it is enough")
    for thread in known:
        thread.join(10.0)
    assert [each.is_alive() for each in known] == [False] * 4, "each end sends and receives in a thread"
    assert open_files() == files - 2, "both ends of the connection"
    assert ends.target.peers == ends.source.peers == ()


def test_frames_are_sent_at_once_however_small(stack: ExitStack) -> None:
    ends = Ends(stack)
    for end, peer in ((ends.source, ends.at_source), (ends.target, ends.at_target)):
        assert end._connections[peer]._stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_engine_whose_secret_is_wrong_is_told_so_and_then_hung_up_on(stack: ExitStack) -> None:
    ends = Ends(stack)
    host, _, port = ends.source.address.rpartition(":")
    stream = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
    hello = tcp_transfer.Hello(asdict(LAYOUT), "wörd")
    send_frame(stream, Kind.HELLO, parts=(msgspec.msgpack.encode(hello),))
    answer = receive_frame(stream)
    assert answer.kind is Kind.REFUSED and b"the secret differs" in answer.body and is_hung_up(stream)
    assert ends.source.peers == (ends.at_source,)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.HELLO])
def test_a_greeting_in_another_frame_is_none(kind: Kind, stack: ExitStack) -> None:
    ends = Ends(stack)
    host, _, port = ends.source.address.rpartition(":")
    stream = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
    send_frame(stream, kind, parts=(msgspec.msgpack.encode(tcp_transfer.Hello(asdict(LAYOUT), "word")),))
    assert is_hung_up(stream) and ends.source.peers == (ends.at_source,)


@pytest.mark.parametrize("kind", [Kind.REFUSED, Kind.BEAT, Kind.HELLO])
def test_an_engine_that_is_not_welcome_hangs_up(kind: Kind, stack: ExitStack) -> None:
    end = TcpPages(Memory(), LAYOUT)
    stack.callback(end.close)
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    streams: list[socket.socket] = []

    def answer() -> None:
        streams.append(stack.enter_context(listener.accept()[0]))
        receive_frame(streams[0])
        send_frame(streams[0], kind, parts=(b"not here",))

    answering = threading.Thread(target=answer)
    answering.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"the prompt engine at {address} refused: not here"):
        end.connect(address)
    answering.join(30.0)
    assert is_hung_up(streams[0]) and end.peers == ()


def test_a_writer_that_has_stopped_is_not_told_again_to_stop(stack: ExitStack) -> None:
    ends = Ends(stack)
    lease = ends.target.offer(ends.at_target, ints(2))
    ends.target.cancel(lease)
    assert heard(ends.source) == [Told(ends.at_source, cancelled=lease)]
    until(lambda: bool(ends.target.receive(0.01)) or ends.target.drained(lease))
    for each in (lease, 99):
        ends.target.cancel(each)
    ends.target.tell(ends.at_target, b"next")
    assert heard(ends.source) == [Told(ends.at_source, b"next")]


def test_a_peer_that_has_greeted_when_the_transfer_is_closed_is_hung_up_on(stack: ExitStack) -> None:
    ends = Ends(stack)
    near, far = pair(stack)
    ends.source.close()
    with pytest.raises(PeerLost, match="this engine has ended"):
        ends.source._greet(near, "late")
    assert near.fileno() == -1 and is_hung_up(far) and ends.source.peers == ()


def has_longer_addresses() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_ipv6


@pytest.mark.skipif(not has_longer_addresses(), reason="the machine has no longer loopback address")
def test_engines_meet_at_a_longer_address_in_brackets(stack: ExitStack) -> None:
    source = TcpPages(Memory(100), LAYOUT, "[::1]:0")
    stack.callback(source.close)
    host, _, port = source.address.rpartition(":")
    assert host == "[::1]" and int(port) > 0
    target = TcpPages(Memory(), LAYOUT)
    stack.callback(target.close)
    peer = target.connect(source.address)
    until(lambda: bool(source.peers))
    assert target.name(peer) == source.address and source.name(source.peers[0]).startswith("[::1]:")
    target.tell(peer, b"hello")
    assert heard(source) == [Told(source.peers[0], b"hello")]
    with pytest.raises(ConfigError, match=rf"cannot listen for pages at \[::1\]:{port}: .*--pages-address"):
        TcpPages(Memory(), LAYOUT, source.address)


@pytest.mark.parametrize(
    ("tries", "seconds", "comes"), [(1, 0.0, True), (3, 0.5, True), (4, 0.5, True), (5, 0.5, False), (2, 0.1, True)]
)
def test_an_engine_that_starts_later_is_waited_for(
    tries: int, seconds: float, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers at the try of this number; a fifth of a second lies between two tries."""
    clock, asked = [10.0], list[str]()

    def connect(address: str) -> int:
        asked.append(address)
        if len(asked) < tries:
            raise PeerLost("nobody is there")
        return 7

    def sleep(wait: float) -> None:
        clock[0] += wait

    monkeypatch.setattr(tcp_transfer, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    transfer: Any = SimpleNamespace(connect=connect)
    if comes:
        assert wait_for(transfer, "h:1", seconds) == 7 and asked == ["h:1"] * tries
        return
    with pytest.raises(ConfigError, match="nobody is there; wanted a prompt engine; start it, or correct --peers"):
        wait_for(transfer, "h:1", seconds)
    assert clock[0] - 10.0 < seconds + 0.25
