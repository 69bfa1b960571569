"""The facts of an Ascend NPU."""

from __future__ import annotations

from sglcore.device.facts import Facts

STREAMS = 2048
"""Streams of the runtime; every captured piece keeps one."""
RESERVED = 248
"""Those that are left to the runtime, to collectives and to eager work."""


def facts() -> Facts:
    """Cell numbers are int32, pages lie whole and are as large as the attention operator wants them, and a replay must be
    told the lengths by the host."""
    return Facts(
        tensor_device="npu:0",
        cache_loc_dtype="int32",
        kv_page_layout="page_major",
        page_size=128,
        needs_host_lengths=True,
        has_streams=True,
        has_pinned_memory=True,
        collective_backend="hccl",
        default_graph="full",
        most_graph_segments=STREAMS - RESERVED,
    )
