"""The core's Triton attention, where a Triton for this GPU is installed."""

from __future__ import annotations

from sglcore.runtime.attention.contract import Unavailable
from sglcore_musa.kernels import lanes, triton_gap

if gap := triton_gap():
    raise Unavailable(gap)

from sglcore.runtime.attention import triton
from sglcore.runtime.kernels.triton import Tuning


class TritonAttention(triton.TritonAttention):
    """As the core's, launched for this GPU's warps."""

    def make_tuning(self) -> Tuning:
        """As the kernel table's."""
        return Tuning(lanes=lanes())
