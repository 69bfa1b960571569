"""`sglcore bench links`: the ranks of this machine measure their exchanges, and a rank that fails
reports why."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sglcore.cli.__main__ import main
from sglcore.config.engine_config import plain_config, resolve_config
from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.device.choice import ChosenDevice
from sglcore.engine.ranks import link_measurement
from sglcore.engine.ranks.link_measurement import Measured, fits_of, measure_links, spawn_measuring
from sglcore.engine.ranks.spec import RankSpec
from sglcore.engine.start import embedded_model
from sglcore.runtime.parallel.measure_collectives import measure
from sglcore.runtime.parallel.process_group import Group
from sglcore.worker.topology import Place, Topology
from tests.parallel.collectives import on_ranks
from tests.parallel.test_ranks_start import choice_of


def measured(group: Group) -> list[tuple[str, int, float]]:
    """Measure in a rank's process, with sizes that do not divide among the ranks and with one that
    has one number per rank."""
    return measure(group, torch.device("cpu"), [4, 1000, 4096])


class Late:
    """A group with sums that take two milliseconds more."""

    def __init__(self, group: Group) -> None:
        self.size, self.barrier, self.least, self.all_to_all = group.size, group.barrier, group.least, group.all_to_all
        self._sum = group.all_reduce

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(2e-3)
        return self._sum(x)


def delayed(group: Group) -> list[float]:
    """The seconds of a sum in the late group."""
    late: Any = Late(group)
    return [seconds for name, _, seconds in measure(late, torch.device("cpu"), [4096]) if name == "all_reduce"]


def test_every_size_is_measured_for_both_operations(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, measured)[0]
    assert [(name, size) for name, size, _ in found] == [
        (name, size) for size in (8, 1000, 4096) for name in ("all_reduce", "all_to_all")
    ]
    assert all(0 < seconds < 5 for *_, seconds in found)


def test_what_a_collective_takes_is_in_what_is_measured(tmp_path: Path) -> None:
    (seconds,) = on_ranks(2, tmp_path, delayed)[0]
    assert 2e-3 < seconds < 0.5


def test_each_operation_has_the_link_that_gave_its_times() -> None:
    """With four ranks: six messages of a ring, and two of a tree."""
    sizes = (1 << 10, 1 << 16, 1 << 22)
    rows = [Measured("all_reduce", size, 6 * 2e-6 + 1.5 * size * 1e-9) for size in sizes]
    rows += [Measured("all_to_all", size, 2 * 5e-6 + 0.75 * size * 2e-9) for size in sizes]
    found = fits_of(rows, 4)
    for name, alpha, beta in (("all_reduce", 2e-6, 1e-9), ("all_to_all", 5e-6, 2e-9)):
        assert found[name].link.alpha == pytest.approx(alpha) and found[name].link.beta == pytest.approx(beta)
        assert found[name].error < 1e-9
    crooked = fits_of([*rows, Measured("all_reduce", 1 << 24, 1.0)], 4)
    assert crooked["all_reduce"].error > 0.5 > crooked["all_to_all"].error


def test_the_command_prints_a_table_and_writes_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "links.json"
    words = ["bench", "links", "--tp", "2", "--smallest", "1024", "--largest", "10000", "--json", str(file)]
    assert main(words) == 0
    told, found = capsys.readouterr().out, json.loads(file.read_text())
    assert found["ranks"] == 2 and [row["bytes"] for row in found["measured"]] == [1024, 1024, 4096, 4096, 10000, 10000]
    for row in found["measured"]:
        assert f"{row['us']:.1f}" in told
    for name, fit in found["fits"].items():
        assert f"{name}: alpha_us = {fit['alpha_us']:.3g}, gb_s = " in told


def test_a_rank_that_fails_says_why_and_no_process_is_left() -> None:
    spawned: list[subprocess.Popen[bytes]] = []

    def wrong(spec: RankSpec, sizes: Sequence[int]) -> subprocess.Popen[bytes]:
        """The second rank takes another device than its leader chose."""
        if spec.place["rank"]:
            chosen = replace(ChosenDevice.decode(spec.chosen), index=7)
            spec = msgspec.structs.replace(spec, chosen=chosen.encode())
        spawned.append(spawn_measuring(spec, sizes))
        return spawned[-1]

    with pytest.raises(WorkerLost, match="rank 1 of 2 did not measure its links: DeviceError: .*7"):
        measure_links(resolve_config({"tp": 2}), [1024, 4096], wrong)
    assert len(spawned) == 2 and all(process.poll() is not None for process in spawned)


def test_one_rank_has_no_links() -> None:
    with pytest.raises(ConfigError, match="one rank has no links"):
        measure_links(resolve_config({}), [1, 2])


class Process:
    """A process that has ended with a code, or never does; it records its end."""

    def __init__(self, code: int | None) -> None:
        self.returncode = code
        self.calls: list[str] = []

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.calls.append("kill")

    def wait(self) -> None:
        self.calls.append("wait")


@pytest.mark.parametrize(
    ("codes", "words", "found"),
    [
        ((0, 0), None, None),
        ((None, 5), None, "rank 1 of 2 did not measure its links: its exit code is 5"),
        ((-9, None), None, "rank 0 of 2 did not measure its links: its exit code is -9"),
        ((0, 1), "ValueError: no link", "rank 1 of 2 did not measure its links: ValueError: no link"),
        ((0, None), None, "2 ranks have not measured their links in 0 seconds"),
    ],
)
def test_ranks_that_measure_are_waited_for_until_one_fails_or_their_time_is_over(
    codes: tuple[int | None, ...],
    words: str | None,
    found: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_measurement, "PATIENCE", 0.0 if found and "0 seconds" in found else 30.0)
    if words is not None:
        (tmp_path / "failed-1").write_text(words)
    processes: Any = [Process(code) for code in codes]
    if found is None:
        link_measurement._wait(processes, tmp_path)
        return
    with pytest.raises(WorkerLost, match=found):
        link_measurement._wait(processes, tmp_path)


def given(choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the measurement find this choice of a device."""
    monkeypatch.setattr(link_measurement, "choose", lambda config, ledger: choice)


