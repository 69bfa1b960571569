"""What the laws in bfloat16 expect of cells of 8 bits."""

from __future__ import annotations

import pytest

EIGHT_BITS = 0.25
"""Cells of 8 bits add a rounding of their own: up to 0.2004 where the widest instructions are AVX2, where all else is within 0.2."""


@pytest.fixture(autouse=True)
def bound_of_8_bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own bound, beside the file, which one of the exhaustive groups covers."""
    if request.node.name.startswith("test_cells_of_8_bits_stay_close"):
        monkeypatch.setattr(request.module, "TOLERANCE", EIGHT_BITS)
