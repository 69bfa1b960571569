"""`sglcore bench links`: the ranks of this machine measure their exchanges, and a rank that fails
reports why."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sglcore.cli.__main__ import main
from sglcore.config.engine_config import resolve_config
from sglcore.device.choice import ChosenDevice
from sglcore.device.errors import ConfigError, WorkerLost
from sglcore.engine.ranks import link_measurement
from sglcore.engine.ranks.link_measurement import Measured, fits_of, measure_links, spawn_measuring
from sglcore.engine.ranks.spec import RankSpec
from sglcore.runtime.parallel.measure_collectives import measure
from sglcore.runtime.parallel.process_group import Group
from tests.parallel.collectives import on_ranks


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
    """A process that has ended with a code, or never does."""

    def __init__(self, code: int | None) -> None:
        self.returncode = code

    def poll(self) -> int | None:
        return self.returncode


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
