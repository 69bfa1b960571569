"""The facts of an Ascend NPU."""

from __future__ import annotations

from importlib import import_module

import torch

from sglcore.device.facts import Facts

STREAMS = 2048
"""Streams of the runtime; every captured piece keeps one."""
RESERVED = 248
"""Those that are left to the runtime, to collectives and to eager work."""


def facts(index: int = 0) -> Facts:
    """Cell numbers are int32, pages lie whole and are as large as the attention operator wants them, and a replay must be
    told the lengths by the host. Generations before A2, and 310P, do not compute in bfloat16."""
    has_bfloat16 = computes_bfloat16(index)
    return Facts(
        tensor_device=f"npu:{index}",
        index_dtype="int32",
        dtypes=("float32", "bfloat16", "float16") if has_bfloat16 else ("float32", "float16"),
        preferred_dtype=None if has_bfloat16 else "float16",
        page_size=128,
        needs_host_lengths=True,
        has_streams=True,
        has_pinned_memory=True,
        default_graph="full",
        most_graph_segments=STREAMS - RESERVED,
    )


def computes_bfloat16(index: int) -> bool:
    """Whether an NPU does, as torch_npu tells it of the chips of this machine; True where that or the NPU is not there."""
    try:
        import_module("torch_npu")
    except ImportError:
        return True
    npu = torch.get_device_module("npu")
    return npu.device_count() <= index or npu.is_bf16_supported()
