"""When a leader takes another host for gone, round by round, and what it does with connections that
are no node's."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.ranks import hosts
from sglcore.engine.ranks.hosts import EPOCH, Gathering, Joined, NodeFacts, Remote, RemoteHost
from sglcore.engine.ranks.spec import HOST_GONE
from sglcore.engine.ranks.wire import LONGEST_HELLO, Channel, Frame, Gone, Kind, connect, listen
from tests.parallel.nodes.test_nodes import PATIENCE, joined, order, pair, say

Word = Kind | type[Exception] | tuple[Kind, list[int]] | None


class Scripted:
    """A channel on which a word, or nothing, comes in each round of two seconds."""

    def __init__(self, clock: list[float], words: list[Word]) -> None:
        self.clock, self.words = clock, words
        self.sent: list[Kind] = []
        self.waits: list[float] = []
        self.is_hung_up = False
        self.word: Word = None

    def is_readable(self, channel: Any, seconds: float) -> bool:
        self.waits.append(seconds)
        self.clock[0] += 2.0
        self.word = self.words.pop(0)
        return self.word is not None

    def receive(self) -> Frame:
        if isinstance(self.word, type):
            raise self.word("gone")
        kind, values = self.word if isinstance(self.word, tuple) else (self.word, [2, 5])
        assert isinstance(kind, Kind)
        return Frame(kind, bytearray(msgspec.msgpack.encode(values)))

    def send(self, kind: Kind) -> None:
        if self.is_hung_up:
            raise Gone("closed")
        self.sent.append(kind)

    def wait_at_most(self, seconds: float) -> None:
        self.limit = seconds

    def hang_up(self) -> None:
        self.is_hung_up = True


def watched(words: list[Word], monkeypatch: pytest.MonkeyPatch, beat: float = 3.0) -> tuple[RemoteHost, Scripted]:
    """A host that was watched until it was lost, with the ranks 2 and 3, after five seconds of
    silence."""
    clock = [100.0]
    channel: Any = Scripted(clock, words)
    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(hosts, "is_readable", channel.is_readable)
    remote = RemoteHost(Joined(NodeFacts(1, "", 0, 0, 1, {}), channel, "10.0.0.2", "10.0.0.1"), beat, 5.0)
    remote.ranks = {rank: Remote(remote) for rank in (2, 3)}
    remote._run()
    return remote, channel


def test_a_host_whose_channel_closed_before_it_was_watched_has_lost_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: Scripted, seconds: float) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(Scripted, "wait_at_most", closed)
    remote, _ = watched([], monkeypatch)
    assert [rank.code for rank in remote.ranks.values()] == [HOST_GONE, HOST_GONE]


def test_each_word_of_a_host_begins_its_time_of_silence_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[Word] = [None, None, Kind.BEAT, None, (Kind.STARTED, [2, 72]), None, None, None]
    remote, channel = watched([*words, None], monkeypatch)
    assert channel.words == [None] and channel.limit == hosts.HELLO_SECONDS
    assert [(rank.pid, rank.code) for rank in remote.ranks.values()] == [(72, HOST_GONE), (0, HOST_GONE)]


@pytest.mark.parametrize(("beat", "beats"), [(1.0, 3), (3.0, 2), (0.05, 3)])
def test_a_host_is_told_that_the_leader_is_there_once_in_each_beat(
    beat: float, beats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, channel = watched([None] * 3, monkeypatch, beat)
    assert channel.sent == [Kind.BEAT] * beats
    assert set(channel.waits) == {min(beat, hosts.LOOK_EVERY)}, "a beat is never late by a wait"


@pytest.mark.parametrize("error", [Gone, TimeoutError, OSError, ValueError])
def test_a_host_whose_channel_breaks_is_gone_and_how_its_ranks_ended_stays_known(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, channel = watched([(Kind.ENDED, [3, 0]), Kind.HELLO, error, None], monkeypatch)
    assert channel.words == [None]
    assert [rank.poll() for rank in remote.ranks.values()] == [HOST_GONE, 0]
    ours: Any = SimpleNamespace(calls=0)
    ours.hang_up = lambda: setattr(ours, "calls", ours.calls + 1)
    remote.hang_up_with([ours])
    assert ours.calls == 1, "a channel that is tied later is hung up at once"


def test_channels_of_a_host_that_is_there_are_left_alone() -> None:
    with pair() as (near, _):
        remote = RemoteHost(joined(near), 60.0, 60.0)
        ours: Any = SimpleNamespace(hang_up=lambda: pytest.fail("it is not gone"))
        remote.hang_up_with([ours])


@pytest.mark.parametrize("is_told", [False, True])
def test_a_wait_is_no_longer_than_the_caller_says(is_told: bool) -> None:
    with pair() as (near, _):
        remote = RemoteHost(joined(near), 60.0, 60.0)
        remote.begin(order(2, 3))
        if is_told:
            remote.ranks[2].kill()
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            remote.ranks[2].wait(0.01)
        assert time.monotonic() - begin < hosts.ANSWER_SECONDS / 2
        remote.close()


@pytest.mark.parametrize(("timeout", "waited"), [(3600.0, hosts.ANSWER_SECONDS), (1.0, 1.0)])
def test_a_host_that_was_told_to_end_its_ranks_has_little_time_to_answer(
    timeout: float, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock takes a tenth of a second."""
    clock = [100.0]

    def monotonic() -> float:
        clock[0] += 0.1
        return clock[0]

    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(hosts, "LOOK_EVERY", 0.0)
    channel: Any = Scripted([0.0], [])
    remote = RemoteHost(Joined(NodeFacts(1, "", 0, 0, 1, {}), channel, "a", "b"), 1.0, 5.0)
    rank = Remote(remote)
    rank.kill()
    with pytest.raises(TimeoutError):
        rank.wait(timeout)
    assert waited - 0.5 < clock[0] - 100.0 < waited + 0.5


