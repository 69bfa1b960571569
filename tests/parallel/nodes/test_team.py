"""Where a leader listens, which ranks it starts where, and what it undoes when a start fails."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.device.choice import ChosenDevice
from sglcore.engine.ranks import team
from sglcore.engine.ranks.hosts import HostSpec, Joined, NodeFacts, Order
from sglcore.engine.ranks.rank_launch import ALONE, Placement
from sglcore.engine.ranks.spec import RankSpec
from sglcore.engine.ranks.team import Maker, Team
from sglcore.worker.topology import Communication, Place, Topology
from tests.parallel.nodes.test_nodes import Process, pair, read

TOLD = {"epoch": 7, "secret": "s", "beat": 0.5}
WORLD = 4


def maker(placement: Placement = ALONE, spawn: Any = None, resource: str = "", variable: str = "") -> Maker:
    choice: Any = SimpleNamespace(
        package=SimpleNamespace(name="x", ranks_share_device=False), chosen=ChosenDevice("x", "", "", 1, "", 3)
    )
    communication = Communication("x", cluster_resource=resource, interface_variable=variable)
    config = EngineConfig(tp=WORLD, nodes=placement.nodes, join_timeout=1.0)
    return Maker(config, choice, communication, Topology(tp=WORLD), spawn, TOLD, placement)


def test_all_ranks_of_one_machine_meet_in_a_folder_in_memory_that_goes_with_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "_folder", lambda: str(tmp_path))
    spawned: list[RankSpec] = []

    def spawn(spec: RankSpec) -> Any:
        spawned.append(spec)
        return Process(70 + len(spawned))

    with ExitStack() as stack:
        found = maker(spawn=spawn).here(stack)
        (begin,) = found.starts
        processes = begin()
        assert [(rank, process.pid) for rank, process in processes.items()] == [(n, 71 + n) for n in range(WORLD)]
        places = [Place.from_plain(each.place) for each in spawned]
        assert [(each.rank, each.local, each.neighbours) for each in places] == [(n, n, WORLD) for n in range(WORLD)]
        (meeting,) = {each.meeting for each in places}
        home = Path(meeting.removeprefix("file://")).parent
        assert (
            home.is_dir()
            and home.parent == tmp_path
            and {each.address for each in spawned} == {f"unix:{home / 'ranks'}"}
        )
        assert {(each.epoch, each.secret, each.beat, each.own_address) for each in spawned} == {(7, "s", 0.5, "")}
        assert [each.config["device"] for each in spawned] == ["x:3", "x:4", "x:5", "x:6"]
    assert not home.exists() and found.listener.fileno() == -1


def test_ranks_that_were_started_are_ended_if_the_next_one_can_not_be() -> None:
    started: list[Process] = []

    def spawn(spec: RankSpec) -> Any:
        if len(started) == 2:
            raise OSError("no process")
        started.append(Process(1))
        return started[-1]

    with ExitStack() as stack, pytest.raises(OSError, match="no process"):
        maker(spawn=spawn).here(stack).starts[0]()
    assert [each.code for each in started] == [-signal.SIGKILL] * 2


def test_a_rank_and_its_channels_belong_to_the_host_that_has_it() -> None:
    class Host:
        def __init__(self, address: str, *ranks: int) -> None:
            self.address, self.ranks = address, dict.fromkeys(ranks)
            self.tied: list[Any] = []
            self.closed = 0

        def hang_up_with(self, channels: list[Any]) -> None:
            self.tied.append(channels)

        def close(self) -> None:
            self.closed += 1

    hosts: Any = [Host("b", 2, 3), Host("c", 4, 5)]
    cluster: Any = Host("ray")
    nothing: Any = None
    found = Team(nothing, [], nothing, hosts, cluster)
    assert [found.host_of(rank) for rank in range(6)] == ["", "", "b", "b", "c", "c"]
    channels: Any = {(rank, use): f"{use} {rank}" for rank in range(6) for use in ("steps", "control")}
    found.tie(channels)
    assert [each.tied for each in hosts] == [
        [["steps 2", "control 2", "steps 3", "control 3"]],
        [["steps 4", "control 4", "steps 5", "control 5"]],
    ]
    found.close()
    assert [each.closed for each in (*hosts, cluster)] == [1, 1, 1]


def test_each_node_is_ordered_its_ranks_and_those_here_get_the_leaders_address() -> None:
    spawned: list[RankSpec] = []

    def spawn(spec: RankSpec) -> Any:
        spawned.append(spec)
        return Process(1)

    made = maker(Placement("hand", "why", 2), spawn, variable="X_IFNAME")
    listener = socket.create_server(("127.0.0.1", 0))
    with pair() as (near, far):
        joined = [Joined(NodeFacts(1, "", 0, 1, 2, {}), near, "10.0.0.2", "127.0.0.1")]
        found = made._team(listener, 5, joined)
        here, there = (begin() for begin in found.starts)
        (kind, given) = read(far, 1)[0]
        order = msgspec.convert(given, Order)
        assert kind.name == "ORDER" and list(there) == [each["rank"] for each in order.ranks] == [2, 3]
        assert (order.address, order.port, order.epoch, order.secret, order.beat) == ("127.0.0.1", 5, 7, "s", 0.5)
        assert order.silence == 0.5 * team.SILENCES and order.interface_variables == ("X_IFNAME",)
        assert order.decided == {"speculative": None}
        (remote,) = found.hosts
        assert (remote.address, remote._beat, remote._silence) == ("10.0.0.2", 0.5, 0.5 * team.SILENCES)
        assert [(each["local"], each["neighbours"]) for each in order.ranks] == [(2, 4), (3, 4)]
        assert list(here) == [0, 1]
        for spec in spawned:
            assert (spec.address, spec.own_address) == ("tcp:127.0.0.1:5", "127.0.0.1")
            assert spec.place["meeting"] == f"tcp://127.0.0.1:{order.meeting_port}"
            assert spec.interface_variables == ("X_IFNAME",)
        assert found.row.requested == "nodes 2" and "node 0 is 127.0.0.1, lo" in found.row.reason
        found.close()
    listener.close()


@pytest.mark.parametrize(
    ("resource", "bundle"), [("", {"CPU": 2.0}), ("GPU", {"CPU": 2.0, "GPU": 2.0}), ("NPU", {"CPU": 2.0, "NPU": 2.0})]
)
def test_a_cluster_gives_each_host_a_core_and_a_device_for_each_of_its_ranks(
    resource: str, bundle: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "RayHosts", lambda *given: given)
    assert maker(Placement("Ray", "", 2, cluster="auto"), resource=resource)._cluster() == ("auto", 2, bundle)


def test_a_node_of_a_cluster_is_told_its_number_the_leader_and_any_device_of_the_kind() -> None:
    made = maker(Placement("Ray", "", 2, cluster="auto"))
    spec = msgspec.json.decode(made._told_by_cluster(1, "10.0.0.1:5"), type=HostSpec)
    assert spec.config["device"] == "x" and spec.config["tp"] == WORLD
    assert (spec.placement["node"], spec.placement["nodes"], spec.placement["leader"]) == (1, 2, ["10.0.0.1", 5])


class Cluster:
    """A cluster that records what it is asked for, and whose nodes end if `is_broken`."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_broken = True

    def begin(self, specs: list[bytes], seconds: float) -> None:
        self.calls.append(f"begin {len(specs)} in {seconds} s")

    def check(self) -> None:
        self.calls.append("check")
        raise ConfigError("a node has ended")

    def close(self) -> None:
        self.calls.append("close")


