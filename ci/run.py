"""Run lanes in parallel, classify each failure, and leave a record of each lane for the table.

A lane that runs alongside others has one process, so that it pays the costs of a process (imports,
collection, servers, compiled code) once. A lane that runs alone has all worker processes.
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
"""A placeholder in the options of a run; replaced with the name of each lane."""
TAIL = 4000
"""How many last characters of the output are searched for the class of a failure."""


class Failure(Enum):
    """The cause of a failure."""

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
"""Disables plugins that installed packages add to every pytest, including those that tests start;
loading them costs seconds at each start."""
_NAMED = ("FAILED ", "ERROR ")
"""How the lines of pytest's summary begin that name a test."""
_IMAGE = ("No module named", "could not be built", "No matching distribution")


@dataclass(frozen=True, slots=True)
class Ran:
    """One lane's run: its exit status, seconds, the class of its failure (None: it passed), and the
    lines of pytest's summary that name failed tests."""

    lane: Lane
    status: int
    seconds: float
    failure: Failure | None
    named: tuple[str, ...] = ()


def classify(status: int, output: str) -> Failure | None:
    """Classify a run by pytest's exit status and the end of its output; None: it passed."""
    if status == 0:
        return None
    if status < 0 or status > 128 or any(sign in output for sign in _INFRA):
        return Failure.INFRA
    if status == 1:
        return Failure.PRODUCT
    return Failure.IMAGE if any(sign in output for sign in _IMAGE) else Failure.COLLECT


def record_of(lane: Lane) -> Path:
    """Return the file that holds the record of a lane's run."""
    return RECORDS / f"{lane.name}.json"


def command(
    lane: Lane, workers: int, words: Sequence[str] = (), taken: Sequence[str] = (), is_kept: bool = True
) -> tuple[str, ...]:
    """Return the pytest command of a lane. `taken`: options that select tests; `is_kept`: write a
    record."""
    simulated = (f"--sim={lane.simulator}",) if lane.simulator else ()
    record = (f"--lane-record={record_of(lane)}",) if is_kept else ()
    return (
        str(python_of(lane)),
        "-m",
        "pytest",
        f"-n{workers}",
        "--dist=loadgroup",
        # A run in which a process crashed is red; with a new process it could wait for ever.
        "--max-worker-restart=0",
        f"--lane={lane.name}",
        *simulated,
        *record,
        *(option.replace(LANE, lane.name) for option in taken),
        *(f"--ignore={file}" for file in lane.ignore),
        *(words or lane.tests),
    )


def environ(around: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a lane's processes. PYTHONDONTWRITEBYTECODE is removed: a
    run starts hundreds of processes, and packages are installed without byte code, so the first
    import must store it."""
    own = {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": NO_PLUGINS, **around}
    return {name: value for name, value in own.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_all(lanes: Sequence[Lane], workers: int, words: Sequence[str] = (), taken: Sequence[str] = ()) -> list[Ran]:
    """Run lanes on this machine, up to `workers` in parallel; then the host's lane, which has the
    most tests, with all `workers` processes. Waits."""
    for lane in lanes:
        shutil.rmtree(RAW / lane.name, ignore_errors=True)
    last = [lane for lane in lanes if HOST in lane.capabilities]
    others = [lane for lane in lanes if lane not in last]
    beside = max(1, min(workers, len(others)))
    with ThreadPoolExecutor(beside) as threads:
        found = list(threads.map(lambda lane: run(lane, workers, words, taken, beside > 1), others))
    return [*found, *(run(lane, workers, words, taken) for lane in last)]


def run_each(asked: Sequence[tuple[Lane, Sequence[str]]]) -> list[Ran]:
    """Run the given tests of each lane, all lanes in parallel with one process each; leaves no
    record. Waits."""
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
    """Run one lane on this machine and print its output as it comes; waits.

    First makes the lane's environment if it declares one. With `is_beside` the lane runs in
    parallel with others: it gets at most one worker process, and each line begins with its name.
    Leaves a record if `is_kept`."""
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
    """Return one line for each lane, then the failed tests; these come last so that the end of the
    output has them."""
    lines = [
        f"  {ran.lane.name:<14} {'passed' if ran.failure is None else 'FAILED: ' + ran.failure.value:<18} "
        f"{ran.seconds:6.0f} s"
        for ran in runs
    ]
    named = [f"  {ran.lane.name:<14} {line}" for ran in runs for line in ran.named]
    return "\n".join(["", "lanes", *lines, *(["", "what failed", *named] if named else [])])
