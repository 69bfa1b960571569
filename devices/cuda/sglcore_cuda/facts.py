"""Declares the facts (`sglcore.device.facts.Facts`) of an NVIDIA GPU, such as its dtypes and
default graph kind."""

from __future__ import annotations

import torch

from sglcore.device.facts import Facts

BFLOAT16: tuple[int, int] = (8, 0)
"""The lowest compute capability with bfloat16 matrix units."""


def facts(index: int = 0) -> Facts:
    """Implements `DevicePackage.facts` for GPU number `index`: streams, graphs and pinned memory.
    Dtypes depend on its compute capability: without bfloat16 below 8.0. A GPU that is not present
    is described as one of 8.0; nothing is raised."""
    capability = torch.cuda.get_device_capability(index) if torch.cuda.device_count() > index else BFLOAT16
    has_bfloat16 = capability >= BFLOAT16
    return Facts(
        tensor_device=f"cuda:{index}",
        index_dtype="int64",
        dtypes=("float32", "bfloat16", "float16") if has_bfloat16 else ("float32", "float16"),
        preferred_dtype=None if has_bfloat16 else "float16",
        page_size=16,
        has_streams=True,
        has_pinned_memory=True,
        reaches_pinned_memory=True,
        default_graph="full",
    )
