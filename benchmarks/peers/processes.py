"""Memory of, and signals to, all processes of a session. Uses Linux's /proc; on other systems only
the session leader."""

from __future__ import annotations

import os
import signal
from pathlib import Path

PROC = Path("/proc")


def members(leader: int) -> list[int]:
    """Return the live processes of the session of `leader`, including itself."""
    found = [int(entry.name) for entry in PROC.glob("[0-9]*") if _session(entry) == leader]
    return found or [leader]


def send(leader: int, number: signal.Signals) -> None:
    """Send a signal to every member; ignores members that have ended."""
    for process in members(leader):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def peak_bytes(leader: int) -> int:
    """Return the sum of the peak resident memory of all members."""
    return sum(_status(process, "VmHWM:") for process in members(leader))


def available_bytes() -> int:
    """Return the memory available without swapping; half of the memory if the system does not
    report it."""
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
