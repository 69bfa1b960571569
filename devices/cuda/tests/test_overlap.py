"""When speculative steps overlap on this device: as its attention needs lengths on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore_cuda import package
from tests.laws.vendor_libraries import *  # noqa: F403
from tests.laws.vendor_libraries import spoken

pytestmark = pytest.mark.needs("simulator")


@pytest.mark.parametrize(
    ("named", "effective", "reason"),
    [
        ("triton", "on", "steps are planned while the device runs"),
        ("flash_attention", "on", "steps are planned while the device runs"),
        ("flashinfer", "off", "FlashInferAttention needs exact lengths on the host"),
    ],
)
def test_speculative_steps_overlap_where_attention_needs_no_lengths_on_the_host(
    model: Path, named: str, effective: str, reason: str
) -> None:
    for speculative, wanted, why in (("ngram", effective, reason), ("off", "on", "")):
        _, told = spoken(model, package.name, attention_backend=named, speculative=speculative)
        (row,) = (line for line in told.splitlines() if line.startswith("overlap: "))
        assert row.startswith(f"overlap: {wanted}: ") and why in row
