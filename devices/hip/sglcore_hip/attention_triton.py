"""The core's Triton attention, launched as the capability of an AMD GPU wants."""

from __future__ import annotations

from sglcore.runtime.attention.triton import TritonAttention as PortableAttention
from sglcore_hip.capability import read_capability
from sglcore_hip.kernels import tuning


class TritonAttention(PortableAttention):
    """Decoder attention of every page size, head size and window."""

    tuning = tuning(read_capability())
