"""Ends a process of the engine without the interpreter's last garbage collection (`leave`), and
discards standard output that cannot be written any more (`drop_output`)."""

from __future__ import annotations

import gc
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with the exit code `code`, as `sys.exit` does: threads are joined, exit
    functions run, buffers are flushed.

    Only the interpreter's last garbage collection is skipped. It takes seconds on a busy machine
    after libraries are loaded, and frees only what ends with the process anyway.
    """
    gc.freeze()
    sys.exit(code)


def drop_output() -> None:
    """Discard the buffered standard output, which the interpreter would try to write again at exit,
    and all later output.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
