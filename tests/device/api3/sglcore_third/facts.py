"""The values by which third differs from other devices."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts(index: int = 0) -> Facts:
    """Every fact by name."""
    return Facts(
        tensor_device=f"third:{index}",
        index_dtype="int64",
        dtypes=("float32", "bfloat16", "float16"),
        preferred_dtype=None,
        page_size=16,
        needs_host_lengths=False,
        allows_mixed_batches=True,
        has_streams=True,
        has_pinned_memory=True,
        reaches_pinned_memory=False,
        shares_host_memory=False,
        default_graph="full",
        most_graph_segments=None,
    )
