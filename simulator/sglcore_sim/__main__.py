"""`python -m sglcore_sim KIND[:CHIP] COMMAND ...`: run a command with the simulated device in every
Python process that it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sglcore_sim.kinds import kind_of

USAGE = "usage: python -m sglcore_sim KIND[:CHIP] COMMAND [WORD ...], such as: python -m sglcore_sim npu sglcore serve"
VARIABLE = "SGLSIM_KIND"


def main(words: list[str]) -> None:
    """Replace this process by the command. Python processes of the command and their children
    import `at_start/sitecustomize.py`. Raises SystemExit with an error message."""
    if len(words) < 2:
        raise SystemExit(USAGE)
    kind, *command = words
    try:
        kind_of(kind)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    around = filter(None, (os.environ.get("PYTHONPATH"),))
    path = os.pathsep.join((str(Path(__file__).with_name("at_start")), *around))
    try:
        os.execvpe(command[0], command, {**os.environ, VARIABLE: kind, "PYTHONPATH": path})
    except FileNotFoundError:
        raise SystemExit(f"error: found no command {command[0]!r}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