def test_a_word_to_a_host_that_has_left_is_the_end_of_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    channel: Any = Scripted([0.0], [])
    remote = RemoteHost(Joined(NodeFacts(1, "", 0, 0, 1, {}), channel, "a", "b"), 1.0, 5.0)
    remote.end()
    remote.end()
    assert channel.sent == [Kind.CLOSE] and not channel.is_hung_up
    remote.close()
    assert channel.sent == [Kind.CLOSE] and channel.is_hung_up
    told: Any = Scripted([0.0], [])
    RemoteHost(Joined(NodeFacts(1, "", 0, 0, 1, {}), told, "a", "b"), 1.0, 5.0).close()
    assert told.sent == [Kind.CLOSE] and told.is_hung_up
    other: Any = Scripted([0.0], [])
    other.is_hung_up = True
    RemoteHost(Joined(NodeFacts(1, "", 0, 0, 1, {}), other, "a", "b"), 1.0, 5.0).close()


def test_a_host_to_which_nothing_can_be_sent_is_hung_up_on_so_that_it_is_lost_at_once() -> None:
    class Broken(Scripted):
        def send(self, kind: Kind) -> None:
            raise Gone("the other end is gone")

    channel: Any = Broken([0.0], [])
    RemoteHost(Joined(NodeFacts(1, "", 0, 0, 1, {}), channel, "a", "b"), 1.0, 5.0).end()
    assert channel.is_hung_up


def facts(node: int, **shared: int) -> bytes:
    return msgspec.msgpack.encode(NodeFacts(node, "", 0, 0, 1, {"a": 1, **shared}))


FOREIGN: dict[str, Callable[[Channel], None]] = {
    "no msgpack": lambda channel: channel.send(Kind.HELLO, b"\xc1"),
    "another record": lambda channel: channel.send(Kind.HELLO, msgspec.msgpack.encode([1, 2])),
    "too long": lambda channel: channel.send(Kind.HELLO, facts(1, **{"x" * LONGEST_HELLO: 1})),
    "half a frame": lambda channel: channel.send_packed(channel.packed(Kind.HELLO, facts(1))[:-1]),
    "left": lambda channel: channel.hang_up(),
}
"""First words of connections that are no node's."""


