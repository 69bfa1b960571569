"""The facts of a Moore Threads GPU."""

from __future__ import annotations

from importlib import import_module

from sglcore.device.facts import Facts
from sglcore_musa.vendor import musa

BFLOAT16: tuple[int, int] = (2, 2)
"""The compute capability from which GPUs compute in bfloat16: MTT S4000 does, MTT S80 and S3000 (2.1) do not."""


def facts(index: int = 0) -> Facts:
    """Streams, graphs and pinned memory; pages of the size that the vendor's attention library is built for; number formats
    by the compute capability of the GPU, if it is there."""
    has_bfloat16 = capability(index) >= BFLOAT16
    return Facts(
        tensor_device=f"musa:{index}",
        index_dtype="int64",
        dtypes=("float32", "bfloat16", "float16") if has_bfloat16 else ("float32", "float16"),
        preferred_dtype=None if has_bfloat16 else "float16",
        page_size=64,
        has_streams=True,
        has_pinned_memory=True,
        default_graph="full",
    )


def capability(index: int) -> tuple[int, int]:
    """Of a GPU, as torch_musa tells it; of one with bfloat16 where that or the GPU is not there."""
    try:
        import_module("torch_musa")
    except ImportError:
        return BFLOAT16
    return musa().get_device_capability(index) if musa().device_count() > index else BFLOAT16
