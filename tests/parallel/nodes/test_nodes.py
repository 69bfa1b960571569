"""Both ends of the channel between a leader and a node, without ranks: what each reports, in which
order, and with which exit code a node ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.engine.ranks import host_process
from sglcore.engine.ranks.host_process import FAILED, Following, Node, Stopping
from sglcore.engine.ranks.hosts import EPOCH, Gathering, Joined, NodeFacts, Order, RemoteHost
from sglcore.engine.ranks.rank_launch import Placement
from sglcore.engine.ranks.rank_process import LEADER_GONE
from sglcore.engine.ranks.spec import HOST_GONE, RankSpec
from sglcore.engine.ranks.wire import Channel, Frame, Gone, Kind, connect, listen
from sglcore.engine.start import embedded_model

PATIENCE = 30.0


def order(*ranks: int, beat: float = 60.0, silence: float = 60.0) -> Order:
    places = [{"rank": rank, "local": rank} for rank in ranks]
    return Order(places, "10.0.0.9", 1, 2, 3, "secret", beat, silence, ("X",), {"speculative": "ngram"})


@contextmanager
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel over TCP."""
    listener, address = listen(None, "127.0.0.1")
    far = Channel(connect(address), EPOCH)
    near = Channel(listener.accept()[0], EPOCH)
    far.wait_at_most(PATIENCE)
    try:
        yield near, far
    finally:
        for each in (listener, far, near):
            each.close()


def read(channel: Channel, count: int) -> list[tuple[Kind, Any]]:
    """The next frames other than heartbeats."""
    found: list[tuple[Kind, Any]] = []
    while len(found) < count:
        frame = channel.receive()
        if frame.kind is not Kind.BEAT:
            found.append((frame.kind, msgspec.msgpack.decode(frame.body)))
    return found


class Process:
    """A process that has ended with a code, or runs until it is killed."""

    def __init__(self, pid: int, code: int | None = None) -> None:
        self.pid, self.code = pid, code

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float) -> int:
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        self.code = -signal.SIGKILL


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [
        ((0, 0), 0),
        ((0, 1), FAILED),
        ((LEADER_GONE, LEADER_GONE), LEADER_GONE),
        ((LEADER_GONE, 0), LEADER_GONE),
        ((LEADER_GONE, 1), FAILED),
        ((-signal.SIGKILL, 0), FAILED),
    ],
)
def test_a_node_reports_each_start_and_end_and_ends_as_its_ranks_do(codes: tuple[int, int], wanted: int) -> None:
    with pair() as (near, far):
        ranks: Any = {2 + place: Process(70 + place, code) for place, code in enumerate(codes)}
        assert Following(near, ranks, order(2, 3), Stopping()).run() == wanted
        assert read(far, 4) == [
            (Kind.STARTED, [2, 70]),
            (Kind.STARTED, [3, 71]),
            (Kind.ENDED, [2, codes[0]]),
            (Kind.ENDED, [3, codes[1]]),
        ]


def test_a_node_sends_heartbeats_and_ends_its_ranks_when_the_leader_says_so() -> None:
    with pair() as (near, far):
        ranks: Any = {2: Process(70)}
        codes: list[int] = []
        following = Following(near, ranks, order(2, beat=0.01), Stopping())
        running = threading.Thread(target=lambda: codes.append(following.run()))
        running.start()
        assert far.receive().kind is Kind.STARTED
        assert [far.receive().kind for _ in range(3)] == [Kind.BEAT] * 3
        far.send(Kind.BEAT)
        far.send(Kind.CLOSE)
        running.join(PATIENCE)
        assert codes == [FAILED] and ranks[2].code == -signal.SIGKILL
        assert read(far, 1) == [(Kind.ENDED, [2, -signal.SIGKILL])]


