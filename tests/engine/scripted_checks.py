"""A process of checks whose work a test describes: `python -m tests.engine.scripted_checks`."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from threading import Event, get_native_id, stack_size

import msgspec

from sglcore.engine.process_end import leave
from sglcore.engine.structured_output.killable_checks import CheckLimits, Verdict
from sglcore.engine.structured_output.killable_checks_process import Checker, first_line


class Act(msgspec.Struct, frozen=True):
    """What one check does, in this order."""

    spins: float = 0.0
    """CPU seconds that it takes."""
    spins_until: str = ""
    """It takes CPU time until this file exists, or "lowest": until its thread has the lowest
    priority."""
    waits: bool = False
    """It waits for ever."""
    takes: int = 0
    """Bytes that it allocates."""
    kills: int = 0
    """A signal that it sends to itself."""
    prints: str = ""
    """Text that it writes to its standard output."""
    environment: tuple[str, ...] = ()
    """Variables whose values are findings."""
    limit: str = ""
    """A resource whose soft and hard limit are findings; "stack": the bytes of a thread's stack."""
    says: tuple[str, ...] = ()
    """Further findings."""


def act(work: bytes) -> Verdict:
    """Do what the test wants. The first two findings are the times of its start and end."""
    asked, begin = msgspec.json.decode(work, type=Act), time.monotonic()
    start = time.thread_time()
    while time.thread_time() < start + asked.spins:
        pass
    while asked.spins_until and not _has_come(asked.spins_until):
        pass
    if asked.waits:
        Event().wait()
    bytearray(asked.takes)
    if asked.kills:
        os.kill(os.getpid(), asked.kills)
        Event().wait()
    if asked.prints:
        os.write(1, asked.prints.encode())
        assert not os.read(0, 1)
    found = [os.environ[name] for name in asked.environment]
    if asked.limit:
        found += map(
            str, [stack_size()] if asked.limit == "stack" else resource.getrlimit(getattr(resource, asked.limit))
        )
    return Verdict(0, said=(str(begin), str(time.monotonic()), *found, *asked.says))


def _has_come(what: str) -> bool:
    if what == "lowest":
        return os.getpriority(os.PRIO_PROCESS, get_native_id()) == 19
    return Path(what).exists()


def main() -> int:
    """Check until standard input ends."""
    first, rest = first_line()
    if first:
        Checker(act, msgspec.json.decode(first, type=CheckLimits), rest).run()
    return 0


if __name__ == "__main__":
    leave(main())
