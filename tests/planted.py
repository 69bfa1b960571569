"""Modules with a defect, for laws that must catch it."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any


def planted(module: ModuleType, sound: str, defect: str) -> Any:
    """A copy of a module in which the one occurrence of `sound` reads `defect`; the module itself
    stays as it is."""
    source = inspect.getsource(module)
    assert source.count(sound) == 1, f"found {source.count(sound)} times {sound!r} in {module.__name__}, wanted 1"
    copy = ModuleType(module.__name__)
    exec(compile(source.replace(sound, defect), module.__name__, "exec"), copy.__dict__)
    return copy
