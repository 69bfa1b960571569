"""The core's Triton attention, launched as the capability of third wants."""

from __future__ import annotations

from sglcore.runtime.attention.triton import TritonAttention as PortableAttention
from sglcore.runtime.kernels.compilers import triton_gap
from sglcore.runtime.kernels.triton import Tuning
from sglcore_third.capability import read_capability
from sglcore_third.kernels import COMPILER, TRITON, tuning


class TritonAttention(PortableAttention):
    """Decoder attention of every page size, head size and window."""

    @classmethod
    def unavailable(cls) -> str:
        """By what the installed Triton compiles for."""
        missing = triton_gap(COMPILER)
        return f"{missing}; {TRITON}" if missing else ""

    def make_tuning(self) -> Tuning:
        """As the kernel table's."""
        return tuning(read_capability())
