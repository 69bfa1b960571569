"""The start of ranks as a whole, with ranks that are only channels: what is checked before a
process starts, what each rank is told, and what is left of a start that fails."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, SglcoreError, WorkerLost
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.choice import ChosenDevice
from sglcore.engine.ranks import ranks_start
from sglcore.engine.ranks.rank_launch import ALONE, Placement
from sglcore.engine.ranks.ranks_start import RankOptions, start_ranks
from sglcore.engine.ranks.spec import RankSpec
from sglcore.engine.ranks.team import SILENCES, Team
from sglcore.engine.ranks.wire import LONGEST_HELLO, Channel, Gone, Kind, connect, listen
from sglcore.engine.start import embedded_model, no_progress
from sglcore.worker.topology import Communication, Topology
from tests.parallel.nodes.test_leader import EPOCH, SOON, Process
from tests.schedule.fake_worker import make_limits

CONFIG = EngineConfig(tp=2)


def choice_of(
    *, is_host: bool = True, index: int = 0, devices: int = 0, talks: bool = True, shares: bool = False
) -> Any:
    communication = Communication("gloo") if talks else None
    return SimpleNamespace(
        package=SimpleNamespace(
            name="x", is_host=is_host, communication=communication, ranks_share_device=is_host or shares
        ),
        chosen=ChosenDevice("x", "", "", 1, "", index),
        report=SimpleNamespace(devices=[None] * devices),
    )


class Ranks:
    """Ranks that connect and report as soon as they are started. `reports`: the report of each
    rank; `codes`: exit codes of ranks that end before they connect; `told`: the progress that each
    reports before."""

    def __init__(self, reports: dict[int, tuple[Kind, Any]], codes: dict[int, int] | None = None) -> None:
        self.reports, self.codes = reports, codes or {}
        self.told: list[tuple[str, int, int]] = []
        self.specs: list[RankSpec] = []
        self.processes: list[Process] = []
        self.ends: list[Channel] = []

    def spawn(self, spec: RankSpec) -> Any:
        rank = spec.place["rank"]
        self.specs.append(spec)
        self.processes.append(Process(self.codes.get(rank)))
        if rank not in self.codes:
            steps, control = (Channel(connect(spec.address), spec.epoch) for _ in range(2))
            for channel, use in ((steps, "steps"), (control, "control")):
                channel.send(Kind.HELLO, msgspec.msgpack.encode([spec.secret, rank, use, 1]))
                channel.wait_at_most(5.0)
            for word in self.told:
                control.send(Kind.PROGRESS, msgspec.msgpack.encode(word))
            kind, values = self.reports[rank]
            control.send(kind, msgspec.msgpack.encode(values))
            steps.send(Kind.CLOSED)
            self.ends += [steps, control]
        return self.processes[-1]

    def check_ended(self) -> None:
        """Check that no process runs and that every channel is hung up."""
        assert [each.code for each in self.processes if each.code is None] == []
        for end in self.ends:
            with pytest.raises(Gone):
                while True:
                    end.receive()
            end.close()


def open_files() -> int:
    """The number of descriptors of this process, but those of objects that nothing refers to."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def ready(rank: int, **limits: object) -> tuple[Kind, Any]:
    row = asdict(Row("pages", "auto", f"{rank}", "of this rank"))
    told = {"limits": asdict(make_limits(**limits)), "ledger": [row], "seconds": {"load": 2.0 + rank}}
    return Kind.READY, told


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Team]:
    """The teams that were closed."""
    found: list[Team] = []
    monkeypatch.setattr(Team, "close", lambda team: found.append(team))
    return found


