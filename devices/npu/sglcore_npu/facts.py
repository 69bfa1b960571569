"""Declares the facts (`sglcore.device.facts.Facts`) of an Ascend NPU, such as its index dtype and
page size."""

from __future__ import annotations

from sglcore.device.facts import Facts
from sglcore.runtime.extension import device_module

STREAMS = 2048
"""The runtime's number of streams; every captured piece keeps one."""
RESERVED = 248
"""Streams left for the runtime, collectives and eager work."""


def facts(index: int = 0) -> Facts:
    """Implements `DevicePackage.facts` for NPU number `index`: KV slot indices are int32, and pages
    have the attention operator's size, 128. Generations before A2, and 310P, do not support
    bfloat16; an NPU that is not present is described with it. Raises nothing."""
    npu = device_module("torch_npu", "npu", index)
    has_bfloat16 = npu is None or npu.is_bf16_supported()
    return Facts(
        tensor_device=f"npu:{index}",
        index_dtype="int32",
        dtypes=("float32", "bfloat16", "float16") if has_bfloat16 else ("float32", "float16"),
        preferred_dtype=None if has_bfloat16 else "float16",
        page_size=128,
        has_streams=True,
        has_pinned_memory=True,
        default_graph="full",
        most_graph_segments=STREAMS - RESERVED,
    )
