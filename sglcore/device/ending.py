"""How a process of ours ends."""

from __future__ import annotations

import gc
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process as `sys.exit` does: threads are awaited, exit functions run, what is buffered is written. Only the
    interpreter's last search for garbage is left out, which takes seconds on a busy machine once libraries are loaded, and frees
    what goes with the process anyway."""
    gc.freeze()
    sys.exit(code)


def drop_output() -> None:
    """Forget what standard output did not take, which the interpreter would write once more at its end, and all that comes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