def test_a_start_tells_each_rank_its_secret_and_beat_and_takes_the_decisions_of_the_first(
    closed: list[Team],
) -> None:
    told: list[RankSpec] = []
    for _ in range(2):
        ranks, ledger = Ranks({rank: ready(rank) for rank in range(2)}), DecisionLedger()
        group, seconds = start_ranks(
            CONFIG, embedded_model(), choice_of(), ledger, no_progress, RankOptions(ranks.spawn, SOON)
        )
        assert [each.place["rank"] for each in ranks.specs] == [0, 1] and seconds == {"load": 2.0}
        assert group.limits == make_limits(runs_ahead=True) and group.pids == (1, 1)
        assert [(row.topic, row.effective) for row in ledger.rows] == [
            *(("ranks", "2 of tensors"), ("placement", "this machine"), ("pages", "0"))
        ]
        assert "over gloo" in ledger.rows[0].reason
        assert {each.beat for each in ranks.specs} == {SOON.silence / SILENCES}
        ((address, epoch, secret),) = {(each.address, each.epoch, each.secret) for each in ranks.specs}
        assert not Path(address.removeprefix("unix:")).exists(), "nobody else can connect"
        assert 0 <= epoch < 1 << 32 and len(bytes.fromhex(secret)) == 16
        told.append(ranks.specs[0])
        assert len(closed) == len(told) - 1
        group.close()
        assert len(closed) == len(told)
        ranks.check_ended()
    assert told[0].secret != told[1].secret and told[0].epoch != told[1].epoch


def test_a_start_says_how_far_its_first_rank_is(closed: list[Team]) -> None:
    ranks, found = Ranks({rank: ready(rank) for rank in range(2)}), list[tuple[str, int, int]]()
    ranks.told = [("weights", 1, 2), ("weights", 2, 2)]
    options = RankOptions(ranks.spawn, SOON)
    told: Any = lambda *word: found.append(word)  # noqa: E731
    start_ranks(CONFIG, embedded_model(), choice_of(), DecisionLedger(), told, options)[0].close()
    ranks.check_ended()
    assert found == ranks.told


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted as Linux lists them")
@pytest.mark.parametrize(
    ("reports", "codes", "kind", "said"),
    [
        ([ready(0), ready(1)], {1: 3}, WorkerLost, r"rank 1 \(process 1\) ended with exit code 3 before it came up"),
        ([ready(0), (Kind.FAILED, ["no room", False, 2, "load"])], {}, ConfigError, "no room"),
        ([(Kind.FAILED, ["lost", False, 1, "load"]), ready(1)], {}, WorkerLost, "rank 0 failed in load: lost"),
        ([ready(0), ready(1, num_pages=31)], {}, WorkerLost, "rank 0 has .*and rank 1 has .*num_pages=31"),
    ],
    ids=["ended", "refused", "lost", "other"],
)
def test_of_a_start_that_fails_nothing_is_left(
    reports: list[Any], codes: dict[int, int], kind: type[SglcoreError], said: str, closed: list[Team]
) -> None:
    ranks = Ranks(dict(enumerate(reports)), codes)
    before = open_files()
    with pytest.raises(kind, match=said) as told:
        start_ranks(
            CONFIG, embedded_model(), choice_of(), DecisionLedger(), no_progress, RankOptions(ranks.spawn, SOON)
        )
    assert len(closed) == 1 and len(ranks.processes) == 2
    if not codes:
        assert told.tb is not None and open_files() == before + len(ranks.ends), "only the ranks' own ends are open"
    first, second = ranks.processes
    assert first.code == -signal.SIGKILL and second.code is not None
    assert not Path(ranks.specs[0].address.removeprefix("unix:")).parent.exists()
    if not codes:
        ranks.check_ended()
    for end in ranks.ends:
        end.close()


def test_ranks_are_known_by_their_hosts_and_hung_up_with_them(
    closed: list[Team], monkeypatch: pytest.MonkeyPatch
) -> None:
    tied: list[set[Any]] = []
    monkeypatch.setattr(Team, "host_of", lambda team, rank: "10.0.0.2" if rank else "")
    monkeypatch.setattr(Team, "tie", lambda team, found: tied.append(set(found)))
    ranks = Ranks({rank: ready(rank) for rank in range(2)})
    options = RankOptions(ranks.spawn, SOON)
    group, _ = start_ranks(CONFIG, embedded_model(), choice_of(), DecisionLedger(), no_progress, options)
    names = [member.name for member in group._watch.members]
    group.close()
    ranks.check_ended()
    assert names == ["rank 0 (process 1)", "rank 1 (process 1 on 10.0.0.2)"]
    assert tied == [{(rank, use) for rank in range(2) for use in ("steps", "control")}]


