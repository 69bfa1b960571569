"""The process of a rank apart from its model: what it tells its leader while it works, what it is
started with, and which network it uses."""

from __future__ import annotations

import io
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.config.engine_config import EngineConfig, plain_config
from sglcore.core.errors import DeviceError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.choice import ChosenDevice
from sglcore.engine.ranks import rank_process
from sglcore.engine.ranks.codec import decode, encode
from sglcore.engine.ranks.rank_process import HOST_INTERFACE, LEADER_GONE, start_rank, tell_interface
from sglcore.engine.ranks.spec import RankSpec, spawn_local
from sglcore.engine.ranks.wire import Channel, Gone, Kind
from sglcore.worker.model_worker import Limits
from sglcore.worker.topology import Place, Topology
from tests.parallel.nodes.test_rank_control import Recorded, steps_of
from tests.schedule.fake_worker import make_limits

CHOSEN = ChosenDevice("x", "", "", 1, "", 3)
PLACE = Place(0, Topology(tp=2), "", 0, 2)


class Phased(Recorded):
    """A worker and a control channel that record each phase, with the step at that time."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "phase" and value:
            self.phases.append((value, self.step))

    def submit(self, batch: Any) -> int:
        self.phases.append(("submit", self.step))
        return super().submit(batch)

    def collect(self, ticket: int) -> Any:
        self.phases.append(("collect", ticket))
        return super().collect(ticket)


def test_a_rank_says_of_each_step_that_it_runs_and_then_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader names the phase of a rank that dies; a step is named before it may fail."""
    seen = Phased()
    control: Any = seen
    monkeypatch.setattr(rank_process, "start_rank", lambda *given: (seen, {}))
    near, far = (Channel(each, 0) for each in socket.socketpair())
    for batch in steps_of(2):
        far.send(Kind.STEP, encode(batch))
        far.send(Kind.COLLECT)
    far.send(Kind.CLOSE)
    spec = RankSpec(plain_config(EngineConfig()), CHOSEN.encode(), {}, "", 0, "")
    rank_process.serve(spec, PLACE, near, control)
    steps = [(("submit", step), ("collect", step), ("waiting", step)) for step in (0, 1)]
    assert seen.phases == [
        ("waiting", -1),
        *(("a step", 0), *steps[0]),
        *(("a step", 1), *steps[1]),
        ("closing", 1),
    ]
    assert [decode(far.receive().body).step for _ in range(2)] == [0, 1]
    near.close()
    far.close()


def begun(monkeypatch: pytest.MonkeyPatch, chosen: ChosenDevice, **settings: Any) -> dict[str, Any]:
    """The report of a rank that chose the device `CHOSEN`; `chosen`: what its leader chose. Its
    bring-up records a lesser choice than was requested."""

    def bring_up(config: Any, folder: Path, choice: Any, ledger: DecisionLedger, *more: Any) -> Any:
        asked.append((config, folder, choice, *more))
        ledger.record(Row("pages", "8", "4", "no room", downgrade=True))
        return {"worker": worker}, {"load": 2.0}

    asked: list[Any] = []
    worker = SimpleNamespace(limits=make_limits())
    choice = SimpleNamespace(chosen=CHOSEN)
    control: Any = SimpleNamespace(progress="progress")
    monkeypatch.setattr(rank_process, "bring_up", bring_up)
    monkeypatch.setattr(rank_process, "choose", lambda config, ledger: choice)
    monkeypatch.setattr(rank_process, "model_folder", lambda config: Path("folder"))
    config = EngineConfig(tp=2, **settings)
    found, report = start_rank(config, chosen, PLACE, control)
    assert found is worker and asked == [(config, Path("folder"), choice, "progress", PLACE)]
    return report


def test_a_rank_is_brought_up_at_its_place_and_reports_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report = begun(monkeypatch, CHOSEN)
    row = asdict(Row("pages", "8", "4", "no room", downgrade=True))
    assert report == {"limits": asdict(make_limits()), "ledger": [row], "seconds": {"load": 2.0}}
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(report))
    assert msgspec.convert(sent["limits"], Limits) == make_limits() and sent["ledger"] == [row]


def test_a_rank_accepts_no_lesser_choice_where_its_leader_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rank_process.SglcoreError, match=r"pages: found 4 \(no room\); wanted 8"):
        begun(monkeypatch, CHOSEN, strict=True)


