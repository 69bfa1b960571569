"""The devices of a system that a process may use, according to the variables of vendors' runtimes.
Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sglcore.device.probe import DeviceInfo, Fact

NO_DEVICE = frozenset({"", "none", "void", "nodevfiles"})
"""Values with which users and cluster managers hide all devices from a process; a negative number
has the same meaning.
"""


@dataclass(frozen=True, slots=True)
class Visible:
    """What `visible_devices` returns: `devices` as the process numbers them. `hidden`: text that
    names the variables that hide devices or change their order, with their values; empty if there
    are none. `failure`: the reason why the runtime cannot be used, if variables hide every device;
    otherwise None.
    """

    devices: tuple[DeviceInfo, ...]
    hidden: str = ""
    failure: Fact | None = None


def visible_devices(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *variables: str) -> Visible:
    """Apply those of `variables` that are set, in this order, each to the devices that the
    variables before it left, renumbered from 0. Each lists indices, or prefixes of uuids, separated
    by commas.

    As in the vendors' runtimes, an entry that names no device ends the list, and a repeated entry
    empties it. If no device is left, `failure.is_wanted` says whether a variable names no device on
    purpose (`shows_none`), rather than devices that do not exist.
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
    """Return whether the first entry in the value of a variable says that the process has no
    device: nothing, a negative number, or one of NO_DEVICE such as "none", in either case.
    """
    first = value.partition(",")[0].strip().lower()
    return first in NO_DEVICE or re.fullmatch(r"-\d+", first) is not None


def all_hidden(hidden: str, is_wanted: bool) -> Fact:
    """Return the fact that every device is hidden, by the variables that the text `hidden` names.
    `is_wanted`: whether a variable names no device on purpose."""
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
