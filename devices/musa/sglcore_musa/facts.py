"""Declares the facts (`sglcore.device.facts.Facts`) of a Moore Threads GPU, such as its dtypes and
page size."""

from __future__ import annotations

from sglcore.device.facts import Facts
from sglcore.runtime.extension import device_module

BFLOAT16: tuple[int, int] = (2, 2)
"""The lowest compute capability with bfloat16: MTT S4000 has it, MTT S80 and S3000 (2.1) have
not."""


def facts(index: int = 0) -> Facts:
    """Implements `DevicePackage.facts` for GPU number `index`: streams, graphs and pinned memory;
    the page size of the vendor's attention library; dtypes by the GPU's compute capability. A GPU
    that is not present is described with bfloat16; nothing is raised."""
    musa = device_module("torch_musa", "musa", index)
    has_bfloat16 = musa is None or musa.get_device_capability(index) >= BFLOAT16
    return Facts(
        tensor_device=f"musa:{index}",
        index_dtype="int64",
        dtypes=("float32", "bfloat16", "float16") if has_bfloat16 else ("float32", "float16"),
        preferred_dtype=None if has_bfloat16 else "float16",
        page_size=64,
        has_streams=True,
        has_pinned_memory=True,
        reaches_pinned_memory=True,
        default_graph="full",
    )
