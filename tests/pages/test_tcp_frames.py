"""One connection of the page transfer: which frames are taken, what is told of its end, and what is
closed after a refusal."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sglcore.engine.disaggregation import tcp_frames, tcp_transfer
from sglcore.engine.disaggregation.tcp_frames import MAGIC, Connection, Frame, Kind, Lost, receive_frame, send_frame
from sglcore.worker.page_transfer import PeerLost, Progress, Transfer
from tests.pages.test_tcp_pages import Ends, heard, ints, is_hung_up, until

HEAD = struct.Struct("<HHIQQ")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    near, far = socket.create_server(("127.0.0.1", 0)), socket.socket()
    stack.callback(near.close)
    far.connect(near.getsockname())
    accepted, _ = near.accept()
    for each in (far, accepted):
        each.settimeout(30.0)
        stack.callback(each.close)
    return accepted, far


@pytest.mark.parametrize(
    ("magic", "kind", "size", "fits"),
    [
        (MAGIC, Kind.HELLO, 5, True),
        (MAGIC, Kind.DRAINED, 5, True),
        (MAGIC, Kind.TOLD, 0, True),
        (MAGIC, Kind.TOLD, 6, False),
        (MAGIC, 0, 5, False),
        (MAGIC, Kind.DRAINED + 1, 5, False),
        (MAGIC + 1, Kind.TOLD, 5, False),
    ],
)
def test_a_frame_has_the_mark_a_known_kind_and_no_more_bytes_than_its_limit(
    magic: int, kind: int, size: int, fits: bool, stack: ExitStack
) -> None:
    near, far = pair(stack)
    far.sendall(HEAD.pack(magic, kind, 3, 2**40, size) + bytes(size))
    if fits:
        frame = receive_frame(near, 4, most=5)
        assert frame == Frame(4, Kind(kind), 3, 2**40, bytes(size))
        return
    with pytest.raises(PeerLost, match="not a frame of this protocol"):
        receive_frame(near, 4, most=5)


def connected(stack: ExitStack) -> tuple[Connection, socket.socket, list[Frame | Lost]]:
    near, far = pair(stack)
    posted: list[Frame | Lost] = []
    connection = Connection(4, near, "host:1", 30.0, posted.append)
    connection.start()
    stack.callback(connection.close)
    return connection, far, posted


def test_heartbeats_are_no_news_and_a_transfer_that_is_sent_is(stack: ExitStack) -> None:
    connection, far, posted = connected(stack)
    send_frame(far, Kind.BEAT)
    send_frame(far, Kind.TOLD, parts=(b"a", b"bc"))
    until(lambda: len(posted) == 1)
    assert posted == [Frame(4, Kind.TOLD, body=b"abc")]
    transfer = Transfer()
    connection.queue(Kind.PAGES, 2, 5, (b"x", b"yz"), transfer)
    connection.queue(Kind.CANCEL, lease=6)
    assert receive_frame(far) == Frame(0, Kind.PAGES, 2, 5, b"xyz") and receive_frame(far).lease == 6
    until(lambda: len(posted) == 2)
    assert (transfer.progress, transfer.reason) == (Progress.DONE, "") and posted[1] == Frame(4, Kind.BEAT)


def test_the_first_reason_of_an_end_is_told_once_and_fails_what_was_not_sent(stack: ExitStack) -> None:
    connection, far, posted = connected(stack)
    for why in ("it wrote elsewhere", "it is late"):
        connection.break_off(why)
    until(lambda: bool(posted))
    assert posted == [Lost(4, "it wrote elsewhere")] and is_hung_up(far)
    transfers = [Transfer(), Transfer()]
    for transfer in transfers:
        connection.queue(Kind.PAGES, ends=transfer)
    until(lambda: all(each.progress is not Progress.PENDING for each in transfers))
    assert [(each.progress, each.reason) for each in transfers] == [(Progress.FAILED, "it wrote elsewhere")] * 2
    connection.close()
    assert not any(thread.is_alive() for thread in connection._threads) and connection._stream.fileno() == -1
    assert [each for each in posted if isinstance(each, Lost)] == posted[:1]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_peer_is_lost_with_the_reason_that_its_stream_gives(is_damaged: bool, stack: ExitStack) -> None:
    connection, far, posted = connected(stack)
    if is_damaged:
        far.sendall(HEAD.pack(MAGIC, 0, 0, 0, 0))
    else:
        far.close()
    until(lambda: bool(posted))
    why = (
        "another engine sent data that is not a frame of this protocol"
        if is_damaged
        else "it has closed the connection"
    )
    assert posted == [Lost(4, why)] and connection.name == "host:1"


def test_a_peer_to_which_nothing_can_be_sent_is_lost_and_no_frame_follows(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example one that does not read."""
    tried: list[int] = []

    def send(stream: socket.socket, kind: Kind, region: int, lease: int, parts: Any) -> None:
        tried.append(lease)
        raise TimeoutError("timed out")

    connection, far, posted = connected(stack)
    monkeypatch.setattr(tcp_frames, "send_frame", send)
    transfers = [Transfer(), Transfer()]
    for lease, transfer in enumerate(transfers):
        connection.queue(Kind.PAGES, lease=lease, ends=transfer)
    why = "sending to it failed: timed out"
    until(lambda: len(posted) == 3)
    assert Lost(4, why) in posted and posted.count(Frame(4, Kind.BEAT)) == 2 and tried == [0]
    assert [(each.progress, each.reason) for each in transfers] == [(Progress.FAILED, why)] * 2 and is_hung_up(far)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_greeting_that_is_too_long_is_not_waited_for(
    is_asked: bool, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender could fill the memory of either side."""
    monkeypatch.setattr(tcp_transfer, "GREETING", 60.0)
    ends = Ends(stack)
    greeting = HEAD.pack(MAGIC, Kind.HELLO if is_asked else Kind.WELCOME, 0, 0, tcp_transfer.LONGEST_HELLO + 1)
    if is_asked:
        host, _, port = ends.source.address.rpartition(":")
        stream = stack.enter_context(socket.create_connection((host, int(port))))
        stream.sendall(greeting)
        assert is_hung_up(stream)
        return
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def answer() -> None:
        stream = stack.enter_context(listener.accept()[0])
        stream.sendall(greeting)

    answering = threading.Thread(target=answer)
    answering.start()
    with pytest.raises(PeerLost, match="there is no prompt engine at .* is not a frame of this protocol"):
        ends.target.connect(f"127.0.0.1:{listener.getsockname()[1]}")
    answering.join(30.0)


@pytest.mark.parametrize("layers", [None, (0, 1), (1, 2)])
def test_a_transfer_ends_with_the_last_region_that_is_written(
    layers: tuple[int, int] | None, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(stack)
    queued: list[tuple[int, Any]] = []

    def queue(kind: Kind, region: int, lease: int, parts: Any, transfer: Transfer | None) -> None:
        queued.append((region, transfer))

    monkeypatch.setattr(ends.source._connections[ends.at_source], "queue", queue)
    transfer = ends.source.write(ends.at_source, 1, ints(5), ints(3), layers)
    regions = {None: [0, 1, 2], (0, 1): [0, 1], (1, 2): [2]}[layers]
    assert queued == [(region, transfer if region == regions[-1] else None) for region in regions]
    assert transfer.progress is Progress.PENDING


@pytest.mark.parametrize("body", [b"\xc1", b"\x81\xa6secret\xa5wrong", b""])
def test_who_is_refused_or_says_nothing_that_can_be_read_is_hung_up_on(body: bytes, stack: ExitStack) -> None:
    ends = Ends(stack)
    host, _, port = ends.source.address.rpartition(":")
    stream = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
    send_frame(stream, Kind.HELLO, parts=(body,))
    assert is_hung_up(stream)
    ends.source.tell(ends.at_source, b"still here")
    assert heard(ends.target)[0].body == b"still here"


def test_peers_have_names_and_are_forgotten_at_the_end(stack: ExitStack) -> None:
    ends = Ends(stack)
    assert ends.target.name(ends.at_target) == ends.source.address and ends.target.name(99) == "peer 99"
    lease = ends.target.offer(ends.at_target, ints(1))
    assert ends.target.num_leases == 1 and not ends.target.drained(lease)
    ends.target.end(lease)
    assert ends.target.num_leases == 0 and ends.target.drained(lease)
    for _ in range(2):
        ends.source.close()
    assert ends.source.peers == () and ends.source.write(ends.at_source, 1, ints(1), ints(1)).reason
    with pytest.raises(PeerLost, match=f"there is no prompt engine at {ends.source.address}"):
        ends.target.connect(ends.source.address)
