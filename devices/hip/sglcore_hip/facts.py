"""The facts of an AMD GPU. torch calls its devices by the other vendor's name, on purpose; these
are its own names."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts(index: int = 0) -> Facts:
    """Streams, graphs and pinned memory."""
    return Facts(
        tensor_device=f"cuda:{index}",
        index_dtype="int64",
        page_size=16,
        has_streams=True,
        has_pinned_memory=True,
        reaches_pinned_memory=True,
        default_graph="full",
    )
