"""The core's Triton attention, launched as the capability of an AMD GPU wants."""

from __future__ import annotations

from sglcore.runtime.attention.triton import TritonAttention as PortableAttention
from sglcore.runtime.kernels.triton import Tuning
from sglcore_hip.capability import read_capability
from sglcore_hip.kernels import tuning


class TritonAttention(PortableAttention):
    """Decoder attention of every page size, head size, window, softcap and sink."""

    def make_tuning(self) -> Tuning:
        """As the kernel table's."""
        return tuning(read_capability())
