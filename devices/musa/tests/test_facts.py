"""The facts of a GPU follow from its compute capability."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglcore_musa.facts import facts
from sglcore_musa.vendor import musa


@pytest.mark.parametrize(("found", "has_bfloat16"), [((2, 1), False), ((2, 2), True), ((3, 1), True)])
def test_a_chip_before_2_2_does_not_compute_in_bfloat16(
    found: tuple[int, int], has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(musa(), "get_device_capability", lambda index: found)
    assert ("bfloat16" in facts().dtypes) is has_bfloat16
    assert facts().preferred_dtype == (None if has_bfloat16 else "float16")


def test_each_gpu_is_asked_for_its_own_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(musa(), "device_count", lambda: 2)
    monkeypatch.setattr(musa(), "get_device_capability", lambda index: ((3, 1), (2, 1))[index])
    assert ["bfloat16" in facts(index).dtypes for index in (0, 1)] == [True, False]


def test_of_a_gpu_that_is_not_there_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(musa(), "get_device_capability", lambda index: (2, 1))
    assert "bfloat16" in facts(musa().device_count()).dtypes
    monkeypatch.setitem(sys.modules, "torch_musa", None)
    assert "bfloat16" in facts(0).dtypes


def test_a_simulated_chip_of_the_oldest_generation_is_one() -> None:
    code = "import sglcore_sim as sim; sim.install('musa:S80'); from sglcore_musa.facts import facts; print(facts().dtypes)"
    ran = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert "bfloat16" not in ran.stdout and "float16" in ran.stdout
