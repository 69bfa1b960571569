"""What packages written for the contract's number before this one lack: all that the core knows of an older contract.

`DevicePackage` hands the keywords of every declaration to `adapted`, so that whoever gets a package gets one of today's
number. A function of an older contract that a declaration refers to is put right by a function around it (`refs.wrapped`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

Keywords: TypeAlias = Mapping[str, Any]
"""What a package calls `DevicePackage` with."""

ADAPTERS: Mapping[int, Callable[[Keywords], Keywords]] = MappingProxyType({})
"""By the number that a package declares: `from_N(keywords) -> keywords` of number N + 1. It names what is new, renames what has
another name now, and wraps references. Empty as long as `package.understood()` is one number."""


def adapted(given: Keywords, adapters: Mapping[int, Callable[[Keywords], Keywords]] = ADAPTERS) -> Keywords:
    """The keywords of a declaration in today's number, with `written_for` as the number that it had; of a number without an
    adapter, as they are."""
    number = given.get("api", 0)
    if number not in adapters:
        return given
    newer = adapted({**adapters[number](given), "api": number + 1}, adapters)
    return {**newer, "written_for": number}