def gathered(listener: Any, nodes: int, seconds: float = PATIENCE) -> list[Joined]:
    progress: Any = lambda phase, done, total: None  # noqa: E731
    return Gathering(listener, nodes, {"a": 1}, progress, lambda facts, address: None).wait(seconds, "here")


@pytest.mark.parametrize("kind", FOREIGN)
def test_who_does_not_speak_as_a_node_is_let_go_and_the_nodes_are_found(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "HELLO_SECONDS", 0.05)
    listener, address = listen(None, "127.0.0.1")
    other = Channel(connect(address), EPOCH)
    FOREIGN[kind](other)
    node = say(address, 1)
    (found,) = gathered(listener, 2)
    other.wait_at_most(PATIENCE)
    with pytest.raises(Gone):
        other.receive()
    found.channel.send(Kind.BEAT)
    assert node.receive().kind is Kind.BEAT
    for each in (listener, other, node, found.channel):
        each.close()


def test_a_node_that_says_why_it_fails_ends_the_start_for_all() -> None:
    listener, address = listen(None, "127.0.0.1")
    node, failing = say(address, 1), Channel(connect(address), EPOCH)
    failing.wait_at_most(PATIENCE)
    failing.send(Kind.FAILED, b"there is no model")
    with pytest.raises(ConfigError, match=r"host 127\.0\.0\.1: there is no model") as told:
        gathered(listener, 3)
    frame = node.receive()
    assert frame.kind is Kind.FAILED and b"there is no model" in frame.body
    for each in (node, failing):
        with pytest.raises(Gone):
            each.receive()
        each.close()
    listener.close()
    assert told.tb is not None, "channels are closed, and not only forgotten"


def test_a_connection_that_is_reset_before_it_is_accepted_is_no_node() -> None:
    listener, address = listen(None, "127.0.0.1")
    with connect(address) as reset:
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    node = say(address, 1)
    (found,) = gathered(listener, 2)
    assert found.facts.node == 1
    for each in (listener, node, found.channel):
        each.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_a_node_is_known_by_its_own_address_and_the_leader_by_that_at_which_it_was_reached() -> None:
    listener, address = listen(None, "")
    stream = socket.create_connection(("127.0.0.3", listener.getsockname()[1]), source_address=("127.0.0.2", 0))
    node = Channel(stream, EPOCH)
    node.send(Kind.HELLO, facts(1))
    (found,) = gathered(listener, 2)
    assert (found.address, found.reached) == ("127.0.0.2", "127.0.0.3") and address.startswith("tcp:")
    assert RemoteHost(found, 1.0, 1.0).address == "127.0.0.2"
    for each in (listener, node, found.channel):
        each.close()


def test_nodes_hear_why_the_start_ends_though_one_of_them_has_left() -> None:
    listener, address = listen(None, "127.0.0.1")
    ours, theirs = socket.socketpair()
    theirs.close()
    node = say(address, 2)
    gathering = Gathering(listener, 4, {"a": 1}, lambda *word: None, lambda facts, address: None)
    gathering.found[1] = joined(Channel(ours, EPOCH), 1)
    failing = Channel(connect(address), EPOCH)
    failing.send(Kind.FAILED, b"there is no model")
    with pytest.raises(ConfigError, match="there is no model"):
        gathering.wait(PATIENCE, "here")
    frame = node.receive()
    assert frame.kind is Kind.FAILED and b"there is no model" in frame.body
    for each in (listener, node, failing):
        each.close()


def test_a_leader_of_no_other_nodes_waits_for_none() -> None:
    listener, _ = listen(None, "127.0.0.1")
    assert gathered(listener, 1, 0.0) == []
    listener.close()
