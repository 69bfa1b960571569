"""Packing the linear weights needs memory for one more weight than loading, and keeps no copy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.models.test_loader_memory import LOAD_AND_MEASURE, measured, write_checkpoint

PACKED = LOAD_AND_MEASURE.replace(
    "from sglcore.runtime.kernels.table import KernelTable", "from sglcore_cpu.choice import kernels"
).replace("kernels=KernelTable()", "kernels=kernels()")
AFTER = "\nprint((kilobytes('VmRSS') - start) * 1024 / sum(weight.nbytes for weight in model.weights.parameters))"


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's peak-memory counter")
def test_packed_weights_stay_under_the_bound_while_and_after_loading(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 10)
    script = PACKED.replace("before = kilobytes", "start = kilobytes('VmRSS')\nbefore = kilobytes") + AFTER
    peak, after = (float(text) for text in measured(script, folder, "bfloat16", "drop").split())
    print(f"peak {peak:.3f}, after {after:.3f} times the weights")
    assert 0.95 < peak < 1.15
    assert after < 1.1