@pytest.mark.parametrize("other", [replace(CHOSEN, index=2), replace(CHOSEN, name="y")], ids=["index", "name"])
def test_a_rank_that_finds_another_device_than_its_leader_chose_loads_nothing(
    other: ChosenDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match=f"found x:3 as the device; wanted {other.name}:{other.index}"):
        begun(monkeypatch, other)


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_whose_leader_leaves_while_it_introduces_itself_has_lost_it(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends without a message: there is nobody who reads one."""
    uses: list[str] = []

    def channel(spec: RankSpec, place: Place, use: str) -> Channel:
        uses.append(use)
        if len(uses) > at:
            raise Gone("closed")
        return Channel(near, 0)

    near, far = socket.socketpair()
    monkeypatch.setattr(rank_process.signal, "signal", lambda *given: None)
    monkeypatch.setattr(rank_process, "tell_interface", lambda *given: None)
    monkeypatch.setattr(rank_process, "_channel", channel)
    assert rank_process.run(RankSpec({}, "", PLACE.as_plain(), "unix:none", 7, "word")) == LEADER_GONE
    assert uses == ["steps", "control"][: at + 1]
    near.close()
    far.close()


@pytest.mark.parametrize("beat", [0.25, 7.0])
def test_a_rank_beats_as_often_as_its_leader_says(beat: float, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[Any] = []
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank_process.signal, "signal", lambda *given: None)
    monkeypatch.setattr(rank_process, "tell_interface", lambda *given: told.append(given))
    monkeypatch.setattr(rank_process, "_channel", lambda spec, place, use: use)
    monkeypatch.setattr(rank_process, "Control", lambda channel, seconds: beats.append(seconds) or channel)
    monkeypatch.setattr(rank_process, "serve", lambda spec, place, steps, control: beats.append((steps, control)))
    spec = RankSpec({}, "", PLACE.as_plain(), "unix:none", 7, "word", beat=beat)
    assert rank_process.run(spec) == 0
    assert beats == [beat, ("steps", "control")] and told == [(spec, PLACE, os.environ)]


@pytest.mark.parametrize("code", [0, LEADER_GONE])
def test_the_process_of_a_rank_runs_the_spec_on_its_standard_input(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[RankSpec] = []
    opened: list[Any] = []

    def opens(*given: Any, **how: Any) -> io.BytesIO:
        opened.append((given, how))
        return io.BytesIO(msgspec.json.encode(spec) + b"\nmore")

    spec = RankSpec({"tp": 2}, CHOSEN.encode(), PLACE.as_plain(), "unix:a", 7, "word", 0.5, "10.0.0.2", ("X", "Y"))
    monkeypatch.setattr(rank_process, "open", opens, raising=False)
    monkeypatch.setattr(rank_process, "run", lambda given: ran.append(given) or code)
    assert rank_process.main() == code and ran == [spec]
    assert opened == [((0, "rb"), {"closefd": False})], "the descriptor stays open and is not given to other files"


def test_a_rank_is_not_in_the_group_of_its_leader() -> None:
    """A signal from the terminal is for the leader, which closes its ranks."""
    process: Any = spawn_local(RankSpec({}, "", PLACE.as_plain(), "unix:none", 7, "word"))
    try:
        assert os.getsid(process.pid) == process.pid
    finally:
        process.kill()
        process.wait(30.0)


@pytest.mark.parametrize("neighbours", [1, 2])
@pytest.mark.parametrize("name", ["eth7", None])
def test_ranks_of_several_nodes_meet_where_their_nodes_do_even_on_one_machine(
    neighbours: int, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loopback is for ranks that no other host needs to reach; without a known interface the
    libraries choose."""
    asked: list[str] = []
    monkeypatch.setattr(rank_process, "interface_of", lambda address: asked.append(address) or name)
    place = replace(PLACE, neighbours=neighbours)
    spec = RankSpec(
        {}, "", place.as_plain(), "tcp:10.0.0.1:5", 0, "", own_address="10.0.0.2", interface_variables=("X", "Y")
    )
    environ: dict[str, str] = {"Y": "mine"}
    tell_interface(spec, place, environ)
    assert asked == ["10.0.0.2"]
    assert environ == ({"Y": "mine"} if name is None else {HOST_INTERFACE: name, "X": name, "Y": "mine"})


def test_variables_of_launchers_are_removed_and_no_others() -> None:
    kept = {"PATH": "/bin", "RANKS": "1", "TORCH_LOGS": "all", "LOCAL_WORLD": "3", HOST_INTERFACE: "lo"}
    removed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    environ = {**kept, **dict.fromkeys(removed, "1")}
    spec = RankSpec({}, "", PLACE.as_plain(), "", 0, "", own_address="127.0.0.1")
    tell_interface(spec, PLACE, environ)
    assert environ == kept
