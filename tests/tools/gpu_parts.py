"""Parts that measure nothing, for tests of how parts run. `python -m tests.tools.gpu_parts FILE
NAME,... SECONDS` runs them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.child import PartFailed, Report, call, serve
from benchmarks.on_gpu.parts import Part
from benchmarks.on_gpu.supervisor import Results, supervise

PARTS = {
    part.name: part
    for part in (
        Part("quick", "__main__:quick", 20),
        Part("second", "__main__:second", 20, ("quick",)),
        Part("raises", "__main__:raises", 20),
        Part("wrong", "__main__:wrong", 20, stops=True),
        Part("dies", "__main__:dies", 20),
        Part("hangs", "__main__:hangs", 3),
        Part("long", "__main__:hangs", 60),
        Part("unimportable", "no_such_module_at_all:measure", 20),
    )
}


def quick(report: Report, earlier: Mapping[str, Any]) -> None:
    """Two rows, a skip, a note, and text on standard output, which libraries must not disturb."""
    print("a library prints this")
    os.close(0)  # pytest closes the standard input too
    assert os.open(os.devnull, os.O_RDONLY) == 0
    time.sleep(0.05)
    report.row(value=1)
    report.skip("another", "it is not here")
    report.note(about="nothing")
    report.row(value=2)


def second(report: Report, earlier: Mapping[str, Any]) -> None:
    """Report what the first part found."""
    report.row(seen=[row["value"] for row in earlier["quick"]["rows"]])


def raises(report: Report, earlier: Mapping[str, Any]) -> None:
    """A typo."""
    report.row(value=1)
    report.rwo(value=2)  # pyright: ignore[reportAttributeAccessIssue]


def wrong(report: Report, earlier: Mapping[str, Any]) -> None:
    """Fail because a check does not hold."""
    raise PartFailed("two laws do not hold")


def dies(report: Report, earlier: Mapping[str, Any]) -> None:
    """End the process as a failing driver does."""
    print("the driver gave up", file=sys.stderr, flush=True)
    os.abort()


def hangs(report: Report, earlier: Mapping[str, Any]) -> None:
    """Report a row and never end; starts a child process."""
    report.row(pid=os.getpid(), child=os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "300"))
    time.sleep(300)


def main(file: str, names: str, seconds: str, *more: str) -> int:
    """Supervise parts, or run as one of them."""
    if more[:1] == ("--child",):
        serve(PARTS[more[1]], (), lambda part, report, earlier: call(part, report, earlier))
    parts = [PARTS[name] for name in names.split(",")]
    command = [sys.executable, "-m", "tests.tools.gpu_parts", file, names, seconds]
    return not supervise(parts, command, Results(Path(file), {"dry": True}), float(seconds), goes_on="--go-on" in more)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
