"""Which of a system's devices a process may use, by the variables that vendors' runtimes read. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sglcore.device.probe import DeviceInfo, Fact


@dataclass(frozen=True, slots=True)
class Visible:
    """`devices` as the process numbers them; `hidden`: the variables that keep others from it, or that say another order,
    each with its value; empty where they are as the system has them."""

    devices: tuple[DeviceInfo, ...]
    hidden: str = ""

    @property
    def failure(self) -> Fact | None:
        """Why the runtime can not be used, where every device is hidden."""
        if self.devices or not self.hidden:
            return None
        return Fact(False, self.hidden, "unset it, or name there a device of this machine")


def visible_devices(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *variables: str) -> Visible:
    """Apply the variables that are set, one to what the other left: each lists numbers, or beginnings of uuids.

    As the runtimes read them: an entry that names no device ends the list, an entry that comes twice empties it.
    """
    left, said = tuple(devices), list[str]()
    for variable in variables:
        value = environ.get(variable)
        if value is None:
            continue
        listed = _listed(value, left)
        if listed != left:
            said.append(f"{variable}={value!r} shows {len(listed)} of {len(left)}")
        left = tuple(replace(device, index=index) for index, device in enumerate(listed))
    return Visible(left, "; ".join(said))


def _listed(value: str, devices: tuple[DeviceInfo, ...]) -> tuple[DeviceInfo, ...]:
    listed: list[DeviceInfo] = []
    for entry in value.split(","):
        found = _named(entry.strip(), devices)
        if found is None:
            break
        if found in listed:
            return ()
        listed.append(found)
    return tuple(listed)


def _named(entry: str, devices: tuple[DeviceInfo, ...]) -> DeviceInfo | None:
    number = re.match(r"\+?(\d+)", entry)
    if number is not None:
        return next((device for device in devices if device.index == int(number[1])), None)
    found = [device for device in devices if entry and (device.uuid or "").lower().startswith(entry.lower())]
    return found[0] if len(found) == 1 else None
