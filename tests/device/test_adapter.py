"""The adapter turns a declaration of an older contract number into a current one and wraps its
references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglcore.core.errors import DeviceError
from sglcore.device.adapter import ADAPTERS, Keywords, adapted
from sglcore.device.candidate import Candidate
from sglcore.device.choice import Requested
from sglcore.device.discovery import Installed, check_api
from sglcore.device.import_references import modules, resolve, wrapped
from sglcore.device.package import API, OLDEST, understood
from sglcore.device.probe import Fact, ProbeReport
from sglcore.device.selection import decide
from tests.device.test_package import PACKAGE


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper: returns the function's result twice."""
    return lambda *args: [function(*args)] * 2


def from_1(given: Keywords) -> Keywords:
    """Rename `old` to `new`."""
    kept = {name: value for name, value in given.items() if name != "old"}
    return {**kept, "new": given["old"]}


def from_2(given: Keywords) -> Keywords:
    """Add `more`, which is now required."""
    return {**given, "more": "filled in"}


def test_each_function_of_the_chain_makes_the_next_number() -> None:
    chain = {1: from_1, 2: from_2}
    assert adapted({"api": 1, "old": "x"}, chain) == {"api": 3, "new": "x", "more": "filled in", "written_for": 1}
    assert adapted({"api": 2, "new": "x"}, chain) == {"api": 3, "new": "x", "more": "filled in", "written_for": 2}


@pytest.mark.parametrize("given", [{"api": 3, "new": "x"}, {"api": 9}, {}])
def test_what_is_of_todays_number_or_of_one_that_nobody_knows_stays_as_it_is(given: Keywords) -> None:
    assert adapted(given, {1: from_1, 2: from_2}) is given


def test_the_numbers_taken_are_todays_and_the_one_before() -> None:
    assert [list(understood(api)) for api in (OLDEST, OLDEST + 1, OLDEST + 2)] == [
        [OLDEST],
        [OLDEST, OLDEST + 1],
        [OLDEST + 1, OLDEST + 2],
    ]


def test_every_older_number_that_is_taken_has_its_adapter_and_no_other_has() -> None:
    assert set(ADAPTERS) == set(understood()) - {API}, "docs/add-a-device.md, When the number rises"


def test_every_number_that_is_taken_has_a_frozen_package() -> None:
    folders = [Path(__file__).with_name(f"api{number}") for number in understood()]
    assert all((folder / "contract.txt").is_file() for folder in folders), "docs/add-a-device.md, When the number rises"


@pytest.mark.parametrize(
    ("number", "upgraded"), [(OLDEST - 1, "sglcore-one"), (OLDEST + 2, "sglcore"), (OLDEST + 7, "sglcore")]
)
def test_any_other_number_is_refused_with_both_and_the_command(number: int, upgraded: str) -> None:
    today = OLDEST + 1
    with pytest.raises(DeviceError) as caught:
        check_api(number, "sglcore-one", "one", today)
    assert str(caught.value) == (
        f"device 'one' of sglcore-one was written for API {number}; wanted API {OLDEST} or {today}, which this sglcore "
        f"understands; pip install --upgrade {upgraded}"
    )
    for taken in (OLDEST, today):
        check_api(taken, "sglcore-one", "one", today)


def test_a_wrapped_reference_gives_what_the_wrappers_make_of_it() -> None:
    once = wrapped("math:sqrt", f"{__name__}:doubled")
    assert resolve(once)(9) == [3.0, 3.0]
    assert resolve(wrapped(once, f"{__name__}:doubled"))(4) == [[2.0, 2.0], [2.0, 2.0]]


def test_a_wrapped_reference_is_checked_as_it_is_declared_and_names_all_its_modules() -> None:
    package = replace(PACKAGE, probe=wrapped("a.b:probe", "c:by"))
    assert modules(package.probe) == ("c", "a.b") and modules("a.b:probe.deep") == ("a.b",)
    for wrong in ("c:by(a.b)", "c(a:b)", "c:by(a:b", "c:by()", "(a:b)"):
        with pytest.raises(DeviceError, match="device package 'one' refers to .*wanted a reference such as"):
            replace(PACKAGE, probe=wrong)


def test_a_start_on_a_package_of_an_older_number_says_so_with_the_remedy() -> None:
    here = Fact(True, "here")
    installed = Installed("one", "sglcore-one", "1.0", replace(PACKAGE, written_for=2))
    chosen = decide((Candidate(installed, ProbeReport(here, here, here, here)),), Requested("one", "--device"), ())
    row = next(row for row in chosen.rows if row.topic == "device package")
    assert (row.requested, row.effective, row.downgrade) == (f"API {API}", "API 2", False)
    assert f"until API {API + 1}" in row.reason and row.remedy == "pip install --upgrade sglcore-one"
