"""What the laws in bfloat16 expect of one processor."""

from __future__ import annotations

import pytest
import torch

NARROW, BOUND = "test_cells_of_8_bits_stay_close[granite-hybrid]", 0.25
"""One log-probability of this case is 0.2004 off where the widest instructions are AVX2; the bound
of all others is 0.2."""


@pytest.fixture(autouse=True)
def bound_of_one_case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the file, which an exhaustive group covers that only a processor with more
    instructions can run whole."""
    if request.node.name == NARROW and torch.backends.cpu.get_cpu_capability() == "AVX2":
        monkeypatch.setattr(request.module, "TOLERANCE", BOUND)
