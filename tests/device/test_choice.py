"""The chosen device is passed by value; a child process reads nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace

import pytest

from sglcore.core.errors import DeviceError
from sglcore.device.choice import ChosenDevice, Requested, adopt, check_same
from sglcore.device.selection import select
from tests.device.site import Site

CHOSEN = ChosenDevice("one", "sglcore-one", "1.0", 3, "it is the only usable accelerator")
CHILD = """
import os, sys
from sglcore.device.choice import adopt
from sglcore.device.discovery import discover
from sglcore.core.errors import SglcoreError
try:
    print("adopted", adopt(sys.argv[1], os.environ.get("SGLCORE_DEVICE"), discover()).name)
except SglcoreError as error:
    sys.exit(f"error: {error}")
"""


def child(
    site: Site, chosen: ChosenDevice, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A real child process that receives the choice as an argument."""
    return site.run("-c", CHILD, chosen.encode(), environ=environ)


def test_what_was_encoded_is_decoded_to_the_same_value() -> None:
    assert ChosenDevice.decode(CHOSEN.encode()) == CHOSEN


@pytest.mark.parametrize("text", ["", "one", "[]", "{}", '{"name": "one"}'])
def test_text_that_is_no_choice_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match="a child process received"):
        ChosenDevice.decode(text)


def test_a_child_adopts_what_its_parent_chose(site: Site) -> None:
    site.add("one")
    choice = select(site.discover(), Requested(), ())
    ran = child(site, choice.chosen)
    assert ran.stdout.strip() == "adopted one", ran.stderr


@pytest.mark.parametrize(
    ("field", "value"), [("name", "two"), ("version", "9.9"), ("api", 1), ("distribution", "acme-one")]
)
def test_a_child_refuses_what_differs_from_what_it_finds_and_names_both(
    site: Site, field: str, value: str | int
) -> None:
    site.add("one")
    ran = child(site, replace(CHOSEN, **{field: value}))
    found = {"name": "one", "version": "1.0", "api": "3", "distribution": "sglcore-one"}[field]
    assert ran.returncode == 1
    assert str(value) in ran.stderr and found in ran.stderr


def test_a_child_refuses_when_its_package_was_upgraded_after_the_parent_started(site: Site) -> None:
    planted = site.add("one")
    chosen = select(site.discover(), Requested(), ()).chosen
    site.set_version(planted, "1.1")
    ran = child(site, chosen)
    assert "this child process found 1.1 as the version of 'one'; wanted 1.0, as its parent" in ran.stderr


def test_a_child_refuses_when_it_was_asked_for_another_device(site: Site) -> None:
    site.add("one")
    site.add("two")
    ran = child(site, CHOSEN, {"SGLCORE_DEVICE": "two"})
    assert "this child process found two as the name; wanted one, as its parent" in ran.stderr
    for same in ("one", "one:0"):
        assert child(site, CHOSEN, {"SGLCORE_DEVICE": same}).returncode == 0
    ran = child(site, CHOSEN, {"SGLCORE_DEVICE": "one:1"})
    assert "this child process found 1 as the number of 'one'; wanted 0, as its parent" in ran.stderr


def test_a_package_that_raises_in_the_child_raises_there_with_its_own_traceback(site: Site) -> None:
    site.add("one", body="raise RuntimeError('the driver is too old')")
    ran = child(site, CHOSEN)
    assert "planted_one" in ran.stderr and "RuntimeError: the driver is too old" in ran.stderr


@pytest.mark.parametrize(("field", "value"), [("name", "two"), ("index", 1)])
def test_a_child_that_chose_another_device_than_its_parent_refuses_to_start(field: str, value: object) -> None:
    check_same(replace(CHOSEN, reason="it was named by --device"), CHOSEN)
    with pytest.raises(DeviceError, match="found (two:0|one:1) as the device; wanted one:0, as its parent"):
        check_same(replace(CHOSEN, **{field: value}), CHOSEN)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("asked", [None, 0, 1])
def test_a_child_that_is_asked_for_another_number_refuses(site: Site, index: int, asked: int | None) -> None:
    site.add("one", devices=2)
    chosen, number = replace(CHOSEN, index=index).encode(), "" if asked is None else f":{asked}"
    if asked in (None, index):
        assert adopt(chosen, f"one{number}", site.discover()).name == "one"
        return
    with pytest.raises(DeviceError, match=f"found {asked} as the number of 'one'; wanted {index}, as its parent"):
        adopt(chosen, f"one{number}", site.discover())


def test_adopting_without_any_installed_package_names_the_one_that_is_missing() -> None:
    with pytest.raises(DeviceError, match="found no device package as the package; wanted one, as its parent"):
        adopt(CHOSEN.encode(), None, ())
