"""The facts of a Moore Threads GPU."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts(index: int = 0) -> Facts:
    """Streams, graphs and pinned memory; pages of the size that the vendor's attention library is built for."""
    return Facts(
        tensor_device=f"musa:{index}",
        index_dtype="int64",
        page_size=64,
        has_streams=True,
        has_pinned_memory=True,
        default_graph="full",
    )
