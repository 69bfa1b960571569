"""Find the installed device packages: entry points of the group `sglcore.devices`.

The API number is read from the entry point, so a package for an unsupported contract is refused
without an import. A package of the previous number is converted when it is declared (adapter.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from sglcore.core.errors import DeviceError
from sglcore.device.package import API, DevicePackage, understood

GROUP = "sglcore.devices"
UNKNOWN = "an unknown distribution"
"""Used in messages for a distribution without a name."""
_API_TAG = re.compile(r"\[\s*api-(\d+)\s*\]\s*$")


@dataclass(frozen=True, slots=True)
class Installed:
    """One entry point of the group `sglcore.devices`: the device's `name`, the name and version of
    the Python distribution, and its package, or the error that loading it raised.
    """

    name: str
    distribution: str
    version: str
    package: DevicePackage | None = None
    error: Exception | None = None

    def loaded(self) -> DevicePackage:
        """Return the package. Raises the error of loading it, with its traceback."""
        if self.package is None:
            raise self.error or DeviceError(f"{self.distribution} offers no device package")
        return self.package


def discover(found: Iterable[EntryPoint] | None = None) -> tuple[Installed, ...]:
    """Return every installed device package, sorted by device name. `found`: the entry points to
    load; None: those of this Python environment. Imports the packages. A package that cannot be
    loaded, or that shares its name with another one, is listed with its error.
    """
    points = sorted(entry_points(group=GROUP) if found is None else found, key=lambda point: (point.name, _home(point)))
    return tuple(_load(point, [other for other in points if other.name == point.name]) for point in points)


def pip(command: str, distribution: str) -> str:
    """Return the text "pip COMMAND DISTRIBUTION" for a message, or what to do by hand if the
    distribution is UNKNOWN to pip. Runs nothing.
    """
    if distribution == UNKNOWN:
        return f"delete the .dist-info folder without METADATA that has an entry point of {GROUP}"
    return f"pip {command} {distribution}"


def check_api(number: int, distribution: str, name: str, api: int = API) -> None:
    """Raise `DeviceError` unless `number`, for which a package was written, is one that a core of
    API number `api` supports. `distribution` and `name` are for the message.
    """
    taken = understood(api)
    if number not in taken:
        raise DeviceError(
            f"device {name!r} of {distribution} was written for API {number}",
            wanted=f"API {' or '.join(map(str, taken))}, which this sglcore understands",
            remedy=pip("install --upgrade", distribution if number < api else "sglcore"),
        )


def _load(point: EntryPoint, same_name: list[EntryPoint]) -> Installed:
    distribution, version = _home(point)
    try:
        package = _package(point, distribution, same_name)
    except Exception as error:
        return Installed(point.name, distribution, version, error=error)
    return Installed(point.name, distribution, version, package=package)


def _package(point: EntryPoint, distribution: str, same_name: list[EntryPoint]) -> DevicePackage:
    if len(same_name) > 1:
        homes = [_home(other)[0] for other in same_name]
        raise DeviceError(
            f"{' and '.join(homes)} both offer a device {point.name!r}",
            remedy=f"{pip('uninstall', homes[-1])}, or the other",
        )
    number = _api_number(point, distribution)
    check_api(number, distribution, point.name)
    try:
        package = point.load()
    except SystemExit as error:
        raise DeviceError(f"{point.value!r} of {distribution} ends the process that imports it") from error
    if not isinstance(package, DevicePackage):
        raise DeviceError(f"{point.value!r} of {distribution} is a {type(package).__name__}", wanted="a DevicePackage")
    declared = package.written_for or package.api
    if (package.name, declared) != (point.name, number):
        raise DeviceError(
            f"{distribution} declares device {package.name!r} with API {declared}",
            wanted=f"{point.name!r} with API {number}, as its entry point states",
            remedy=pip("install --force-reinstall", distribution),
        )
    return package


def _api_number(point: EntryPoint, distribution: str) -> int:
    tag = _API_TAG.search(point.value)
    if tag is None:
        raise DeviceError(
            f"the entry point {point.name} = {point.value!r} of {distribution} does not state its API number",
            wanted=f"'module:name [api-{API}]'",
            remedy=pip("install --upgrade", distribution),
        )
    return int(tag.group(1))


def _home(point: EntryPoint) -> tuple[str, str]:
    """Return name and version of the distribution of an entry point. A damaged installation may
    lack both: then UNKNOWN and "?".
    """
    name, version = (point.dist.name, point.dist.version) if point.dist is not None else (None, None)
    return name or UNKNOWN, version or "?"