def test_the_ledger_has_a_row_for_each_way_in_which_a_model_is_divided() -> None:
    rows = {
        widths: [(row.topic, row.requested, row.remedy) for row in ranks_start._rows(Topology(*widths), "gloo")]
        for widths in ((4, 1, 1), (4, 2, 1), (4, 1, 2), (8, 2, 4))
    }
    ranks = {tp: ("ranks", str(tp), "--tp 1") for tp in (4, 8)}
    shards, experts = ("shards of requests", "2", "--dp 1"), "expert ranks"
    assert rows == {
        (4, 1, 1): [ranks[4]],
        (4, 2, 1): [ranks[4], shards],
        (4, 1, 2): [ranks[4], (experts, "2", "--ep 1")],
        (8, 2, 4): [ranks[8], shards, (experts, "4", "--ep 1")],
    }


def send_long(channel: Channel) -> None:
    """Send a word that is right but for its length, as far as somebody reads it."""
    with suppress(Gone):
        channel.send(Kind.HELLO, msgspec.msgpack.encode(["right", 0, "steps", "x" * LONGEST_HELLO]))


GARBLED: dict[str, Callable[[Channel], None]] = {
    "silent": lambda channel: None,
    "no msgpack": lambda channel: channel.send(Kind.HELLO, b"\xc1"),
    "empty": lambda channel: channel.send(Kind.HELLO),
    "another word": lambda channel: channel.send(Kind.HELLO, msgspec.msgpack.encode(["rïght", 0, "steps", 1])),
    "a number": lambda channel: channel.send(Kind.HELLO, msgspec.msgpack.encode(7)),
    "too few": lambda channel: channel.send(Kind.HELLO, msgspec.msgpack.encode(["right", 0])),
    "too many": lambda channel: channel.send(Kind.HELLO, msgspec.msgpack.encode(["right", 0, "steps", 1, 2])),
    "too long": lambda channel: threading.Thread(target=send_long, args=(channel,), daemon=True).start(),
    "left": lambda channel: channel.hang_up(),
}
"""First frames of connections that are no rank's."""


@pytest.mark.parametrize("kind", GARBLED)
def test_who_does_not_speak_as_a_rank_is_let_go_and_the_ranks_are_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_start, "HELLO_SECONDS", 0.05)
    listener, address = listen(tmp_path)
    other, *ends = (Channel(connect(address), EPOCH) for _ in range(3))
    GARBLED[kind](other)
    for end, use in zip(ends, ("steps", "control"), strict=True):
        end.send(Kind.HELLO, msgspec.msgpack.encode(["right", 0, use, 1]))
    found = ranks_start._gather(listener, {0: Process()}, EPOCH, "right", SOON)
    other.wait_at_most(5.0)
    with pytest.raises(Gone):
        other.receive()
    for use, end in zip(("steps", "control"), ends, strict=True):
        end.send(Kind.BEAT, use.encode())
        assert bytes(found[0, use].receive().body) == use.encode()
    for each in (listener, other, *ends, *found.values()):
        each.close()


