"""The facts of a Moore Threads GPU."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts() -> Facts:
    """Streams, graphs and pinned memory; pages of the size that the vendor's attention library is built for."""
    return Facts(
        tensor_device="musa:0",
        cache_loc_dtype="int64",
        page_size=64,
        has_streams=True,
        has_pinned_memory=True,
        collective_backend="mccl",
        default_graph="full",
    )
