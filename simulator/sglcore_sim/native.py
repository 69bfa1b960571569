"""The native module, built and loaded once per process."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from sglcore_sim import build


@cache
def native() -> ModuleType:
    """The compiled core; the first call of a machine compiles it (under a minute)."""
    return build.load()
