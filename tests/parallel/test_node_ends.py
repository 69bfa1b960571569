"""When a node ends and with which exit code, round by round, with a clock that each round moves;
how it finds its leader; and how its process starts."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, SglcoreError, WorkerLost
from sglcore.engine.ranks import host_process
from sglcore.engine.ranks.host_process import FAILED, Following, Node, Stopping, end_ranks
from sglcore.engine.ranks.hosts import EPOCH, NodeFacts, host_spec
from sglcore.engine.ranks.rank_launch import Placement
from sglcore.engine.ranks.rank_process import LEADER_GONE
from sglcore.engine.ranks.wire import Channel, Frame, Gone, Kind, listen
from sglcore.engine.start import embedded_model
from tests.parallel.nodes.test_nodes import PATIENCE, Process, order, pair

Word = Kind | type[Exception] | None
"""What a node hears in a round: a frame, an error, or nothing."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only a test and `sleep` move."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(host_process, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


class Round(Following):
    """A node's ranks that hear one word in each round; a round takes two seconds. `ends`: the exit
    codes of ranks that end, by the number of the round."""

    def __init__(
        self,
        clock: list[float],
        words: list[Word],
        ends: dict[int, dict[int, int]] | None = None,
        stopping: Stopping | None = None,
        **times: float,
    ) -> None:
        channel: Any = SimpleNamespace(wait_at_most=lambda seconds: self.limits.append(seconds))
        ranks: Any = {2: Process(72), 3: Process(73)}
        self.limits: list[float] = []
        super().__init__(channel, ranks, order(2, 3, **times), stopping or Stopping(), ending=5.0)
        self.clock, self.words, self.ends = clock, words, ends or {}
        self.said: list[tuple[Kind, Any]] = []
        self.rounds = 0

    def _next(self) -> Frame | None:
        self.rounds += 1
        self.clock[0] += 2.0
        for rank, code in self.ends.get(self.rounds, {}).items():
            process: Any = self._ranks[rank]
            process.code = code
        word = self.words.pop(0)
        if isinstance(word, type):
            raise word("gone")
        return None if word is None else Frame(word, bytearray())

    def _say(self, kind: Kind, values: Any) -> None:
        self.said.append((kind, values))


def test_each_word_of_the_leader_begins_its_time_of_silence_anew(clock: list[float]) -> None:
    """Five seconds are over after three rounds without a word, and not before."""
    words: list[Word] = [None, None, Kind.BEAT, None, Kind.BEAT, None, None, None]
    node = Round(clock, [*words, None], silence=5.0)
    assert node.run() == LEADER_GONE and node.rounds == len(words) and node.limits == [5.0]
    exact = Round(clock, [Kind.BEAT, None, None], silence=4.0)
    assert exact.run() == LEADER_GONE and exact.rounds == 3


@pytest.mark.parametrize(("beat", "beats"), [(1.0, 3), (2.0, 3), (3.0, 1), (100.0, 0)])
def test_a_node_says_that_it_is_there_once_in_each_beat(beat: float, beats: int, clock: list[float]) -> None:
    node = Round(clock, [None, None, None, Kind.CLOSE], beat=beat)
    node.run()
    assert [kind for kind, _ in node.said].count(Kind.BEAT) == beats


def test_the_end_of_each_rank_is_told_once_and_in_the_round_in_which_it_is_seen(clock: list[float]) -> None:
    node = Round(clock, [None, None, None, Kind.BEAT], {1: {3: 0}, 4: {2: 0}})
    assert node.run() == 0 and node.rounds == 4
    assert [word for word in node.said if word[0] is not Kind.BEAT] == [
        *((Kind.STARTED, [2, 72]), (Kind.STARTED, [3, 73]), (Kind.ENDED, [3, 0]), (Kind.ENDED, [2, 0]))
    ]


@pytest.mark.parametrize(("finish", "rounds"), [(0.0, 0), (1.0, 1), (4.0, 2), (5.0, 3)])
def test_a_node_that_is_told_to_end_has_its_time_from_the_first_round_after(
    finish: float, rounds: int, clock: list[float]
) -> None:
    node = Round(clock, [None] * 9, stopping=Stopping(is_asked=True, finish=finish))
    assert node.run() == FAILED and node.rounds == rounds


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ({1: {2: 0, 3: 0}}, 0),
        ({1: {2: 0, 3: 1}}, LEADER_GONE),
        ({1: {2: LEADER_GONE, 3: LEADER_GONE}}, LEADER_GONE),
        ({1: {2: 0}}, LEADER_GONE),
        ({}, LEADER_GONE),
    ],
)
@pytest.mark.parametrize("error", [Gone, TimeoutError])
def test_ranks_that_are_left_alone_have_some_seconds_to_end(
    ends: dict[int, dict[int, int]], code: int, error: type[Exception], clock: list[float]
) -> None:
    node = Round(clock, [error], ends)
    assert node.run() == code
    waited = clock[0] - 102.0
    assert waited == 0.0 if len(ends.get(1, ())) == 2 else 5.0 <= waited < 5.2


