"""Division of a device's compute units, for every possible device."""

from __future__ import annotations

import pytest

from sglcore.step.compute_shares import KEPT, THRESHOLDS, prompt_units, share


def test_more_rows_never_have_a_lower_share_and_every_share_is_had() -> None:
    shares = [share(rows) for rows in range(max(THRESHOLDS) + 1000)]
    assert shares == sorted(shares) and set(shares) == set(range(len(KEPT)))
    assert [share(rows) for rows in (0, 15, 16, 63, 64)] == [0, 0, 1, 1, 2]


def test_every_device_that_can_be_divided_is() -> None:
    for units in range(1, 400):
        for multiple in (1, 2, 3, 4, 8, 16):
            found = prompt_units(units, multiple)
            assert bool(found) == (units > multiple), (units, multiple)
            if found:
                assert len(found) == len(KEPT) and list(found) == sorted(found, reverse=True)
                assert all(part % multiple == 0 and 0 < part < units for part in found), (units, multiple, found)


@pytest.mark.parametrize(("units", "wanted"), [(132, (96, 80, 64)), (148, (104, 88, 72)), (16, (8, 8, 8)), (8, ())])
def test_parts_of_devices_by_eights(units: int, wanted: tuple[int, ...]) -> None:
    assert prompt_units(units, 8) == wanted
