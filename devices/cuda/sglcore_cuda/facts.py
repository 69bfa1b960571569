"""The facts of an NVIDIA GPU."""

from __future__ import annotations

import torch

from sglcore.device.facts import Facts

BFLOAT16: tuple[int, int] = (8, 0)
FP8: tuple[int, int] = (8, 9)
"""The compute capabilities from which the matrix units take these formats."""


def facts() -> Facts:
    """Streams, graphs and pinned memory; number formats by the compute capability of the current GPU, if there is one."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return Facts(
        tensor_device="cuda:0",
        cache_loc_dtype="int64",
        page_size=16,
        has_streams=True,
        has_pinned_memory=True,
        collective_backend="nccl",
        fp8_format="e4m3fn" if capability >= FP8 else None,
        preferred_dtype=None if capability >= BFLOAT16 else "float16",
        default_graph="full",
    )
