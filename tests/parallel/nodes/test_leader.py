"""The leader's side of ranks, without ranks: which connections it accepts, what it receives and
sends, and how it places ranks."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.core.ledger import DecisionLedger
from sglcore.device.choice import ChosenDevice
from sglcore.engine.ranks import ranks_start
from sglcore.engine.ranks.codec import decode, encode
from sglcore.engine.ranks.hosts import Gathering, Joined, NodeFacts, Order, spec_at
from sglcore.engine.ranks.rank_group import RankGroup, close_all
from sglcore.engine.ranks.rank_launch import Placement
from sglcore.engine.ranks.team import Maker
from sglcore.engine.ranks.watch import Member, Patience, Watch
from sglcore.engine.ranks.wire import Channel, Kind, connect, listen
from sglcore.engine.start import embedded_model
from sglcore.runtime.parallel import process_group
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.worker.model_worker import BatchResult, Ticket
from sglcore.worker.step_plan import StepPlan
from sglcore.worker.topology import Communication, Place, Topology
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import make_limits

EPOCH = 7
SOON = Patience(silence=60.0, starting=60.0, settle=0.1, round=0.05, closing=0.2)


class Process:
    """A process that runs until it is killed, or has ended with a code."""

    pid = 1

    def __init__(self, code: int | None = None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float) -> int:
        if self.code is None:
            raise TimeoutError
        return self.code

    def kill(self) -> None:
        self.code = -signal.SIGKILL


class Far:
    """The far ends of the channels of some ranks, to send and receive in their place."""

    def __init__(self, count: int) -> None:
        steps, control = ([socket.socketpair() for _ in range(count)] for _ in range(2))
        self.steps = [Channel(theirs, EPOCH) for _, theirs in steps]
        self.control = [Channel(theirs, EPOCH) for _, theirs in control]
        self.near = [Channel(ours, EPOCH) for ours, _ in steps]
        self.members = [
            Member(rank, Process(), Channel(ours, EPOCH), float("inf")) for rank, (ours, _) in enumerate(control)
        ]
        self.told: list[tuple[str, int, int]] = []
        self.watch = Watch(self.members, SOON, lambda *word: self.told.append(word))

    def say(self, rank: int, kind: Kind, values: Any) -> None:
        self.control[rank].send(kind, msgspec.msgpack.encode(values))

    def close(self) -> None:
        close_all(self.watch, (*self.near, *self.steps, *self.control))


@contextmanager
def far(count: int) -> Iterator[Far]:
    made = Far(count)
    try:
        yield made
    finally:
        made.close()


def gathered(folder: Path, words: list[tuple[str, int, str]], processes: dict[int, Any], patience: Patience) -> Any:
    """The result of gathering processes that connect with these words, and their ends of the
    channels."""
    listener, address = listen(folder)
    ends = []
    for secret, rank, use in words:
        ends.append(Channel(connect(address), EPOCH))
        ends[-1].send(Kind.HELLO, msgspec.msgpack.encode([secret, rank, use, 1]))
    try:
        return ranks_start._gather(listener, processes, EPOCH, "right", patience), ends
    finally:
        listener.close()


def test_who_does_not_know_the_secret_is_no_rank(tmp_path: Path) -> None:
    words = [(secret, 0, use) for use in ("steps", "control") for secret in ("wrong", "", "right")]
    found, ends = gathered(tmp_path, words, {0: Process()}, SOON)
    for use, end in (("steps", ends[2]), ("control", ends[5])):
        found[0, use].send(Kind.BEAT, use.encode())
        assert bytes(end.receive().body) == use.encode()
    for each in (*ends, *found.values()):
        each.close()


def test_a_rank_that_is_known_may_be_silent_for_longer_than_one_that_has_not_said_who_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may take any time."""
    monkeypatch.setattr(ranks_start, "HELLO_SECONDS", 0.05)
    found, ends = gathered(tmp_path, [("right", 0, use) for use in ("steps", "control")], {0: Process()}, SOON)
    for use, end in zip(("steps", "control"), ends, strict=True):
        later = threading.Timer(0.12, end.send, (Kind.RESULT, use.encode()))
        later.start()
        assert bytes(found[0, use].receive().body) == use.encode()
        later.join()
    for each in (*ends, *found.values()):
        each.close()


def test_a_rank_that_ends_before_it_comes_up_is_named_and_one_that_does_not_come(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match=r"rank 1 \(process 1\) ended by SIGKILL before it came up"):
        gathered(tmp_path, [], {0: Process(), 1: Process(-signal.SIGKILL)}, replace(SOON, starting=5.0))
    (tmp_path / "ranks").unlink()
    words = [("right", 0, use) for use in ("steps", "control")]
    with pytest.raises(WorkerLost, match=r"ranks \[1\] have not come up in 0 s"):
        gathered(tmp_path, words, {0: Process(), 1: Process()}, replace(SOON, starting=0.1))


