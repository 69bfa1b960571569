"""A child process that ends when its parent ends for any reason: the parent's end of the child's
standard input closes then."""

from __future__ import annotations

import os
import threading


def end_with_parent(code: int) -> None:
    """Start a thread that ends this process with exit code `code` when its standard input closes.
    Returns at once."""
    threading.Thread(target=_follow, args=(code,), name="parent", daemon=True).start()


def _follow(code: int) -> None:
    # Not sys.stdin: its lock would be held when the interpreter ends.
    while os.read(0, 4096):
        pass
    os._exit(code)
