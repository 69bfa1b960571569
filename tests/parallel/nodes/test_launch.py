"""Which node a process is, from flags and from the launchers' environment variables."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.cli.serve import _placed as placed_server
from sglcore.config.engine_config import EngineConfig, resolve_config, resolve_server_config
from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.device.choice import ChosenDevice
from sglcore.engine.ranks import agreement, host_process, interface, team
from sglcore.engine.ranks.agreement import BLOCK, decisions, differences, files_digest, shared_facts, with_decisions
from sglcore.engine.ranks.host_process import Node
from sglcore.engine.ranks.hosts import Joined, Order
from sglcore.engine.ranks.interface import interface_of
from sglcore.engine.ranks.rank_launch import LEADER_PORT, Placement, find_placement
from sglcore.engine.ranks.rank_process import HOST_INTERFACE, tell_interface
from sglcore.engine.ranks.spec import RankSpec, spec_of
from sglcore.worker.topology import Communication, Place, Topology

TORCHRUN = MappingProxyType(
    {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
)
WORKER_SET = MappingProxyType(
    {"LWS_LEADER_ADDRESS": "model-0.model.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
)


def placed(environ: Mapping[str, str] = MappingProxyType({}), **settings: Any) -> Placement:
    return find_placement(resolve_config({"tp": 4, **settings}, {}), environ)


def test_without_flags_and_variables_all_ranks_are_here() -> None:
    found = placed()
    assert (found.nodes, found.node, found.launcher) == (1, 0, "this machine")
    assert found.row("auto").effective == "this machine"


def test_flags_say_which_node_this_is() -> None:
    found = placed(TORCHRUN, nodes=2, node_rank=1, leader="[fe80::1]:777")
    assert (found.nodes, found.node, found.leader) == (2, 1, ("fe80::1", 777))
    assert found.restarter == "", "--restart is ours"


def test_torchrun_starts_a_node_for_each_of_its_processes() -> None:
    found = placed(TORCHRUN)
    assert (found.nodes, found.node, found.local, found.neighbours) == (4, 3, 1, 2)
    assert found.leader == ("10.0.0.1", 29501), "its own store listens at MASTER_PORT"
    assert "torchrun" in found.row("auto").effective and "RANK" in found.row("auto").reason
    assert placed({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}) == placed()
    assert placed({**TORCHRUN, "LOCAL_WORLD_SIZE": ""}).neighbours == 1
    assert placed(TORCHRUN, leader="10.0.0.9:80").leader == ("10.0.0.9", 80)


def test_a_leader_worker_set_starts_a_node_in_each_pod() -> None:
    found = placed(WORKER_SET)
    assert (found.nodes, found.node, found.leader) == (2, 1, ("model-0.model.default", LEADER_PORT))
    assert placed({**WORKER_SET, "LWS_GROUP_SIZE": "1"}) == placed()


@pytest.mark.parametrize("variables", [TORCHRUN, WORKER_SET])
def test_a_launcher_of_which_a_variable_is_missing_started_nothing(variables: Mapping[str, str]) -> None:
    for name in variables.keys() - {"LOCAL_WORLD_SIZE"}:
        for rest in ({}, {name: ""}):
            given = {other: value for other, value in variables.items() if other != name}
            assert placed({**given, **rest}) == placed()


def test_ray_is_taken_where_it_is_asked_for_or_nothing_else_says_who_starts_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert placed(nodes=2, leader="ray:head:6379").cluster == "head:6379"
    assert placed({"RAY_ADDRESS": "head:1"}, nodes=2, leader="ray").cluster == "head:1"
    assert placed({"RAY_ADDRESS": "head:1"}, nodes=2, leader="ray:head:2").cluster == "head:2"
    assert placed(nodes=2, leader="ray").cluster == "auto"
    monkeypatch.setattr("sglcore.engine.ranks.rank_launch.find_spec", lambda name: object())
    found = placed(nodes=2)
    assert (found.launcher, found.cluster) == ("Ray", "auto") and "Ray is installed" in found.reason
    monkeypatch.setattr("sglcore.engine.ranks.rank_launch.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the rank of this node is not known.*--node-rank R --leader HOST:PORT.*ray"):
        placed(nodes=2)


@pytest.mark.parametrize(
    ("environ", "settings", "message"),
    [
        ({}, {"nodes": 2, "node_rank": 2, "leader": "a:1"}, "node_rank is 2, and nodes is 2; wanted 0 to 1"),
        ({}, {"node_rank": 1}, "leader is not given"),
        ({}, {"node_rank": 0, "leader": "a:1"}, "nodes is not given"),
        ({}, {"leader": "a:1"}, "give --nodes and --node-rank"),
        ({}, {"leader": "ray"}, "--nodes N says over how many hosts"),
        ({}, {"nodes": 3, "node_rank": 0, "leader": "a:1"}, "tp is 4, and there are 3 nodes.*--tp 3"),
        ({}, {"nodes": 2, "node_rank": 0, "leader": "a"}, "leader is 'a'; wanted HOST:PORT"),
        ({}, {"nodes": 2, "node_rank": 0, "leader": "a:70000"}, "leader is 'a:70000'"),
        *(
            ({}, {"nodes": 2, "node_rank": 0, "leader": text}, f"leader is '{text}'; wanted HOST:PORT")
            for text in ("a:0", "a:65536", ":1", "a:-1")
        ),
        (TORCHRUN, {"nodes": 2}, "nodes is 2, and torchrun has started 4; leave --nodes out"),
        (TORCHRUN, {"tp": 1}, "tp is 1, and there are 4 nodes by torchrun.*--tp 4"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, {}, "WORLD_SIZE is 'many'; wanted a number"),
    ],
)
def test_what_is_incomplete_or_contradicts_itself_is_refused(
    environ: Mapping[str, str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(environ, **settings)


def test_with_nodes_ray_places_them_and_not_replicas() -> None:
    config, server = resolve_config({"tp": 4, "nodes": 2}, {}), resolve_server_config({"ray": "head:1"}, {})
    placement, config, server = placed_server(config, server)
    assert placement.cluster == "head:1" and config.leader == "ray:head:1" and server.ray is None
    alone = resolve_server_config({"ray": "auto", "replicas": 2}, {})
    assert placed_server(resolve_config({}, {}), alone)[2].ray == "auto"


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"replicas": 2}, "held by 2 nodes, and --replicas is given; leave --replicas out"),
        ({"ray_resources": ("CPU=4",), "ray": "auto"}, "--ray-resources is given"),
    ],
)
def test_what_is_for_replicas_is_refused_with_nodes(server: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed_server(resolve_config({"tp": 4, "nodes": 2, "leader": "ray"}, {}), resolve_server_config(server, {}))


def test_a_leader_that_can_not_be_reached_is_named_with_its_port_and_the_seconds() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(WorkerLost, match=rf"at 127.0.0.1, port {port} in 1 s.*--join-timeout"):
            host_process.reach("127.0.0.1", port, 1.0)


def test_a_name_that_means_this_machine_is_said() -> None:
    with pytest.raises(WorkerLost, match=r"localhost is .*127\.0\.0\.1.* here"):
        host_process.reach("localhost", 9, 0.6)


def test_the_address_for_all_is_one_by_which_another_machine_has_reached_the_leader() -> None:
    def joined(reached: str) -> Joined:
        nothing: Any = None
        return Joined(nothing, nothing, "", reached)

    assert team.advertised([joined("127.0.0.1"), joined("10.0.0.1"), joined("10.0.1.1")]) == "10.0.0.1"
    assert team.advertised([joined("127.0.0.1")]) == "127.0.0.1"


def test_a_leader_listens_everywhere_where_its_name_means_loopback_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert team.bindable("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: [(0, 0, 0, "", ("127.0.1.1", 0))])
    assert team.bindable("host-a") == "", "elsewhere the name means another address"


def spec_for(own_address: str, neighbours: int = 1) -> tuple[RankSpec, Place]:
    place = Place(0, Topology(tp=2), "tcp://10.0.0.1:1", 0, neighbours)
    variables = (Communication("x", interface_variable="X_IFNAME").interface_variable,)
    spec = RankSpec({}, "", place.as_plain(), "", 0, "", own_address=own_address, interface_variables=variables)
    return spec, place


@pytest.mark.parametrize(("is_host", "index"), [(False, 3), (True, 2)])
def test_ranks_of_one_machine_have_consecutive_devices_or_share_the_processor(is_host: bool, index: int) -> None:
    """Rank 5 is the second one of its machine, whose first rank has device 2."""
    chosen = ChosenDevice("x", "", "", 1, "", 2)
    place = Place(5, Topology(tp=8), "tcp://10.0.0.1:1", 1, 4)
    here = spec_of(EngineConfig(), chosen, place, is_host=is_host, address="a", epoch=7, secret="s", beat=0.5)
    nothing: Any = None
    order = Order([], "10.0.0.1", 1, 2, 7, "s", 0.5, 5.0, ("X",), {})
    node = Node(Placement("hand", ""), nothing, 1.0)
    there = node._spec(order, place.as_plain(), "10.0.0.1", "10.0.0.2", EngineConfig(), (chosen, is_host))
    for spec in (here, there):
        assert ChosenDevice.decode(spec.chosen).index == index
        assert spec.config["device"] == ("x" if is_host else "x:3")
        assert (spec.epoch, spec.secret, spec.beat) == (7, "s", 0.5)
        assert Place.from_plain(spec.place).rank == 5
    assert (there.own_address, there.interface_variables) == ("10.0.0.2", ("X",))


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked of Linux")
def test_libraries_are_told_the_interface_of_the_address_that_others_reach() -> None:
    environ = {"RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "PATH": "/bin"}
    tell_interface(*spec_for("127.0.0.1"), environ)
    assert interface_of("127.0.0.1") == "lo"
    assert environ == {"PATH": "/bin", HOST_INTERFACE: "lo", "X_IFNAME": "lo"}
    environ = {"X_IFNAME": "mine"}
    tell_interface(*spec_for("127.0.0.1"), environ)
    assert environ["X_IFNAME"] == "mine", "what a person has set stays"
    assert interface_of("203.0.113.7") is None


def test_hosts_name_each_thing_in_which_they_differ(tmp_path: Path) -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == ["b is 2 and 3", "c is None and 4"]
    (tmp_path / "config.json").write_text("{}")
    before = files_digest(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert files_digest(tmp_path) != before
    assert EngineConfig().nodes == 1


def test_what_a_node_leaves_to_the_leader_is_no_difference() -> None:
    decided, open_ = ({"--speculative": value, "--tp": 2} for value in ("ngram", "auto"))
    assert differences(decided, open_) == [] == differences(open_, open_)
    assert differences(open_, decided) == ["--speculative is auto and ngram"]
    assert differences(decided, {**open_, "--tp": "auto"}) == ["--tp is 2 and auto"]


def test_files_that_differ_in_name_size_or_beginning_are_not_the_same(tmp_path: Path) -> None:
    """Includes a truncated file, as of an interrupted download."""
    weights = bytes(range(256)) * (2 * BLOCK // 256)
    kinds = {
        "the same": {"config.json": b"{}", "model.safetensors": weights},
        "another beginning": {"config.json": b"{}", "model.safetensors": b"x" + weights[1:]},
        "cut short": {"config.json": b"{}", "model.safetensors": weights[:-1]},
        "cut at what is read": {"config.json": b"{}", "model.safetensors": weights[:BLOCK]},
        "longer": {"config.json": b"{}", "model.safetensors": weights + b"x"},
        "another name": {"config.json": b"{}", "model-1.safetensors": weights},
        "one missing": {"model.safetensors": weights},
        "one more": {"config.json": b"{}", "model.safetensors": weights, "more": b""},
        "moved bounds": {"config.json": b"{", "model.safetensors": b"}" + weights[1:]},
    }
    digests = dict[str, str]()
    for kind, contents in kinds.items():
        (tmp_path / kind).mkdir()
        for name, data in contents.items():
            (tmp_path / kind / name).write_bytes(data)
        digests[kind] = files_digest(tmp_path / kind)
    assert len(set(digests.values())) == len(kinds), digests
    shutil.copytree(tmp_path / "the same", tmp_path / "elsewhere")
    assert files_digest(tmp_path / "elsewhere") == digests["the same"]
    alone = {files_digest(tmp_path / kind / "model.safetensors") for kind in ("the same", "cut short", "longer")}
    assert len(alone) == 3, "a file by itself, such as a GGUF file"


def test_hosts_compare_every_setting_but_where_they_are_and_who(tmp_path: Path) -> None:
    choice: Any = SimpleNamespace(chosen=SimpleNamespace(name="x", distribution="x", version="1"))
    facts = shared_facts(EngineConfig(), tmp_path, choice)
    settings = {f"--{each.name.replace('_', '-')}" for each in fields(EngineConfig)}
    own = "model hf-token device node-rank leader join-timeout threads system-root sources"
    assert settings - facts.keys() == {f"--{name}" for name in own.split()}


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked of Linux")
def test_the_interface_of_a_longer_address_is_the_one_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(0xFE80 << 112 | 5, "eth0"), (0xFD00 << 112 | 1, "eth1"), (1, "lo")]
    (tmp_path / "if_inet6").write_text("".join(f"{address:032x} 02 40 20 80 {name:>8}\n" for address, name in rows))
    monkeypatch.setattr(interface, "_IPV6", tmp_path / "if_inet6")
    asked = ("fd00::1", "fe80::5%eth0", "::1", "fd00::2")
    assert [interface_of(address) for address in asked] == ["eth1", "eth0", "lo", None]
    monkeypatch.setattr(interface, "_IPV6", tmp_path / "none")
    assert interface_of("fd00::1") is None


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked of Linux")
@pytest.mark.parametrize(("neighbours", "name"), [(2, "lo"), (1, None)])
def test_ranks_of_one_machine_meet_on_loopback_and_others_only_where_their_address_is_known(
    neighbours: int, name: str | None
) -> None:
    environ: dict[str, str] = {}
    tell_interface(*spec_for("", neighbours), environ)
    assert environ == ({} if name is None else {HOST_INTERFACE: name, "X_IFNAME": name})


def test_facts_of_a_host_cross_to_another_and_name_versions_and_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice: Any = SimpleNamespace(chosen=SimpleNamespace(name="x", distribution="sglcore-x", version="1.5"))
    monkeypatch.setattr(agreement, "LIBRARIES", (*agreement.LIBRARIES, "no-such-library"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "config.json").write_text("{}")
    facts = shared_facts(EngineConfig(graph_buckets=(1, 2)), tmp_path, choice)
    assert facts["the device"] == "x (sglcore-x 1.5)" and facts["no-such-library"] == "none"
    assert {name: facts[name] for name in ("torch", "numpy")} == {name: version(name) for name in ("torch", "numpy")}
    assert facts["the files of the model"] == files_digest(tmp_path)
    assert (
        facts["--graph-buckets"] == [1, 2]
        and differences(facts, msgspec.msgpack.decode(msgspec.msgpack.encode(facts))) == []
    )


def test_a_node_has_the_leaders_decisions_and_its_own_other_settings() -> None:
    leader, own = (
        EngineConfig(speculative="ngram", device="a"),
        EngineConfig(speculative="auto", device="b", page_size=8),
    )
    assert with_decisions(own, decisions(leader)) == replace(own, speculative="ngram")
    assert with_decisions(own, decisions(EngineConfig())).speculative is None