def test_ranks_that_the_leader_closes_are_ended_and_told(clock: list[float]) -> None:
    node = Round(clock, [Kind.CLOSE], {1: {2: 0}})
    assert node.run() == FAILED
    assert node.said[-2:] == [(Kind.ENDED, [2, 0]), (Kind.ENDED, [3, -signal.SIGKILL])]
    quick = Round(clock, [Kind.CLOSE], {1: {2: 0, 3: 0}})
    assert quick.run() == 0


def test_ranks_are_all_killed_before_one_is_waited_for_and_those_that_have_ended_are_left() -> None:
    calls: list[str] = []

    class Told(Process):
        def kill(self) -> None:
            calls.append(f"kill {self.pid}")
            super().kill()

        def wait(self, timeout: float) -> int:
            calls.append(f"wait {self.pid} for {timeout:g}")
            return super().wait(timeout)

    ranks: Any = {1: Told(1), 2: Told(2, 0), 3: Told(3)}
    end_ranks(ranks)
    assert calls == ["kill 1", "kill 3", "wait 1 for 10", "wait 2 for 10", "wait 3 for 10"]


def test_what_a_leader_that_has_left_can_not_be_told_ends_nothing() -> None:
    def send(kind: Kind, body: bytes) -> None:
        raise Gone("it has left")

    channel: Any = SimpleNamespace(send=send, wait_at_most=lambda seconds: None)
    ranks: Any = {2: Process(72, 0), 3: Process(73, 0)}
    assert Following(channel, ranks, order(2, 3), Stopping()).run() == 0


class Leader:
    """A leader's listener, to which a node connects before the leader accepts."""

    def __init__(self) -> None:
        self.listener, self.address = listen(None, "127.0.0.1")
        self.port = int(self.address.rpartition(":")[2])

    def accepted(self) -> Channel:
        channel = Channel(self.listener.accept()[0], EPOCH)
        channel.wait_at_most(PATIENCE)
        return channel

    def node(self, prepare: Callable[[], Any], spawn: Any = None, stopping: Stopping | None = None) -> Node:
        placement = Placement("hand", "", 2, 1, ("127.0.0.1", self.port))
        return Node(placement, prepare, PATIENCE, spawn, stopping or Stopping())


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.listener.close()


def prepared() -> tuple[EngineConfig, Path]:
    return EngineConfig(tp=4, nodes=2, device="cpu"), embedded_model()


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_node_lacks_is_told_to_its_leader(number: int, leader: Leader) -> None:
    def lacking() -> Any:
        raise (ConfigError("there is no model"), Gone("it has left"))[number]

    with pytest.raises((ConfigError, Gone)):
        leader.node(lacking).follow()
    channel = leader.accepted()
    if not number:
        frame = channel.receive()
        assert (frame.kind, bytes(frame.body)) == (Kind.FAILED, b"there is no model")
    with pytest.raises(Gone):
        channel.receive()
    channel.close()


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_of_a_node_that_stops_or_fails_are_ended_with_it(
    fails: bool, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Process] = []
    holding: list[bool] = []
    stopping = Stopping(is_asked=True, finish=0.0)

    def spawn(spec: Any) -> Any:
        holding.append(stopping.is_holding)
        if fails and started:
            raise OSError("no process")
        started.append(Process(70 + len(started)))
        return started[-1]

    monkeypatch.setattr(Node, "_order", lambda node, channel: order(2, 3))
    node = leader.node(prepared, spawn, stopping)
    if fails:
        with pytest.raises(OSError, match="no process"):
            node.follow()
    else:
        assert node.follow() == FAILED
    assert [each.code for each in started] == [-signal.SIGKILL] * (1 if fails else 2)
    assert all(holding) and not stopping.is_holding
    channel = leader.accepted()
    assert channel.receive().kind is Kind.HELLO
    channel.close()


