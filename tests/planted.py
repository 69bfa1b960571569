"""Modules with a planted defect, for laws that must catch it."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any


def planted(module: ModuleType, sound: str, defect: str) -> Any:
    """Return a copy of a module with the one occurrence of `sound` replaced by `defect`; the module
    itself does not change."""
    source = inspect.getsource(module)
    assert source.count(sound) == 1, f"found {source.count(sound)} times {sound!r} in {module.__name__}, wanted 1"
    copy = ModuleType(module.__name__)
    exec(compile(source.replace(sound, defect), module.__name__, "exec"), copy.__dict__)
    return copy