def test_one_rank_says_how_far_all_are() -> None:
    with far(2) as ranks:
        for rank in range(2):
            ranks.say(rank, Kind.PROGRESS, [f"weights of {rank}", 1, 2])
        for _ in range(4):
            assert ranks.watch.go_round() is None
        assert ranks.told == [("weights of 0", 1, 2)]
        assert [member.phase for member in ranks.members] == ["weights of 0", "weights of 1"]


def test_ranks_with_other_limits_are_not_one_worker() -> None:
    for other, is_same in ((make_limits(), True), (make_limits(num_pages=31), False)):
        with far(2) as ranks:
            for rank, limits in enumerate((make_limits(), other)):
                ranks.say(rank, Kind.READY, {"limits": asdict(limits)})
            if is_same:
                assert ranks_start._come_up(ranks.watch) == other
                continue
            with pytest.raises(WorkerLost, match="rank 0 has .*num_pages=32.*rank 1 has .*num_pages=31"):
                ranks_start._come_up(ranks.watch)


@contextmanager
def grouped(ranks: Far, shards: int) -> Iterator[tuple[RankGroup, list[str]]]:
    ended: list[str] = []
    process_group = RankGroup(ranks.watch, ranks.near, make_limits(), shards, lambda: ended.append("at the end"))
    try:
        yield process_group, ended
    finally:
        process_group.close()
        process_group.close()


def test_each_shard_keeps_the_settings_of_its_own_requests() -> None:
    """Shards number their compositions independently, so the same number may occur in both."""
    drive = Drive(overlap=False)
    drive.add("a", 3)
    batch = drive.scheduler.next_batch()
    assert batch is not None
    sampling = SamplingBatch.from_params([(SamplingParams(), 0)])
    with far(4) as ranks, grouped(ranks, 2) as (process_group, ended):
        for shard in (0, 1, 0):
            batch.sampling, batch.step_plan = sampling, StepPlan((3, 3), shard=shard)
            process_group.submit(batch)
        found = [[decode(each.receive().body) for _ in range(1 + (rank < 2))] for rank, each in enumerate(ranks.steps)]
        assert [[step.sampling is not None for step in each] for each in found] == [[True, False]] * 2 + [[True]] * 2
        assert not ended
    assert ended == ["at the end"]


def result(step: int) -> BatchResult:
    return BatchResult(step, np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.bool_))


def test_results_of_steps_that_nobody_collects_are_passed_over() -> None:
    with far(2) as ranks, grouped(ranks, 1) as (process_group, _):
        for step in (1, 2):
            ranks.steps[0].send(Kind.RESULT, encode(result(step)))
        ticket = Ticket(2, process_group._shards[0])
        assert process_group.collect(ticket).step == 2
        with pytest.raises(ValueError, match="step 2 was collected before"):
            process_group.collect(ticket)


def maker(placement: Placement) -> Maker:
    choice: Any = SimpleNamespace(
        package=SimpleNamespace(ranks_share_device=False), chosen=ChosenDevice("x", "", "", 1, "")
    )
    nothing: Any = None
    return Maker(EngineConfig(), choice, Communication("x"), Topology(tp=8), nothing, {}, placement)


def test_ranks_of_a_node_stand_behind_those_of_its_neighbours() -> None:
    """Four nodes of two ranks each, two nodes on each machine."""
    made = maker(Placement("torchrun", "", 4))
    places = made._places(3, 1, 2, "somewhere")
    assert [(place.rank, place.local, place.neighbours) for place in places] == [(6, 2, 4), (7, 3, 4)]
    chosen = ChosenDevice("x", "", "", 1, "", index=1).encode()
    for devices, fits in ((5, True), (4, False), (0, True)):
        facts = NodeFacts(3, chosen, devices, 1, 2, {})
        if fits:
            made._check_devices(facts, "10.0.0.2")
            continue
        with pytest.raises(ConfigError, match=r"node 3 \(host 10.0.0.2\) needs x up to number 4, and has 4"):
            made._check_devices(facts, "10.0.0.2")


