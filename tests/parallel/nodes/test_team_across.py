"""The team of a start over several nodes, with nodes that join by a channel alone: what a cluster
is asked for, where the leader listens, and what is left open or closed."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.ranks import team
from sglcore.engine.ranks.hosts import EPOCH, HostSpec, Joined, NodeFacts, Order
from sglcore.engine.ranks.rank_launch import Placement
from sglcore.engine.ranks.team import Maker, Team
from sglcore.engine.ranks.wire import Channel, Gone, Kind, connect, tcp_address
from sglcore.engine.start import no_progress
from tests.parallel.nodes.test_nodes import PATIENCE
from tests.parallel.nodes.test_team import Process, maker


class Cluster:
    """A cluster whose nodes join as soon as they are started. `nodes`: their
    channels, by number."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.nodes: dict[int, Channel] = {}
        self.seconds: list[float] = []
        self.checks = self.closed = 0

    def begin(self, specs: list[bytes], seconds: float) -> None:
        self.seconds.append(seconds)
        for line in specs:
            spec = msgspec.json.decode(line, type=HostSpec)
            node = spec.placement["node"]
            channel = Channel(connect(tcp_address(*spec.placement["leader"])), EPOCH)
            channel.wait_at_most(PATIENCE)
            facts = NodeFacts(node, maker().choice.chosen.encode(), 0, 0, 1, {})
            channel.send(Kind.HELLO, msgspec.msgpack.encode(facts))
            self.nodes[node] = channel

    def check(self) -> None:
        self.checks += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(Maker, "_cluster", lambda self: made)
    monkeypatch.setattr(team, "shared_facts", lambda *given: {})
    return made


PLACED = Placement("Ray", "why", 4, cluster="auto")
"""Four nodes of one rank each."""


def test_the_nodes_of_a_cluster_join_and_get_their_ranks(cluster: Cluster, tmp_path: Path) -> None:
    with ExitStack() as stack:
        found = maker(PLACED, lambda spec: Process(1)).across(stack, tmp_path, no_progress)
        assert found.cluster is cluster and cluster.seconds == [1.0] and cluster.checks and not cluster.closed
        assert sorted(cluster.nodes) == [1, 2, 3]
        own, *others = [list(begin()) for begin in found.starts]
        assert own == [0] and others == [[1], [2], [3]]
        for node, channel in cluster.nodes.items():
            frame = channel.receive()
            while frame.kind is Kind.BEAT:
                frame = channel.receive()
            order = msgspec.msgpack.decode(frame.body, type=Order)
            assert frame.kind is Kind.ORDER and [place["rank"] for place in order.ranks] == [node]
            assert order.port == found.listener.getsockname()[1] != order.meeting_port
        assert found.host_of(0) == "" and found.host_of(3) == "127.0.0.1"
    assert found.listener.fileno() == -1
    found.close()
    assert cluster.closed == 1
    for channel in cluster.nodes.values():
        with pytest.raises(Gone):
            while True:
                channel.receive()
        channel.close()


def test_nodes_that_have_joined_are_let_go_if_the_team_can_not_be_made(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Team:
        raise OSError("no port")

    monkeypatch.setattr(Maker, "_team", fail)
    with ExitStack() as stack, pytest.raises(OSError, match="no port"):
        maker(PLACED).across(stack, tmp_path, no_progress)
    assert cluster.closed == 1
    for channel in cluster.nodes.values():
        with pytest.raises(Gone):
            channel.receive()
        channel.close()


@pytest.mark.parametrize(
    ("own", "leader", "host", "listens"),
    [
        ("127.0.0.1", ("elsewhere", 9), "127.0.0.1", "127.0.0.1"),
        ("", ("127.0.0.1", 0), "127.0.0.1", "127.0.0.1"),
        ("", ("203.0.113.7", 0), "203.0.113.7", "0.0.0.0"),
        ("::1", ("", 0), "[::1]", "::1"),
        ("", ("::1", 0), "[::1]", "::1"),
    ],
)
def test_a_leader_listens_at_the_address_of_its_cluster_or_at_its_own(
    own: str, leader: tuple[str, int], host: str, listens: str
) -> None:
    listener, found, port = maker(Placement("hand", "", 2, leader=leader))._listen(own)
    with listener:
        assert (found, port) == (host, listener.getsockname()[1]) and listener.getsockname()[0] == listens
        assert port not in (0, 9)


def test_a_port_that_another_process_has_is_named_with_its_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"the leader cannot listen at 127.0.0.1, port {port}: .* in use"):
            maker(Placement("hand", "", 2, leader=("127.0.0.1", port)))._listen("")


def test_of_several_addresses_the_first_that_is_not_loopback_is_for_all() -> None:
    nothing: Any = None

    def advertised(*reached: str) -> str:
        return team.advertised([Joined(nothing, nothing, "", each) for each in reached])

    assert advertised("127.0.0.1", "::1") == "127.0.0.1" and advertised("::1", "127.0.0.1") == "::1"
    assert advertised("::1", "10.0.0.1", "10.0.0.2") == "10.0.0.1"


@pytest.mark.parametrize(("nodes", "requested"), [(1, "auto"), (2, "nodes 2")])
def test_the_ledger_says_how_many_nodes_were_requested(nodes: int, requested: str) -> None:
    """With torchrun nobody requests them."""
    made = maker(Placement("torchrun", "why", 2))
    made = replace(made, config=replace(made.config, nodes=nodes))
    listener = socket.create_server(("127.0.0.1", 0))
    here, there = socket.socketpair()
    channel = Channel(here, EPOCH)
    found = made._team(listener, 5, [Joined(NodeFacts(1, "", 0, 0, 1, {}), channel, "10.0.0.2", "127.0.0.1")])
    assert (found.row.requested, found.row.effective) == (requested, "2 nodes by torchrun")
    for each in (listener, channel, there):
        each.close()


def test_devices_of_a_node_are_counted_from_the_one_that_it_chose() -> None:
    """Two nodes on one machine, each with two ranks: the second one needs four devices."""
    made = maker(Placement("torchrun", "", 2))
    for index, devices, fits in ((0, 4, True), (0, 3, False), (1, 4, False), (1, 5, True), (3, 0, True)):
        chosen = maker().choice.chosen
        facts = NodeFacts(1, type(chosen)("x", "", "", 1, "", index).encode(), devices, 1, 2, {})
        if fits:
            made._check_devices(facts, "10.0.0.2")
            continue
        with pytest.raises(ConfigError, match=rf"node 1 \(host 10.0.0.2\) needs x up to number {index + 3}, and has"):
            made._check_devices(facts, "10.0.0.2")
