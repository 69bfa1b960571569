"""A child process that ends with its parent, whose end of the child's standard input closes then, in whatever way it ends."""

from __future__ import annotations

import os
import threading


def end_with_parent(code: int) -> None:
    """From now on, end this process with exit code `code` when its standard input closes. Does not wait."""
    threading.Thread(target=_follow, args=(code,), name="parent", daemon=True).start()


def _follow(code: int) -> None:
    # Not by sys.stdin: its lock would be held when the interpreter ends.
    while os.read(0, 4096):
        pass
    os._exit(code)
