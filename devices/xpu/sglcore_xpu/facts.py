"""The facts of an Intel GPU."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts(index: int = 0) -> Facts:
    """Streams, graphs and pinned memory; every type that models come in, which the oldest of these
    GPUs computes in too."""
    return Facts(
        tensor_device=f"xpu:{index}",
        index_dtype="int64",
        has_streams=True,
        has_pinned_memory=True,
        reaches_pinned_memory=True,
        default_graph="full",
    )
