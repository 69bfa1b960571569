"""The native module, built and loaded once per process."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from sglcore_sim import build


@cache
def native() -> ModuleType:
    """Load the compiled core; the first call on a machine compiles it (less than a minute)."""
    return build.load()
