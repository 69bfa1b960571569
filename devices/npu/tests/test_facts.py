"""The facts of an NPU follow from the chip's properties in the extension."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sglcore_npu.facts import facts


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_a_chip_that_does_not_compute_in_bfloat16_is_not_said_to(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu = torch.get_device_module("npu")
    monkeypatch.setattr(npu, "is_bf16_supported", lambda: has_bfloat16)
    assert ("bfloat16" in facts().dtypes) is has_bfloat16
    assert facts().preferred_dtype == (None if has_bfloat16 else "float16")
    assert "bfloat16" in facts(npu.device_count()).dtypes
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert "bfloat16" in facts(0).dtypes


def test_a_simulated_chip_without_bfloat16_is_one() -> None:
    code = (
        "import sglcore_sim as sim; sim.install('npu:310P'); from sglcore_npu.facts import facts; print(facts().dtypes)"
    )
    ran = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert "bfloat16" not in ran.stdout and "float16" in ran.stdout
