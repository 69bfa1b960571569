"""The native module, built and loaded once per process."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from sglcore_sim import build


@cache
def native() -> ModuleType:
    """Return the compiled core, loaded at the first call in a process; the first call on a machine
    compiles it (less than a minute). Raises RuntimeError if it does not compile."""
    return build.load()
