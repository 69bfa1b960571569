"""The core's Triton attention, with launch parameters for an NVIDIA GPU's capability."""

from __future__ import annotations

from sglcore.runtime.attention.triton import TritonAttention as PortableAttention
from sglcore.runtime.kernels.triton import Tuning
from sglcore_cuda.capability import read_capability
from sglcore_cuda.kernels import tuning


class TritonAttention(PortableAttention):
    """Decoder attention for every page size and head size, with windows, softcaps and sinks: the
    core's class with this package's launch parameters (`make_tuning`)."""

    def make_tuning(self) -> Tuning:
        """Return the launch parameters for the current GPU, the same that the kernel table uses."""
        return tuning(read_capability())
