"""Runs lanes side by side, says of each failure whose it is, and leaves a record of each for the
table.

A lane that runs beside others has one process, so that each pays once for what every process pays:
imports, collection, servers, compiled code. One that runs alone has all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ci.environments import prepare, python_of
from ci.impact import RAW
from ci.lanes import HOST, ROOT, Lane

RECORDS = ROOT / "build" / "lanes"
LANE = "{lane}"
"""In an option of a run: the name of each lane."""
TAIL = 4000
"""Characters of the output that the class of a failure is read from."""


class Failure(Enum):
    """Whose a failure is."""

    INFRA = "infra"
    """The machine: killed, out of time or disk, a worker lost."""
    IMAGE = "image"
    """What is installed on it: a package or the simulator is missing or does not build."""
    COLLECT = "collect"
    """The tests could not be gathered, or there were none."""
    PRODUCT = "product"
    """A test failed."""


_INFRA = ("No space left on device", "Cannot allocate memory", "crashed while running", "node down: Not properly")
NO_PLUGINS = "-p no:schemathesis -p no:langsmith_plugin -p no:anyio"
"""What libraries of tests bring to every pytest, also to those that tests start, and that costs
seconds at each start."""
_NAMED = ("FAILED ", "ERROR ")
"""How a line of pytest's summary begins that names a test."""
_IMAGE = ("No module named", "could not be built", "No matching distribution")


@dataclass(frozen=True, slots=True)
class Ran:
    """One lane's run: its exit status, seconds, the class of its failure (None: it passed), and the
    lines of pytest's summary that name what failed."""

    lane: Lane
    status: int
    seconds: float
    failure: Failure | None
    named: tuple[str, ...] = ()


def classify(status: int, output: str) -> Failure | None:
    """The class of a run from pytest's exit status and the end of its output."""
    if status == 0:
        return None
    if status < 0 or status > 128 or any(sign in output for sign in _INFRA):
        return Failure.INFRA
    if status == 1:
        return Failure.PRODUCT
    return Failure.IMAGE if any(sign in output for sign in _IMAGE) else Failure.COLLECT


def record_of(lane: Lane) -> Path:
    """The file in which a lane's run is recorded."""
    return RECORDS / f"{lane.name}.json"


def command(
    lane: Lane, workers: int, words: Sequence[str] = (), taken: Sequence[str] = (), is_kept: bool = True
) -> tuple[str, ...]:
    """How pytest is called for a lane; `taken` are options that say which tests to take."""
    simulated = (f"--sim={lane.simulator}",) if lane.simulator else ()
    record = (f"--lane-record={record_of(lane)}",) if is_kept else ()
    return (
        str(python_of(lane)),
        "-m",
        "pytest",
        f"-n{workers}",
        "--dist=loadgroup",
        f"--lane={lane.name}",
        *simulated,
        *record,
        *(option.replace(LANE, lane.name) for option in taken),
        *(f"--ignore={file}" for file in lane.ignore),
        *(words or lane.tests),
    )


def environ(around: Mapping[str, str]) -> dict[str, str]:
    """What a lane's processes find in their environment. What they import is compiled once,
    whatever is said outside: a run starts hundreds of processes, and the install leaves the
    compiling to them."""
    own = {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": NO_PLUGINS, **around}
    return {name: value for name, value in own.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_all(lanes: Sequence[Lane], workers: int, words: Sequence[str] = (), taken: Sequence[str] = ()) -> list[Ran]:
    """Run lanes here, as many side by side as there may be processes; the host's, which has most
    tests, after the others and in all processes. Waits."""
    for lane in lanes:
        shutil.rmtree(RAW / lane.name, ignore_errors=True)
    last = [lane for lane in lanes if HOST in lane.capabilities]
    others = [lane for lane in lanes if lane not in last]
    beside = max(1, min(workers, len(others)))
    with ThreadPoolExecutor(beside) as threads:
        found = list(threads.map(lambda lane: run(lane, workers, words, taken, beside > 1), others))
    return [*found, *(run(lane, workers, words, taken) for lane in last)]


def run_each(asked: Sequence[tuple[Lane, Sequence[str]]]) -> list[Ran]:
    """Run some tests of each of these lanes side by side, a process for each; leaves no record.
    Waits."""
    with ThreadPoolExecutor(max(1, len(asked))) as threads:
        return list(threads.map(lambda each: run(each[0], 0, each[1], is_beside=len(asked) > 1, is_kept=False), asked))


def run(
    lane: Lane,
    workers: int,
    words: Sequence[str] = (),
    taken: Sequence[str] = (),
    is_beside: bool = False,
    is_kept: bool = True,
) -> Ran:
    """Run one lane here, its output as it comes, with its name before each line if it runs beside
    others, and then in one process; waits. An environment of its own is made first. A record is
    left if `is_kept`."""
    print(f"\n== lane {lane.name} ==", flush=True)
    if is_kept:
        record_of(lane).unlink(missing_ok=True)
    start = time.monotonic()
    try:
        prepare(lane)
    except subprocess.CalledProcessError as error:
        return Ran(lane, error.returncode, time.monotonic() - start, Failure.IMAGE)
    before = f"{lane.name:<10} " if is_beside else ""
    own = [word for word in words if lane.takes(word)]
    with subprocess.Popen(
        command(lane, min(1, workers) if is_beside else workers, own, taken, is_kept),
        cwd=ROOT,
        env=environ(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        assert child.stdout is not None
        tail, named = "", list[str]()
        for line in child.stdout:
            print(f"{before}{line}", end="", flush=True)
            tail = (tail + line)[-TAIL:]
            if line.startswith(_NAMED):
                named.append(line.rstrip())
        status = child.wait()
    return Ran(lane, status, time.monotonic() - start, classify(status, tail), tuple(named))


def report(runs: Sequence[Ran]) -> str:
    """One line for each lane, and after them what failed: whoever keeps only the end of the output
    has it."""
    lines = [
        f"  {ran.lane.name:<14} {'passed' if ran.failure is None else 'FAILED: ' + ran.failure.value:<18} {ran.seconds:6.0f} s"
        for ran in runs
    ]
    named = [f"  {ran.lane.name:<14} {line}" for ran in runs for line in ran.named]
    return "\n".join(["", "lanes", *lines, *(["", "what failed", *named] if named else [])])
