"""Adapters for packages that were written for an older API number of the contract: all that the
core knows of older contracts.

`DevicePackage` passes the keywords of every declaration to `adapted`, so the core only sees
packages of the current number. If a declaration refers to a function of an older contract, an
adapter wraps the reference (`import_references.wrapped`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

Keywords: TypeAlias = Mapping[str, Any]
"""The keywords with which a package calls `DevicePackage`."""

ADAPTERS: Mapping[int, Callable[[Keywords], Keywords]] = MappingProxyType({})
"""Adapters by the API number that a package declares: `from_N(keywords) -> keywords` of number N +
1. An adapter adds new names, renames changed ones, and wraps references. Empty while
`package.understood()` has one number.
"""


def adapted(given: Keywords, adapters: Mapping[int, Callable[[Keywords], Keywords]] = ADAPTERS) -> Keywords:
    """Return `given`, the keywords of a declaration, converted to the current API number; the
    number that the package declared is then in `written_for`. Keywords of a number without an
    adapter are returned unchanged.
    """
    number = given.get("api", 0)
    if number not in adapters:
        return given
    newer = adapted({**adapters[number](given), "api": number + 1}, adapters)
    return {**newer, "written_for": number}
