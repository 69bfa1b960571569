"""The chosen device as a value: a parent hands it to its children, which verify it and refuse anything else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from sglcore.device.discovery import Installed
from sglcore.device.errors import DeviceError
from sglcore.device.package import DevicePackage


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """Which device runs, which distribution brought it, the contract it speaks, why it was chosen, and its number among those
    of its package."""

    name: str
    distribution: str
    version: str
    api: int
    reason: str
    index: int = 0

    def encode(self) -> str:
        """One line of text for a child process."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> ChosenDevice:
        """The value that `encode` wrote; raises `DeviceError` when the text is something else."""
        names = tuple(item.name for item in fields(ChosenDevice))
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, dict) or set(values) != set(names):
            raise DeviceError(
                f"a child process received {text!r} as its device", wanted=f"the fields {', '.join(names)}"
            )
        return ChosenDevice(**values)


def adopt(encoded: str, requested: str | None, installed: Sequence[Installed]) -> DevicePackage:
    """In a child process: the package that the parent chose.

    Raises `DeviceError`, naming both sides, when the child was asked for another device or finds another distribution,
    version or API; raises what the package raised when it can not be loaded.
    """
    chosen = ChosenDevice.decode(encoded)
    if requested and requested != chosen.name:
        raise _refusal(
            "the name", chosen.name, requested, f"unset SGLCORE_DEVICE in the child, or set it to {chosen.name}"
        )
    item = next((item for item in installed if item.name == chosen.name), None)
    if item is None:
        here = ", ".join(item.name for item in installed) or "no device package"
        raise _refusal("the package", chosen.name, here, "start the child with the parent's environment")
    package = item.loaded()
    found = {"distribution": item.distribution, "version": item.version, "api": package.api}
    for what, value in found.items():
        wanted = asdict(chosen)[what]
        if value != wanted:
            raise _refusal(
                f"the {what} of {chosen.name!r}", wanted, value, "restart the parent and its children together"
            )
    return package


def _refusal(what: str, parent: object, child: object, remedy: str) -> DeviceError:
    return DeviceError(f"this child process found {child} as {what}", wanted=f"{parent}, as its parent", remedy=remedy)