@pytest.mark.parametrize(
    ("placement", "index", "devices", "fits"),
    [
        (Placement("this machine", ""), 0, 4, True),
        (Placement("this machine", ""), 1, 4, False),
        (Placement("hand", "", 2), 0, 2, True),
        (Placement("torchrun", "", 4, neighbours=4), 0, 3, False),
        (Placement("torchrun", "", 4, neighbours=2), 1, 3, True),
    ],
)
def test_ranks_here_have_a_device_each(placement: Placement, index: int, devices: int, fits: bool) -> None:
    package = SimpleNamespace(name="x", is_host=False, ranks_share_device=False, communication=Communication("x"))
    choice: Any = SimpleNamespace(
        package=package,
        chosen=ChosenDevice("x", "", "", 1, "", index),
        report=SimpleNamespace(devices=[None] * devices),
    )
    if fits:
        ranks_start.check_devices(EngineConfig(tp=4), choice, placement)
        return
    with pytest.raises(ConfigError, match=f"tp is 4, and 'x' has {devices} devices"):
        ranks_start.check_devices(EngineConfig(tp=4), choice, placement)


def test_a_node_that_follows_starts_no_ranks_for_requests() -> None:
    package = SimpleNamespace(name="x", is_host=True, ranks_share_device=True, communication=Communication("x"))
    choice: Any = SimpleNamespace(
        package=package, chosen=ChosenDevice("x", "", "", 1, ""), report=SimpleNamespace(devices=[])
    )
    config = EngineConfig(tp=2, nodes=2, node_rank=1, leader="127.0.0.1:1", join_timeout=1.0)
    ledger, told = DecisionLedger(), []
    with pytest.raises(ConfigError, match="this is node 1 by hand, which takes no requests; start it with"):
        ranks_start.start_ranks(config, embedded_model(), choice, ledger, lambda *word: told.append(word))
    assert not told and not ledger.rows


def test_nodes_are_those_that_the_leader_waits_for_and_each_of_them_once() -> None:
    nothing: Any = None
    fits: list[tuple[int, str]] = []
    gathering = Gathering(nothing, 3, {"a": 1}, nothing, lambda facts, address: fits.append((facts.node, address)))

    def joined(node: int, **shared: int) -> Joined:
        return Joined(NodeFacts(node, "", 0, 0, 1, {"a": 1, **shared}), nothing, f"host{node}", "")

    for node in (-1, 0, 3):
        with pytest.raises(ConfigError, match=f"host host{node} says that it is node {node} of 3"):
            gathering._check(joined(node))
    for node in (1, 2):
        gathering._check(joined(node))
    assert fits == [(1, "host1"), (2, "host2")]
    gathering.found[2] = joined(2)
    with pytest.raises(ConfigError, match="hosts host2 and host2 both say that they are node 2"):
        gathering._check(joined(2))
    with pytest.raises(ConfigError, match=r"node 0 and node 1 \(host host1\) differ: a is 1 and 2"):
        gathering._check(joined(1, a=2))


def test_a_leader_with_a_longer_address_is_found_by_it() -> None:
    order = Order([], "fd00::1", 1, 2, EPOCH, "secret", 1.0, 5.0, (), {"speculative": "auto"})
    spec = spec_at(order, {"rank": 1}, "fd00::1", "fd00::2", {}, "")
    assert (spec.place["meeting"], spec.address) == ("tcp://[fd00::1]:2", "tcp:fd00::1:1")
    assert spec_at(order, {}, "10.0.0.1", "", {}, "").place["meeting"] == "tcp://10.0.0.1:2"


@pytest.mark.parametrize("name", ["T5GemmaForConditionalGeneration", "BloomForCausalLM"])
def test_a_model_that_runs_by_transformers_class_is_refused_by_that_reason(name: str, tmp_path: Path) -> None:
    """The reason is not a missing field in its configuration."""
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{name}"], "model_type": "x"}}')
    package = SimpleNamespace(name="x", is_host=True, ranks_share_device=True, communication=Communication("x"))
    choice: Any = SimpleNamespace(
        package=package, chosen=ChosenDevice("x", "", "", 1, ""), report=SimpleNamespace(devices=[])
    )
    with pytest.raises(
        ConfigError, match=f"no model file for the architecture '{name}'.*cannot be divided.*--tp 1"
    ) as told:
        ranks_start.check_ranks(EngineConfig(model=str(tmp_path), tp=2), tmp_path, choice)
    assert "download" not in str(told.value)


def test_ranks_of_several_hosts_that_do_not_meet_say_which_ports_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "MEETING", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    place = Place(1, Topology(tp=2), f"tcp://127.0.0.1:{port}", 0, 1)
    with pytest.raises(WorkerLost, match=f"rank 1 has not met the others at tcp://127.0.0.1:{port}.*from 1024 on open"):
        process_group.join(place, Communication("gloo"))