@pytest.mark.parametrize("use", ["steps", "control"])
def test_a_rank_has_come_up_with_both_of_its_channels(use: str, tmp_path: Path) -> None:
    listener, address = listen(tmp_path)
    ends = [Channel(connect(address), EPOCH) for _ in range(3)]
    for end, (rank, given) in zip(ends, ((0, "steps"), (0, "control"), (1, use)), strict=True):
        end.send(Kind.HELLO, msgspec.msgpack.encode(["right", rank, given, 1]))
    with pytest.raises(WorkerLost, match=r"ranks \[1?\] have not come up in 0 s"):
        ranks_start._gather(listener, {0: Process(), 1: Process()}, EPOCH, "right", replace(SOON, starting=0.1))
    for each in (listener, *ends):
        each.close()


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (choice_of(), None),
        (choice_of(devices=1), None),
        (choice_of(is_host=False, devices=0, index=7), None),
        (choice_of(is_host=False, devices=2), None),
        (choice_of(is_host=False, devices=1, shares=True), None),
        (choice_of(is_host=False, devices=4, index=2), None),
        (choice_of(talks=False), "tp is 2, and device 'x' declares no communication between its devices; --tp 1"),
        (
            choice_of(is_host=False, devices=4, index=3),
            "has 4 devices, 1 of them from number 3 on; --tp 1, --device x:0",
        ),
        (
            choice_of(is_host=False, devices=1, index=1),
            "has 1 devices, 0 of them from number 1 on; --tp 1, --device x:0",
        ),
    ],
)
def test_ranks_have_a_device_each_that_talks_to_the_others_unless_it_is_the_processor(
    choice: Any, said: str | None
) -> None:
    if said is None:
        ranks_start.check_devices(CONFIG, choice)
        return
    with pytest.raises(ConfigError, match=said):
        ranks_start.check_devices(CONFIG, choice)


@pytest.mark.parametrize(("devices", "tp", "left"), [(3, 4, 2), (4, 8, 3)])
def test_the_most_ranks_that_fit_are_the_remedy(devices: int, tp: int, left: int) -> None:
    choice = choice_of(is_host=False, devices=devices, index=1)
    with pytest.raises(ConfigError, match=f"{left} of them from number 1 on; --tp {left}, "):
        ranks_start.check_devices(EngineConfig(tp=tp), choice, ALONE)
    placement = Placement("torchrun", "", 2, neighbours=2)
    with pytest.raises(ConfigError, match=f"from number 1 on; this host needs {tp}; --tp {left}"):
        ranks_start.check_devices(EngineConfig(tp=tp), choice, placement)


def test_a_checkpoint_is_checked_as_the_task_reads_it_and_for_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def read(folder: Path, *, task: str | None) -> str:
        asked.append((folder, task))
        return "checkpoint"

    monkeypatch.setattr(ranks_start, "read_config", read)
    monkeypatch.setattr(ranks_start, "check_divisible", lambda *given: asked.append(given))
    monkeypatch.setattr(ranks_start, "check_topology", lambda *given: asked.append(given))
    config = EngineConfig(tp=4, dp=2, ep=2, task="embed")
    ranks_start.check_ranks(config, embedded_model(), choice_of())
    assert asked == [*((embedded_model(), "embed"), ("checkpoint", 4), ("checkpoint", Topology(tp=4, dp=2, ep=2)))]


def test_a_gguf_file_has_no_architecture_by_a_name_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read_config", "check_divisible", "check_topology"):
        monkeypatch.setattr(ranks_start, name, lambda *given, **more: None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    ranks_start.check_ranks(CONFIG, tmp_path / "m.gguf", choice_of())
    with pytest.raises(ConfigError, match="tp is 2 and model_impl is 'transformers'"):
        ranks_start.check_ranks(replace(CONFIG, model_impl="transformers"), tmp_path / "m.gguf", choice_of())
    for settings in ({"model_impl": "auto"}, {"dp": 2, "hisparse": "on"}, {"dp": 2}, {"hisparse": "on"}):
        ranks_start.check_ranks(replace(CONFIG, **settings), tmp_path / "m.gguf", choice_of())


@pytest.mark.parametrize(("width", "is_tree"), [(1, False), (2, True)])
def test_drafts_are_asked_whether_they_go_with_shards(
    width: int, is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def reason(kind: str, tree: bool) -> str:
        asked.append((kind, tree))
        return "no trees" if tree else ""

    monkeypatch.setattr(ranks_start, "resolve", lambda reference: reason)
    config = EngineConfig(tp=2, dp=2, speculative="eagle3", draft_width=width)
    if is_tree:
        with pytest.raises(ConfigError, match="dp is 2 and speculative is 'eagle3': no trees; --dp 1"):
            ranks_start._check_shards(config)
    else:
        ranks_start._check_shards(config)
        ranks_start._check_shards(replace(config, speculative=None))
    ranks_start._check_shards(replace(config, dp=1))
    assert asked == [("eagle3", is_tree), *([] if is_tree else [("", False)])]
