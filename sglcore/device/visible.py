"""Which of a system's devices a process may use, by the variables that vendors' runtimes read. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sglcore.device.probe import DeviceInfo, Fact

NO_DEVICE = frozenset({"", "none", "void", "nodevfiles"})
"""What people and cluster managers write where a process is to have no device; a number below 0 says the same."""


@dataclass(frozen=True, slots=True)
class Visible:
    """`devices` as the process numbers them; `hidden`: the variables that keep others from it, or that say another order,
    each with its value; empty where they are as the system has them; `failure`: why the runtime can not be used, where
    every device is hidden."""

    devices: tuple[DeviceInfo, ...]
    hidden: str = ""
    failure: Fact | None = None


def visible_devices(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *variables: str) -> Visible:
    """Apply the variables that are set, one to what the other left: each lists numbers, or beginnings of uuids.

    As the runtimes read them: an entry that names no device ends the list, an entry that comes twice empties it. Where
    nothing is left because a variable says so, and not because it names what is not there, that is wanted.
    """
    left, said, is_wanted = tuple(devices), list[str](), False
    for variable in variables:
        value = environ.get(variable)
        if value is None:
            continue
        listed, is_wanted = _listed(value, left), is_wanted or shows_none(value)
        if listed != left or is_wanted:
            said.append(f"{variable}={value!r} shows {len(listed)} of {len(left)}")
        left = tuple(replace(device, index=index) for index, device in enumerate(listed))
    hidden = "; ".join(said)
    return Visible(left, hidden, all_hidden(hidden, is_wanted) if hidden and not left else None)


def shows_none(value: str) -> bool:
    """Whether the value of a variable says that the process is to have no device."""
    first = value.partition(",")[0].strip().lower()
    return first in NO_DEVICE or re.fullmatch(r"-\d+", first) is not None


def all_hidden(hidden: str, is_wanted: bool) -> Fact:
    """That every device is hidden, by the variables that `hidden` tells of."""
    return Fact(False, hidden, "unset it, or name there a device of this machine", is_wanted)


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