@pytest.mark.parametrize("is_host", [True, False])
def test_ranks_that_measure_have_a_place_and_a_device_each_and_the_figures_are_theirs(
    is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[RankSpec] = []
    asked: list[list[int]] = []

    def spawn(spec: RankSpec, sizes: Sequence[int]) -> Any:
        specs.append(spec)
        asked.append(list(sizes))
        rows = [[name, size, 1e-6 * size] for name in ("all_reduce", "all_to_all") for size in sizes]
        (Path(spec.address) / "found").write_text(json.dumps(rows))
        processes.append(Process(0))
        return processes[-1]

    processes: list[Process] = []
    given(choice_of(is_host=is_host, index=2, devices=5), monkeypatch)
    found = measure_links(resolve_config({"tp": 3}), [8, 64], spawn)
    assert (found.device, found.ranks) == ("x:2", 3) and asked == [[8, 64]] * 3
    assert [(each.operation, each.size) for each in found.measured] == [
        (name, size) for name in ("all_reduce", "all_to_all") for size in (8, 64)
    ]
    assert found.fits == fits_of(found.measured, 3)
    assert [each.calls for each in processes] == [["kill", "wait"]] * 3, "each is reaped"
    places = [Place.from_plain(each.place) for each in specs]
    assert [(each.rank, each.local, each.neighbours, each.topology) for each in places] == [
        (rank, rank, 3, Topology(tp=3)) for rank in range(3)
    ]
    assert [ChosenDevice.decode(each.chosen).index for each in specs] == ([2, 2, 2] if is_host else [2, 3, 4])
    ((folder, meeting),) = {(each.address, place.meeting) for each, place in zip(specs, places, strict=True)}
    assert Path(meeting.removeprefix("file://")).parent == Path(folder) and not Path(folder).exists()


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (choice_of(talks=False), "declares no communication between its devices"),
        (choice_of(is_host=False, devices=1), "tp is 2, and 'x' has 1 devices"),
    ],
)
def test_devices_that_have_no_links_between_them_are_refused_before_a_process_starts(
    choice: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(choice, monkeypatch)
    with pytest.raises(ConfigError, match=said):
        measure_links(resolve_config({"tp": 2}), [8, 64], lambda *word: pytest.fail("a process was started"))


def test_processes_that_measure_are_ended_if_the_next_one_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Process] = []

    def spawn(spec: RankSpec, sizes: Sequence[int]) -> Any:
        if len(started) == 2:
            raise OSError("no process")
        started.append(Process(None))
        return started[-1]

    given(choice_of(), monkeypatch)
    with pytest.raises(OSError, match="no process"):
        measure_links(resolve_config({"tp": 3}), [8, 64], spawn)
    assert [each.calls for each in started] == [["kill", "wait"]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has open is read from Linux's files")
def test_a_process_that_measures_prints_nothing_and_is_not_in_the_group_of_the_command() -> None:
    """An interrupt from the terminal is for the command, which ends its ranks."""
    place = Place(0, Topology(tp=2), "file:///none/meeting", 0, 2)
    process = spawn_measuring(RankSpec({}, "", place.as_plain(), "/none", 0, ""), [8, 64])
    try:
        assert os.getsid(process.pid) == process.pid
        assert os.readlink(f"/proc/{process.pid}/fd/1") == os.devnull
    finally:
        process.kill()
        process.wait()


def ran(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch, found: Any) -> tuple[int, list[str]]:
    """The exit code of a rank that finds this or fails with this, and what it did."""

    def measured(spec: RankSpec, place: Place, sizes: Sequence[int]) -> Any:
        done.append(f"rank {place.rank} of {place.topology.tp} measures {sizes}")
        if isinstance(found, Exception):
            raise found
        return found

    done: list[str] = []
    spec = RankSpec({}, "", Place(rank, Topology(tp=2), "", rank, 2).as_plain(), str(folder), 0, "")
    line = msgspec.json.encode(spec) + b"\n[8, 64]\n"
    monkeypatch.setattr(link_measurement, "open", lambda *given, **how: io.BytesIO(line), raising=False)
    monkeypatch.setattr(link_measurement, "tell_interface", lambda *given: done.append("interface"))
    monkeypatch.setattr(link_measurement, "_measured", measured)
    return link_measurement.main(), done


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_writes_what_was_measured_and_each_one_why_it_failed(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [["all_reduce", 8, 0.5], ["all_to_all", 64, 0.25]]
    did = ["interface", f"rank {rank} of 2 measures [8, 64]"]
    assert ran(rank, tmp_path, monkeypatch, ValueError("no link")) == (1, did)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {f"failed-{rank}": "ValueError: no link"}
    (tmp_path / f"failed-{rank}").unlink()
    assert ran(rank, tmp_path, monkeypatch, rows) == (0, did)
    assert [json.loads(each.read_text()) for each in tmp_path.iterdir()] == ([rows] if rank == 0 else [])


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_connect_and_leave_and_load_no_weights(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    closed: list[str] = []

    def bring_up(config: Any, folder: Path, choice: Any, ledger: Any, progress: Any, place: Place, last: str) -> Any:
        asked.append((folder, place, last, ledger.strict))
        return {"world": SimpleNamespace(close=lambda: closed.append("world")), "device": "device"}, {}

    def measures(world: Any, device: str, sizes: Sequence[int]) -> Any:
        assert device == "device" and not closed
        if fails:
            raise ValueError("no link")
        return [("all_reduce", size, 1.0) for size in sizes]

    choice = choice_of(index=2)
    given(choice, monkeypatch)
    monkeypatch.setattr(link_measurement, "bring_up", bring_up)
    monkeypatch.setattr(link_measurement, "resolve", lambda reference: measures)
    place = Place(1, Topology(tp=2), "", 1, 2)
    config = plain_config(resolve_config({"tp": 2, "strict": True}))
    spec = RankSpec(config, choice.chosen.encode(), place.as_plain(), "", 0, "")
    if fails:
        with pytest.raises(ValueError, match="no link"):
            link_measurement._measured(spec, place, [8])
    else:
        assert link_measurement._measured(spec, place, [8]) == [("all_reduce", 8, 1.0)]
    assert asked == [(embedded_model(), place, "world", True)] and closed == ["world"]


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_an_exchange_takes_a_round_for_each_level_of_a_tree_and_the_worst_deviation_is_told(
    ranks: int, rounds: int
) -> None:
    sizes, share = (1 << 10, 1 << 16, 1 << 22), (ranks - 1) / ranks
    rows = [Measured("all_reduce", size, 2 * (ranks - 1) * 2e-6 + 2 * share * size * 1e-9) for size in sizes]
    rows += [Measured("all_to_all", size, rounds * 5e-6 + share * size * 2e-9) for size in sizes]
    found = fits_of(rows, ranks)
    assert (found["all_to_all"].link.alpha, found["all_reduce"].link.alpha) == pytest.approx((5e-6, 2e-6))
    crooked = fits_of([*rows, Measured("all_to_all", 1 << 20, 1.0)], ranks)["all_to_all"]
    guesses = {each.size: rounds * crooked.link.alpha + share * each.size * crooked.link.beta for each in rows}
    errors = [abs(guesses[each.size] / each.seconds - 1) for each in rows if each.operation == "all_to_all"]
    errors.append(abs((rounds * crooked.link.alpha + share * (1 << 20) * crooked.link.beta) / 1.0 - 1))
    assert crooked.error == pytest.approx(max(errors)) and max(errors) > 2 * min(errors)