def test_a_node_without_an_order_has_no_ranks(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "_order", lambda node, channel: None)
    assert leader.node(prepared).follow() == LEADER_GONE
    channel = leader.accepted()
    facts = msgspec.msgpack.decode(channel.receive().body, type=NodeFacts)
    assert (facts.node, facts.local, facts.neighbours, facts.devices) == (1, 0, 1, 0)
    channel.close()


def test_an_order_may_come_at_the_end_of_the_time_to_join() -> None:
    with pair() as (near, far):
        far.send(Kind.ORDER, msgspec.msgpack.encode(order(2, 3)))
        node = Node(Placement("hand", "", 2, 1, ("h", 9)), prepared, 7.5)
        assert node._order(near) == order(2, 3) and near._limit == 7.5


def test_a_leader_is_tried_again_until_it_listens(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, float]] = []

    def connect(address: str, timeout: float) -> Any:
        tried.append((address, timeout))
        clock[0] += 1.5
        if len(tried) < 4:
            raise ConnectionRefusedError("refused")
        return "stream"

    monkeypatch.setattr(host_process, "connect", connect)
    stream: Any = host_process.reach("h", 9, 10.0)
    assert stream == "stream"
    assert tried == [("tcp:h:9", 5.0), ("tcp:h:9", 5.0), ("tcp:h:9", 5.0), ("tcp:h:9", 4.0)]
    tried.clear()
    with pytest.raises(WorkerLost, match=r"at h, port 9 in 3 s: refused"):
        host_process.reach("h", 9, 3.0)
    assert [timeout for _, timeout in tried] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("host", "found", "note"),
    [
        ("10.0.0.1", ["10.0.0.1", "10.0.0.1"], ""),
        ("a", ["10.0.0.2", "10.0.0.1", "10.0.0.2"], "; a is 10.0.0.1, 10.0.0.2 here"),
        ("a", None, ""),
    ],
)
def test_a_name_is_told_with_its_addresses(
    host: str, found: list[str] | None, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(*given: Any) -> list[Any]:
        if found is None:
            raise OSError("no such name")
        return [(0, 0, 0, "", (each, 0)) for each in found]

    monkeypatch.setattr(host_process.socket, "getaddrinfo", resolved)
    assert host_process._resolved(host) == note


@pytest.mark.parametrize("codes", [[0], [LEADER_GONE, FAILED, 0]])
def test_a_node_restarts_until_its_leader_has_closed_it(codes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_process, "_signals", lambda stopping: pair())
    rest = iter([*codes, 9])
    node: Any = SimpleNamespace(stopping=Stopping(), follow=lambda: next(rest))
    assert host_process.follow(node, restart=True) == 0 and next(rest) == 9
    rest = iter([*codes, 9])
    assert host_process.follow(node) == codes[0]


@pytest.mark.parametrize("outcome", [0, LEADER_GONE, ConfigError("no"), WorkerLost("gone")])
def test_the_process_of_a_node_has_the_place_and_the_settings_of_its_line(
    outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, placement = EngineConfig(tp=4, nodes=2, join_timeout=7.0), Placement("Ray", "why", 2, 1, ("10.0.0.1", 9))
    nodes: list[Node] = []
    parents: list[int] = []

    def follow(node: Node) -> int:
        nodes.append(node)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    line = io.BytesIO(host_spec(config, placement) + b"more")
    monkeypatch.setattr(host_process, "open", lambda *given, **more: line, raising=False)
    monkeypatch.setattr(host_process, "end_with_parent", parents.append)
    monkeypatch.setattr(host_process, "fetched", lambda *given: given)
    monkeypatch.setattr(Node, "follow", follow)
    assert host_process.main() == (outcome.exit_code if isinstance(outcome, SglcoreError) else outcome)
    (node,) = nodes
    assert node.placement == placement and node.join_timeout == 7.0 and parents == [LEADER_GONE]
    found, _ = node.prepare()
    assert (found.tp, found.nodes, found.join_timeout) == (4, 2, 7.0)