@pytest.mark.parametrize(("finish", "goes_on"), [(0.0, False), (3600.0, True)])
def test_a_node_that_is_told_to_end_goes_on_for_its_time(finish: float, goes_on: bool) -> None:
    with pair() as (near, far):
        ranks: Any = {2: Process(70)}
        if goes_on:
            far.send(Kind.CLOSE)
        assert Following(near, ranks, order(2), Stopping(is_asked=True, finish=finish)).run() == FAILED
        assert (ranks[2].code is not None) is goes_on, "who called ends them"


@pytest.mark.parametrize("restart", [True, False])
def test_a_node_that_is_told_to_end_does_not_start_again(restart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_process, "_signals", lambda stopping: pair())
    node: Any = SimpleNamespace(stopping=Stopping(is_asked=True), follow=iter([LEADER_GONE]).__next__)
    assert host_process.follow(node, restart=restart) == LEADER_GONE


def test_a_signal_asks_a_node_with_ranks_to_end_and_a_second_one_or_without_ranks_the_first_ends_it() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    for number in (signal.SIGTERM, signal.SIGINT):
        stopping = Stopping(is_holding=True)
        with host_process._signals(stopping):
            signal.raise_signal(number)
            assert stopping.is_asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        idle = Stopping()
        with host_process._signals(idle), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert not idle.is_asked
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def node(timeout: float = PATIENCE, **given: Any) -> Node:
    config = EngineConfig(tp=4, nodes=2, device="cpu", speculative="auto")
    placement = Placement("hand", "", 2, 1, ("127.0.0.1", 9), 1, 2)
    return Node(placement, lambda: (config, embedded_model()), timeout, **given)


def test_a_leader_that_ends_or_does_not_find_all_nodes_is_told_apart() -> None:
    with pair() as (near, far):
        with pytest.raises(WorkerLost, match="at 127.0.0.1, port 9 has not found all nodes in 0 s.*--join-timeout"):
            node(0.05)._order(near)
        far.send(Kind.FAILED, b"hosts differ")
        with pytest.raises(ConfigError, match="the leader at 127.0.0.1:9 refuses: hosts differ"):
            node()._order(near)
        far.close()
        assert node()._order(near) is None


def test_a_node_on_the_leaders_machine_is_known_by_the_leaders_address_and_takes_its_decisions() -> None:
    listener, address = listen(None, "127.0.0.1")
    spawned: list[RankSpec] = []
    facts: list[NodeFacts] = []

    def spawn(spec: RankSpec) -> Any:
        spawned.append(spec)
        return Process(70, 0)

    def lead() -> None:
        channel = Channel(listener.accept()[0], EPOCH)
        facts.append(msgspec.msgpack.decode(channel.receive().body, type=NodeFacts))
        channel.send(Kind.ORDER, msgspec.msgpack.encode(order(2, 3)))
        with pytest.raises(Gone):
            while True:
                channel.receive()
        channel.close()

    leading = threading.Thread(target=lead)
    leading.start()
    made = node(spawn=spawn)
    placement = Placement("hand", "", 2, 1, ("127.0.0.1", int(address.rpartition(":")[2])), 1, 2)
    made = Node(placement, made.prepare, PATIENCE, spawn)
    assert made.follow() == 0 and not made.stopping.is_holding
    leading.join(PATIENCE)
    listener.close()
    assert [(each.node, each.local, each.neighbours, each.devices) for each in facts] == [(1, 1, 2, 0)]
    assert [each.place["rank"] for each in spawned] == [2, 3]
    for spec in spawned:
        assert (spec.address, spec.own_address) == ("tcp:10.0.0.9:1", "10.0.0.9")
        assert spec.place["meeting"] == "tcp://10.0.0.9:2" and spec.config["speculative"] == "ngram"
        assert (spec.epoch, spec.secret, spec.interface_variables) == (3, "secret", ("X",))


def joined(near: Channel, node: int = 1) -> Joined:
    return Joined(NodeFacts(node, "", 0, 0, 1, {}), near, "10.0.0.2", "10.0.0.1")


