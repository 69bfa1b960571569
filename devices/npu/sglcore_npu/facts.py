"""The facts of an Ascend NPU."""

from __future__ import annotations

from sglcore.device.facts import Facts

STREAMS = 2048
"""Streams of the runtime; every captured piece keeps one."""
RESERVED = 248
"""Those that are left to the runtime, to collectives and to eager work."""


def facts(index: int = 0) -> Facts:
    """Cell numbers are int32, pages lie whole and are as large as the attention operator wants them, and a replay must be
    told the lengths by the host."""
    return Facts(
        tensor_device=f"npu:{index}",
        index_dtype="int32",
        page_size=128,
        needs_host_lengths=True,
        has_streams=True,
        has_pinned_memory=True,
        default_graph="full",
        most_graph_segments=STREAMS - RESERVED,
    )
