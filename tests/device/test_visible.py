"""The numbers of devices in a process under the variables of vendors' runtimes, and mutants that
read these variables wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from sglcore.device.probe import DeviceInfo
from sglcore.device.visible import Visible, visible_devices

FOUR = tuple(DeviceInfo(index, f"device {index}", uuid=f"GPU-{index}f00{index}") for index in range(4))

CASES: tuple[tuple[dict[str, str], list[int]], ...] = (
    ({}, [0, 1, 2, 3]),
    ({"FIRST": "0,1,2,3"}, [0, 1, 2, 3]),
    ({"FIRST": "3,1"}, [3, 1]),
    ({"FIRST": " 2 , +0"}, [2, 0]),
    ({"FIRST": "1,7,2"}, [1]),
    ({"FIRST": "1,-1,2"}, [1]),
    ({"FIRST": "2,2"}, []),
    ({"FIRST": "10,2"}, []),
    ({"FIRST": "GPU-3,gpu-1F001"}, [3, 1]),
    ({"FIRST": "GPU-"}, []),
    ({"FIRST": ""}, []),
    ({"FIRST": "all"}, []),
    ({"FIRST": "3,2,1", "SECOND": "2,0"}, [1, 3]),
    ({"SECOND": "1"}, [1]),
)
"""Variables, and the devices that they make visible, by the system's number."""

Reading = Callable[..., Visible]


def numbers_are_right(read: Reading) -> bool:
    """The law: the visible devices are those of the vendors' runtimes, numbered from 0, and hidden
    ones are reported."""
    for environ, shown in CASES:
        seen = read(FOUR, environ, "FIRST", "SECOND")
        if [device.name for device in seen.devices] != [f"device {number}" for number in shown]:
            return False
        if [device.index for device in seen.devices] != list(range(len(shown))):
            return False
        if bool(seen.hidden) != (shown != [0, 1, 2, 3]) or (seen.failure is None) != bool(shown):
            return False
    return True


def systems_numbers(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *names: str) -> Visible:
    seen = visible_devices(devices, environ, *names)
    return replace(seen, devices=tuple(replace(device, index=int(device.name[-1])) for device in seen.devices))


def in_the_systems_order(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *names: str) -> Visible:
    seen = visible_devices(devices, environ, *names)
    ordered = sorted(seen.devices, key=lambda device: device.name)
    return replace(seen, devices=tuple(replace(device, index=index) for index, device in enumerate(ordered)))


def first_variable_only(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *names: str) -> Visible:
    return visible_devices(devices, environ, names[0])


def other_order_of_variables(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *names: str) -> Visible:
    return visible_devices(devices, environ, *reversed(names))


def passes_over_what_is_not_there(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *names: str) -> Visible:
    known = {
        name: ",".join(e for e in value.split(",") if e.strip("+ ") not in ("7", "-1"))
        for name, value in environ.items()
    }
    return visible_devices(devices, known, *names)


def empty_is_unset(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *names: str) -> Visible:
    return visible_devices(devices, {name: value for name, value in environ.items() if value}, *names)


def silent(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *names: str) -> Visible:
    return replace(visible_devices(devices, environ, *names), hidden="")


def test_devices_are_numbered_as_runtimes_number_them() -> None:
    assert numbers_are_right(visible_devices)


@pytest.mark.parametrize(
    "mutant",
    [
        systems_numbers,
        in_the_systems_order,
        first_variable_only,
        other_order_of_variables,
        passes_over_what_is_not_there,
        empty_is_unset,
        silent,
    ],
)
def test_a_wrong_reading_is_caught(mutant: Reading) -> None:
    assert not numbers_are_right(mutant)


def test_what_is_hidden_names_the_variable_its_value_and_how_many_it_shows() -> None:
    seen = visible_devices(FOUR, {"FIRST": "3,2", "SECOND": ""}, "FIRST", "SECOND")
    assert seen.hidden == "FIRST='3,2' shows 2 of 4; SECOND='' shows 0 of 2"
    assert seen.failure is not None and seen.failure.evidence == seen.hidden and "unset" in seen.failure.remedy


WANTED = ("", "-1", "-1,0", " none ", "void", "NoDevFiles")
MISTAKEN = ("4", "7,0", "2,2", "GPU-", "all")


def none_is_wanted_or_a_mistake(read: Reading) -> bool:
    """The law: `is_wanted` is true for a value that hides all devices, and false for one that names
    a missing device."""
    found = {value: read(FOUR, {"FIRST": value}, "FIRST").failure for value in (*WANTED, *MISTAKEN)}
    after = read(FOUR, {"FIRST": "7", "SECOND": "0"}, "FIRST", "SECOND").failure
    before = read(FOUR, {"FIRST": "", "SECOND": "0"}, "FIRST", "SECOND").failure
    return (before is not None and before.is_wanted) and all(
        fact is not None and fact.is_wanted is (value in WANTED) for value, fact in {**found, "7;0": after}.items()
    )


def always_wanted(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *names: str) -> Visible:
    seen = visible_devices(devices, environ, *names)
    return seen if seen.failure is None else replace(seen, failure=replace(seen.failure, is_wanted=True))


def never_wanted(devices: Sequence[DeviceInfo], environ: Mapping[str, str], *names: str) -> Visible:
    seen = visible_devices(devices, environ, *names)
    return seen if seen.failure is None else replace(seen, failure=replace(seen.failure, is_wanted=False))


def test_to_hide_all_is_a_wish_and_to_name_what_is_not_there_a_mistake() -> None:
    assert none_is_wanted_or_a_mistake(visible_devices)
    assert not any(map(none_is_wanted_or_a_mistake, (always_wanted, never_wanted, empty_is_unset)))


def test_where_no_file_lists_devices_only_the_wish_for_none_hides_them() -> None:
    assert visible_devices((), {"FIRST": "0"}, "FIRST") == Visible(())
    seen = visible_devices((), {"FIRST": ""}, "FIRST")
    assert seen.failure is not None and seen.failure.is_wanted and seen.hidden == "FIRST='' shows 0 of 0"
