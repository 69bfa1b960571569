"""The facts of a processor: what this package declares of its device to the core."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts(index: int = 0) -> Facts:
    """Implements `DevicePackage.facts`: return what the processor offers (host memory is device
    memory, pages of 16 tokens, bfloat16 preferred, a decode step is a list of native kernel calls).
    `index` is not used: there is one processor."""
    return Facts(
        tensor_device="cpu",
        index_dtype="int64",
        page_size=16,
        shares_host_memory=True,
        preferred_dtype="bfloat16",
        default_graph="native",
    )
