"""Measured cost of collectives between ranks on this machine: processes connect as ranks do,
measure, and end. No weights are loaded.

A process is started as `python -m sglcore.engine.ranks.link_measurement`. Its standard input has
two lines: a RankSpec as JSON (its `address` is the folder for the results), and a JSON list of the
sizes in bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from sglcore.config.engine_config import EngineConfig, config_of_plain
from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.core.ledger import DecisionLedger
from sglcore.device.choice import ChosenDevice, check_same
from sglcore.device.package import resolve
from sglcore.engine.layouts.link_costs import Link, fitted
from sglcore.engine.process_end import leave
from sglcore.engine.ranks.rank_process import tell_interface
from sglcore.engine.ranks.ranks_start import check_devices
from sglcore.engine.ranks.spec import RankSpec, spec_of
from sglcore.engine.start import bring_up, choose, embedded_model
from sglcore.worker.topology import Place, Topology

MEASURE = "sglcore.runtime.parallel.measure_collectives:measure"
"""The function that measures, as a reference, because this process must not load a tensor
library."""
PATIENCE = 300.0
"""Maximum seconds of the whole measurement."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The `seconds` of one `operation` ("all_reduce" or "all_to_all") of `size` bytes on each
    rank."""

    operation: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The link fitted to the measurements of one operation; `error`: the largest relative deviation
    of a measurement from the fit."""

    link: Link
    error: float


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The measurements of `ranks` ranks on this machine, on `device`, and the fitted link of each
    operation by its name."""

    device: str
    ranks: int
    measured: tuple[Measured, ...]
    fits: dict[str, Fit]


def spawn_measuring(spec: RankSpec, sizes: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the process that measures as the rank of `spec`, with `sizes` in bytes; does not
    wait."""
    command = [sys.executable, "-m", "sglcore.engine.ranks.link_measurement"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    with process.stdin as given:
        given.write(msgspec.json.encode(spec) + b"\n" + msgspec.json.encode(list(sizes)) + b"\n")
    return process


Spawn = Callable[[RankSpec, Sequence[int]], "subprocess.Popen[bytes]"]


def measure_links(config: EngineConfig, sizes: Sequence[int], spawn: Spawn = spawn_measuring) -> LinkFigures:
    """Measure collectives of `sizes` bytes between `config.tp` ranks on this machine. Waits.

    Raises ConfigError for a configuration that cannot run, and WorkerLost if a rank ends with an
    error or the measurement takes longer than PATIENCE; no process is left.
    """
    if config.tp < 2:
        raise ConfigError(f"tp is {config.tp}, and one rank has no links", remedy="--tp 2 or more")
    choice = choose(config, DecisionLedger())
    check_devices(config, choice)
    topology = Topology(config.tp)
    with TemporaryDirectory(prefix="sglcore-links-") as folder:
        places = [Place(rank, topology, f"file://{folder}/meeting", rank, config.tp) for rank in range(config.tp)]
        told = {"address": folder, "epoch": 0, "secret": ""}
        is_host = choice.package.ranks_share_device
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for place in places:
                spec = spec_of(config, choice.chosen, place, is_host=is_host, **told)
                processes.append(spawn(spec, sizes))
            _wait(processes, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        rows = json.loads((Path(folder) / "found").read_text(encoding="utf-8"))
    measured = tuple(Measured(*row) for row in rows)
    return LinkFigures(str(choice.chosen), config.tp, measured, fits_of(measured, config.tp))


def fits_of(measured: Sequence[Measured], ranks: int) -> dict[str, Fit]:
    """Return the fitted link of each operation: an all-reduce is modelled as a ring, an all-to-all
    as a tree of messages."""
    shapes = {
        "all_reduce": (2 * (ranks - 1), 2 * (ranks - 1) / ranks),
        "all_to_all": (ceil(log2(ranks)), (ranks - 1) / ranks),
    }
    found: dict[str, Fit] = {}
    for name, (rounds, share) in shapes.items():
        sizes = [each.size for each in measured if each.operation == name]
        seconds = [each.seconds for each in measured if each.operation == name]
        link = fitted(sizes, seconds, rounds, share)
        guesses = [rounds * link.alpha + share * size * link.beta for size in sizes]
        errors = [abs(guess / real - 1) for guess, real in zip(guesses, seconds, strict=True)]
        found[name] = Fit(link, max(errors))
    return found


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all processes have ended without error. Raises WorkerLost when one fails, with the
    error that it left in `folder`, or when they take longer than PATIENCE."""
    until = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes):
        if time.monotonic() > until:
            raise WorkerLost(f"{len(processes)} ranks have not measured their links in {PATIENCE:.0f} seconds")
        _check(processes, folder)
        time.sleep(0.02)
    _check(processes, folder)


def _check(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for rank, process in enumerate(processes):
        if process.poll():
            words = folder / f"failed-{rank}"
            said = words.read_text(encoding="utf-8") if words.exists() else f"its exit code is {process.returncode}"
            raise WorkerLost(f"rank {rank} of {len(processes)} did not measure its links: {said}")


def main() -> int:
    """Run one rank of the measurement; returns the exit code. Rank 0 writes the results to the file
    `found` in the folder."""
    with open(0, "rb", closefd=False) as given:
        spec = msgspec.json.decode(given.readline(), type=RankSpec)
        sizes = msgspec.json.decode(given.readline(), type=list[int])
    place, folder = Place.from_plain(spec.place), Path(spec.address)
    try:
        tell_interface(spec, place, os.environ)
        found = _measured(spec, place, sizes)
    except Exception as error:
        traceback.print_exc()
        (folder / f"failed-{place.rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        return 1
    if place.rank == 0:
        (folder / "found").write_text(json.dumps(found), encoding="utf-8")
    return 0


def _measured(spec: RankSpec, place: Place, sizes: Sequence[int]) -> list[tuple[str, int, float]]:
    """Return (operation, bytes, seconds) of each measurement, after the package's own bring-up up
    to the step in which the ranks connect."""
    config = config_of_plain(spec.config)
    choice, ledger = choose(config, DecisionLedger()), DecisionLedger(strict=config.strict)
    check_same(choice.chosen, ChosenDevice.decode(spec.chosen))
    built, _ = bring_up(config, embedded_model(), choice, ledger, _quiet, place, last="world")
    try:
        return resolve(MEASURE)(built["world"], built["device"], sizes)
    finally:
        built["world"].close()


def _quiet(phase: str, done: int, total: int) -> None:
    """Ignore the progress."""


if __name__ == "__main__":
    leave(main())
