"""The core's Triton attention, with launch parameters for an Intel GPU's capability."""

from __future__ import annotations

from sglcore.runtime.attention.triton import TritonAttention as PortableAttention
from sglcore.runtime.kernels.compilers import triton_gap
from sglcore.runtime.kernels.triton import Tuning
from sglcore_xpu.capability import read_capability
from sglcore_xpu.kernels import COMPILER, TRITON, tuning


class TritonAttention(PortableAttention):
    """Decoder attention for every page size and head size, with windows, softcaps and sinks: the
    core's class, which calls `make_tuning` for its launch parameters."""

    @classmethod
    def unavailable(cls) -> str:
        """Return why Triton attention cannot run, with the remedy: no installed Triton compiles for
        Intel GPUs. Otherwise empty."""
        missing = triton_gap(COMPILER)
        return f"{missing}; {TRITON}" if missing else ""

    def make_tuning(self) -> Tuning:
        """Return the launch parameters for the current GPU, the same that the kernel table uses."""
        return tuning(read_capability())
