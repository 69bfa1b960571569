"""Every process of a session: what they hold of memory, and signals to all of them. Linux's /proc;
elsewhere the leader alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

PROC = Path("/proc")


def members(leader: int) -> list[int]:
    """The live processes of the session that `leader` began, itself included."""
    found = [int(entry.name) for entry in PROC.glob("[0-9]*") if _session(entry) == leader]
    return found or [leader]


def send(leader: int, number: signal.Signals) -> None:
    """One signal to every member; those that are gone meanwhile are none."""
    for process in members(leader):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def peak_bytes(leader: int) -> int:
    """The peaks of resident memory of all members, added up."""
    return sum(_status(process, "VmHWM:") for process in members(leader))


def available_bytes() -> int:
    """What may still be taken without swapping; a guess of half the memory where the system does
    not say."""
    try:
        for line in (PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _session(entry: Path) -> int:
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[3])


def _status(process: int, name: str) -> int:
    try:
        for line in (PROC / str(process) / "status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0
