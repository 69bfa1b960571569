"""The kernels for Arm: built by a cross compiler, and tested by all tests of native kernels in an
emulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.selection import Selection
from devices.cpu.tests.native import far
from devices.cpu.tests.native.libraries import prepared
from devices.cpu.tests.native.run_with import TAIL, child, files_to_run
from sglcore_cpu.compile import Variant

pytestmark = pytest.mark.needs("cross_compiler")


@pytest.fixture(scope="module")
def driver() -> Path:
    """The program that runs the Arm kernels."""
    assert not far.missing(), far.missing()
    place = prepared(Variant(far.COMPILER, "aarch64"), "arm")
    return far.build_driver(place.folder / "far", place.library)


def test_every_kernel_computes_the_same_on_arm(driver: Path, selection: Selection) -> None:
    ran = child("far", driver, *files_to_run(selection))
    assert ran.returncode == 0, ran.stdout[-TAIL:]
    assert " passed" in ran.stdout


def test_an_arm_processor_says_what_it_has(driver: Path) -> None:
    library = far.FarLibrary(driver)
    assert library.usable() == ("neon",)
    library.close()
    plain = far.FarLibrary(driver, processor="cortex-a53")
    assert plain.usable() == ()
    plain.close()