def test_a_host_says_which_processes_its_ranks_are_and_how_they_ended() -> None:
    with pair() as (near, far):
        remote = RemoteHost(joined(near), 0.01, 60.0)
        remote.begin(order(2, 3))
        kind, given = read(far, 1)[0]
        assert kind is Kind.ORDER and msgspec.convert(given, Order) == order(2, 3)
        assert far.receive().kind is Kind.BEAT
        ranks = remote.ranks
        far.send(Kind.HELLO, msgspec.msgpack.encode([2, 5]))
        for rank in (2, 3):
            far.send(Kind.STARTED, msgspec.msgpack.encode([rank, 70 + rank]))
        far.send(Kind.ENDED, msgspec.msgpack.encode([2, 0]))
        assert ranks[2].wait(PATIENCE) == 0 and ranks[2].poll() == 0
        assert [ranks[rank].pid for rank in (2, 3)] == [72, 73] and ranks[3].poll() is None
        with pytest.raises(TimeoutError):
            ranks[3].wait(0.01)
        far.close()
        assert ranks[3].wait(PATIENCE) == HOST_GONE and ranks[2].poll() == 0, "how it ended stays known"


def test_a_host_is_told_once_to_end_its_ranks() -> None:
    with pair() as (near, far):
        remote = RemoteHost(joined(near), 60.0, 60.0)
        remote.begin(order(2, 3))
        for rank in remote.ranks.values():
            rank.kill()
        remote.close()
        remote.close()
        kinds: list[Kind] = []
        with pytest.raises(Gone):
            while True:
                kinds.append(far.receive().kind)
        assert [each for each in kinds if each is not Kind.BEAT] == [Kind.ORDER, Kind.CLOSE]


def gathering(listener: Any, nodes: int, told: list[tuple[int, int]]) -> Gathering:
    return Gathering(
        listener, nodes, {"a": 1}, lambda phase, done, total: told.append((done, total)), lambda facts, address: None
    )


def say(address: str, node: int, **shared: int) -> Channel:
    """Join as a node."""
    channel = Channel(connect(address), EPOCH)
    channel.wait_at_most(PATIENCE)
    channel.send(Kind.HELLO, msgspec.msgpack.encode(NodeFacts(node, "", 0, 0, 1, {"a": 1, **shared})))
    return channel


def test_nodes_come_in_any_order_and_are_returned_in_theirs_and_silent_connections_are_closed() -> None:
    listener, address = listen(None, "127.0.0.1")
    told: list[tuple[int, int]] = []
    silent = Channel(connect(address), EPOCH)
    silent.wait_at_most(PATIENCE)
    nodes = [say(address, number) for number in (3, 1, 2)]
    found = gathering(listener, 4, told).wait(PATIENCE, "here")
    assert [each.facts.node for each in found] == [1, 2, 3]
    assert {(each.address, each.reached) for each in found} == {("127.0.0.1", "127.0.0.1")}
    assert told[0] == (1, 4) and {total for _, total in told} == {4}
    with pytest.raises(Gone):
        silent.receive()
    for each in (listener, silent, *nodes, *(other.channel for other in found)):
        each.close()


@pytest.mark.parametrize("shared", [{"a": 2}, {}])
def test_nodes_that_have_joined_hear_why_the_start_ends(shared: dict[str, int]) -> None:
    """One does not fit, or one is missing."""
    listener, address = listen(None, "127.0.0.1")
    nodes = [say(address, 1), say(address, 2, **shared)]
    kind = ConfigError if shared else WorkerLost
    why = "node 0 and node 2 .* differ: a is 1 and 2" if shared else "of 4 nodes 3 did not join at here in 0 s"
    with pytest.raises(kind, match=why):
        gathering(listener, 4 - bool(shared), []).wait(PATIENCE if shared else 0.3, "here")
    for each in nodes:
        frame: Frame = each.receive()
        assert frame.kind is Kind.FAILED and ("differ" if shared else "did not join") in frame.body.decode()
        with pytest.raises(Gone):
            each.receive()
        each.close()
    listener.close()
