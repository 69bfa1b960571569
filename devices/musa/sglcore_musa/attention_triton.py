"""The core's Triton attention, if a Triton for this GPU is installed."""

from __future__ import annotations

from sglcore.runtime.attention.contract import Unavailable
from sglcore_musa.kernels import lanes, triton_gap

if gap := triton_gap():
    raise Unavailable(gap)

from sglcore.runtime.attention import triton
from sglcore.runtime.kernels.triton import Tuning


class TritonAttention(triton.TritonAttention):
    """The core's Triton attention, launched with this GPU's warp size."""

    def make_tuning(self) -> Tuning:
        """Return the launch parameters, as the kernel table has them: those for the current GPU's
        warp size."""
        return Tuning(lanes=lanes())
