"""The requested and the chosen device as values. A parent process passes the choice to its
children, which verify it and refuse anything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from sglcore.core.errors import DeviceError
from sglcore.device.discovery import Installed
from sglcore.device.package import DevicePackage

VARIABLE = "SGLCORE_DEVICE"


@dataclass(frozen=True, slots=True)
class Requested:
    """The requested device: its name, where the request came from (`--device` or a variable), and
    the device's index. No name means an automatic choice, no index the device's first one.
    """

    name: str | None = None
    source: str = ""
    index: int | None = None

    def __str__(self) -> str:
        """Return "NAME:INDEX (from SOURCE)", without ":INDEX" if none was given, or "automatic",
        for a ledger row."""
        number = "" if self.index is None else f":{self.index}"
        return f"{self.name}{number} (from {self.source})" if self.name else "automatic"

    @staticmethod
    def parse(text: str, source: str) -> Requested:
        """Parse `NAME` or `NAME:INDEX`. Raises DeviceError for anything else."""
        name, colon, number = text.partition(":")
        if not name or (colon and not number.isdecimal()):
            raise DeviceError(f"the device is {text!r}, from {source}", wanted="NAME, or NAME:INDEX")
        return Requested(name, source, int(number) if colon else None)


def requested_device(option: str | None, environ: Mapping[str, str] = os.environ) -> Requested:
    """Return the request from `--device`, or else from `SGLCORE_DEVICE`. An empty value is no
    request: without any, an automatic choice is requested. Raises DeviceError if the text is
    neither NAME nor NAME:INDEX.
    """
    for text, source in ((option, "--device"), (environ.get(VARIABLE), VARIABLE)):
        if text:
            return Requested.parse(text, source)
    return Requested()


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """The device that runs: its name, the name and version of the Python distribution that supports
    it, the API number of the device contract, the reason for the choice, and the device's index
    among those of the package.
    """

    name: str
    distribution: str
    version: str
    api: int
    reason: str
    index: int = 0

    def __str__(self) -> str:
        """Return the device in the syntax of `--device`: NAME:INDEX, or NAME alone for index 0."""
        return f"{self.name}:{self.index}" if self.index else self.name

    def pinned(self, asked: str | None) -> str | None:
        """Return the `--device` value for a child process: this very device if its index is not 0,
        otherwise `asked`, the parent's own value.
        """
        return f"{self.name}:{self.index}" if self.index else asked

    def encode(self) -> str:
        """Return the fields as one line of JSON for a child process, which reads it with
        `decode`.
        """
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> ChosenDevice:
        """Return the value that `encode` wrote. Raises `DeviceError` for other text."""
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
    """Return, in a child process, the package that the parent chose: `encoded` is the parent's
    `ChosenDevice.encode()`, `requested` the device that the child itself was given, if any.

    Raises `DeviceError`, naming both sides, if the child was given another device, has no such
    package, or finds another distribution, version or API. Raises the package's own error if it
    cannot be loaded. The device is not probed.
    """
    chosen = ChosenDevice.decode(encoded)
    asked = Requested.parse(requested, VARIABLE) if requested else Requested(chosen.name)
    remedy = f"unset {VARIABLE} in the child, or set it to {chosen}"
    if asked.name != chosen.name:
        raise _refusal("the name", chosen.name, asked.name, remedy)
    if asked.index not in (None, chosen.index):
        raise _refusal(f"the number of {chosen.name!r}", chosen.index, asked.index, remedy)
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


def check_same(found: ChosenDevice, parent: ChosenDevice) -> None:
    """Raise `DeviceError`, naming both, if a child process chose a device of another name or index
    than its parent.
    """
    if (found.name, found.index) != (parent.name, parent.index):
        remedy = "start the child with the parent's environment; sglcore devices says what is found"
        raise _refusal("the device", f"{parent.name}:{parent.index}", f"{found.name}:{found.index}", remedy)


def _refusal(what: str, parent: object, child: object, remedy: str) -> DeviceError:
    return DeviceError(f"this child process found {child} as {what}", wanted=f"{parent}, as its parent", remedy=remedy)