def test_a_start_over_a_cluster_that_fails_leaves_the_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = Cluster()
    monkeypatch.setattr(Maker, "_cluster", lambda self: cluster)
    monkeypatch.setattr(team, "shared_facts", lambda *given: {})
    told: list[tuple[Any, ...]] = []
    with ExitStack() as stack, pytest.raises(ConfigError, match="a node has ended"):
        maker(Placement("Ray", "", 2, cluster="auto")).across(stack, tmp_path, lambda *word: told.append(word))
    assert cluster.calls == ["begin 1 in 1.0 s", "check", "close"]
    assert told == [("waiting for other hosts", 1, 2)]


@pytest.mark.parametrize(
    ("host", "resolved", "listens"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["127.0.0.1", "::1"], ""),
        ("host-a", ["127.0.1.1"], ""),
        ("host-a", ["203.0.113.7"], ""),
        ("host-a", ["203.0.113.7", "203.0.113.8"], ""),
        ("host-a", [], ""),
    ],
)
def test_a_leader_listens_at_its_name_where_that_is_one_address_of_this_machine(
    host: str, resolved: list[str], listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*asked: Any, **more: Any) -> list[Any]:
        if not resolved:
            raise OSError("no such name")
        return [(0, 0, 0, "", (each, 0)) for each in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert team.bindable(host) == listens


@pytest.mark.parametrize(
    ("is_there", "is_ours", "wanted"), [(True, True, "/dev/shm"), (True, False, None), (False, True, None)]
)
def test_ranks_share_a_folder_in_memory_where_there_is_one(
    is_there: bool, is_ours: bool, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team.os.path, "isdir", lambda path: is_there)
    monkeypatch.setattr(team.os, "access", lambda path, mode: is_ours)
    assert team._folder() == wanted


def test_a_longer_address_stands_in_brackets() -> None:
    assert team._url("fd00::1", 5) == "tcp://[fd00::1]:5" and team._url("10.0.0.1", 5) == "tcp://10.0.0.1:5"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_meet_at_a_port_that_is_free_at_the_address_of_their_leader(address: str) -> None:
    if not team._is_own(address):
        pytest.skip(f"the machine has no address {address}")
    port = team._free_port(address)
    assert port > 0
    with socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
        assert not team._is_own("203.0.113.7")
