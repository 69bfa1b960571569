"""A node other than the first, against a clock and a leader of the test: how long it tries, what it
reports of its devices, and what is left when it ends."""

from __future__ import annotations

import io
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.device.choice import ChosenDevice
from sglcore.engine.ranks import host_process
from sglcore.engine.ranks.host_process import ONE_TRY, TRY_EVERY, Following, Node, Stopping, reach
from sglcore.engine.ranks.hosts import EPOCH, NodeFacts, host_spec
from sglcore.engine.ranks.rank_launch import Placement
from sglcore.engine.ranks.rank_process import LEADER_GONE
from sglcore.engine.ranks.spec import RankSpec
from sglcore.engine.ranks.wire import Channel, Gone, Kind
from sglcore.engine.start import embedded_model
from tests.parallel.nodes.test_nodes import PATIENCE, Process, node, order, pair, read


@pytest.mark.parametrize(
    ("seconds", "takes", "tries"),
    [
        (0.0, 0.0, [0.1]),
        (0.4, 0.0, [0.4]),
        (1.2, 0.0, [1.2, 0.7, 0.2]),
        (12.0, 1.0, [ONE_TRY, ONE_TRY, 1.0]),
        (3.0, 1.0, [3.0]),
    ],
)
def test_a_leader_is_tried_until_the_time_is_over_and_not_for_longer(
    seconds: float, takes: float, tries: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`takes`: the part of its time that a try takes to fail."""
    clock, tried = [50.0], list[float]()

    def connect(address: str, timeout: float) -> socket.socket:
        assert address == "tcp:10.0.0.1:5"
        tried.append(timeout)
        clock[0] += takes * timeout
        raise TimeoutError("nobody")

    def sleep(wait: float) -> None:
        assert wait == TRY_EVERY
        clock[0] += wait

    monkeypatch.setattr(host_process, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(host_process, "connect", connect)
    with pytest.raises(WorkerLost, match=f"at 10.0.0.1, port 5 in {seconds:.0f} s: nobody; wanted"):
        reach("10.0.0.1", 5, seconds)
    assert tried == pytest.approx(tries) and clock[0] <= 50.0 + seconds


@pytest.mark.parametrize(
    ("resolved", "note"), [(["127.0.1.1"], "; h is 127.0.1.1 here"), (["b", "a", "b"], "; h is a, b here"), ([], "")]
)
def test_the_addresses_of_a_leaders_name_are_in_the_error(
    resolved: list[str], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*asked: Any) -> list[Any]:
        if not resolved:
            raise OSError("no such name")
        return [(0, 0, 0, "", (each, 0)) for each in resolved]

    monkeypatch.setattr(host_process.socket, "getaddrinfo", getaddrinfo)
    assert host_process._resolved("h") == note
    assert host_process._resolved("127.0.1.1") == (
        "" if resolved == ["127.0.1.1"] else note.replace(" h ", " 127.0.1.1 ")
    )


def chosen_by(is_host: bool, devices: int) -> Any:
    chosen = ChosenDevice("x", "x", "1", 1, "", 2)
    report = SimpleNamespace(devices=[None] * devices)
    return SimpleNamespace(
        chosen=chosen, package=SimpleNamespace(is_host=is_host, ranks_share_device=is_host), report=report
    )


@pytest.mark.parametrize(("is_host", "devices"), [(True, 0), (False, 3)])
def test_a_node_reports_how_many_devices_it_has_unless_that_is_the_processor(
    is_host: bool, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = chosen_by(is_host, 3)
    monkeypatch.setattr(host_process, "choose", lambda config, ledger: choice)
    monkeypatch.setattr(host_process, "shared_facts", lambda *given: {"given": len(given)})
    with pair() as (near, far):
        config, device = node()._introduce(near)
        frame = far.receive()
        assert (config.tp, device) == (4, (choice.chosen, is_host)) and frame.kind is Kind.HELLO
        facts = msgspec.msgpack.decode(frame.body, type=NodeFacts)
        assert facts == NodeFacts(1, choice.chosen.encode(), devices, 1, 2, {"given": 3})


@pytest.mark.parametrize("error", [ConfigError("no model"), Gone("closed")])
def test_a_node_that_can_not_take_part_says_why_if_its_leader_is_there(error: Exception) -> None:
    def prepare() -> Any:
        raise error

    with pair() as (near, far):
        made = Node(Placement("hand", "", 2, 1), prepare, PATIENCE)
        with pytest.raises(type(error), match=str(error)):
            made._introduce(near)
        near.close()
        if isinstance(error, ConfigError):
            frame = far.receive()
            assert (frame.kind, bytes(frame.body)) == (Kind.FAILED, b"no model")
        with pytest.raises(Gone):
            far.receive()


def followed(monkeypatch: pytest.MonkeyPatch, near: Channel, spawn: Callable[[RankSpec], Any], own: str) -> Node:
    """A node that reaches its leader by the channel `near`, and has there the address `own`."""

    class Reached:
        addresses = ("10.0.0.1", own)

        def __init__(self, stream: Any, epoch: int) -> None:
            assert (stream, epoch) == ("stream", EPOCH)

        def __getattr__(self, name: str) -> Any:
            return getattr(near, name)

    def found(host: str, port: int, seconds: float) -> str:
        assert (host, port, seconds) == ("10.0.0.1", 5, PATIENCE)
        return "stream"

    monkeypatch.setattr(host_process, "reach", found)
    monkeypatch.setattr(host_process, "Channel", Reached)
    placement = Placement("hand", "", 2, 1, ("10.0.0.1", 5), 1, 2)
    config = EngineConfig(tp=4, nodes=2, device="cpu")
    return Node(placement, lambda: (config, embedded_model()), PATIENCE, spawn)


@pytest.mark.parametrize(
    ("own", "leader", "address"), [("10.0.0.7", "10.0.0.1", "10.0.0.7"), ("127.0.0.1", "10.0.0.9", "10.0.0.9")]
)
def test_ranks_of_a_node_connect_to_the_address_by_which_it_reached_the_leader(
    own: str, leader: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order has another one, by which most nodes reach it: it is for the leader's machine."""
    spawned: list[RankSpec] = []

    def spawn(spec: RankSpec) -> Any:
        spawned.append(spec)
        return Process(70, 0)

    with pair() as (near, far):
        far.send(Kind.ORDER, msgspec.msgpack.encode(order(2, 3)))
        assert followed(monkeypatch, near, spawn, own).follow() == 0
    for spec in spawned:
        assert (spec.address, spec.own_address) == (f"tcp:{leader}:1", address)
        assert spec.place["meeting"] == f"tcp://{leader}:2"


@pytest.mark.parametrize("is_started", [True, False])
def test_no_rank_of_a_node_outlives_it_and_its_leader_is_hung_up_on(
    is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader is silent, or the second rank cannot be started."""
    processes: list[Process] = []
    holding: list[bool] = []

    def spawn(spec: RankSpec) -> Any:
        holding.append(made.stopping.is_holding)
        if processes and not is_started:
            raise OSError("no process")
        processes.append(Process(70))
        return processes[-1]

    with pair() as (near, far):
        made = followed(monkeypatch, near, spawn, "10.0.0.7")
        far.send(Kind.ORDER, msgspec.msgpack.encode(order(2, 3, silence=0.0)))
        if is_started:
            assert made.follow() == LEADER_GONE
        else:
            with pytest.raises(OSError, match="no process"):
                made.follow()
        assert [each.code for each in processes] == [-signal.SIGKILL] * (1 + is_started)
        assert holding == [True, True] and not made.stopping.is_holding and near.fileno() == -1


def test_a_leader_that_stops_within_a_frame_is_silent() -> None:
    with pair() as (near, far):
        ranks: Any = {2: Process(70)}
        following = Following(near, ranks, order(2, silence=0.05), Stopping(), ending=0.0)
        far._stream.sendall(b"\x47")
        assert following.run() == LEADER_GONE
        assert read(far, 1) == [(Kind.STARTED, [2, 70])]


class Ending(Process):
    """A process that ends after it was looked at once."""

    def __init__(self, then: int) -> None:
        super().__init__(70)
        self.then = then

    def poll(self) -> int | None:
        found, self.code = self.code, self.then
        return found


@pytest.mark.parametrize(
    ("codes", "wanted"), [((0, 0), 0), ((0, 1), LEADER_GONE), ((LEADER_GONE, 0), LEADER_GONE), ((1, 1), LEADER_GONE)]
)
def test_a_node_whose_leader_has_left_ends_well_only_if_all_of_its_ranks_did(
    codes: tuple[int, int], wanted: int
) -> None:
    with pair() as (near, far):
        ranks: Any = {2 + place: Ending(code) for place, code in enumerate(codes)}
        far.close()
        assert Following(near, ranks, order(2, 3), Stopping(), ending=PATIENCE).run() == wanted


@pytest.mark.parametrize(("outcome", "code"), [(0, 0), (3, 3), (ConfigError("a"), 2), (WorkerLost("a"), 1)])
def test_a_node_that_a_leader_starts_is_the_one_of_its_line_and_ends_by_its_outcome(
    outcome: int | Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = Placement("Ray", "why", 3, 2, ("10.0.0.1", 5), 1, 2, "auto", "")
    config = EngineConfig(tp=3, nodes=3, device="x", join_timeout=7.5, graph_buckets=(1, 2))
    followers: list[int] = []
    made: list[Node] = []

    def follow(node: Node) -> int:
        made.append(node)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(
        host_process, "open", lambda *given, **how: io.BytesIO(host_spec(config, placement)), raising=False
    )
    monkeypatch.setattr(host_process, "end_with_parent", followers.append)
    monkeypatch.setattr(host_process, "fetched", lambda config, progress: (config, Path("m")))
    monkeypatch.setattr(Node, "follow", follow)
    assert host_process.main() == code and followers == [LEADER_GONE]
    (found,) = made
    assert (found.placement, found.join_timeout) == (placement, 7.5)
    assert found.prepare() == (config, Path("m"))
