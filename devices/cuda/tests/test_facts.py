"""The facts of a GPU follow from its compute capability."""

from __future__ import annotations

import pytest
import torch

from sglcore_cuda.facts import facts


@pytest.mark.parametrize(("capability", "has_bfloat16"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_a_chip_before_8_0_does_not_compute_in_bfloat16(
    capability: tuple[int, int], has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    found = facts()
    assert ("bfloat16" in found.dtypes) is has_bfloat16
    assert found.preferred_dtype == (None if has_bfloat16 else "float16")
