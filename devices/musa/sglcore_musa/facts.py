"""The facts of a Moore Threads GPU."""

from __future__ import annotations

from sglcore.device.facts import Facts
from sglcore.runtime.extension import device_module

BFLOAT16: tuple[int, int] = (2, 2)
"""The compute capability from which GPUs compute in bfloat16: MTT S4000 does, MTT S80 and S3000
(2.1) do not."""


def facts(index: int = 0) -> Facts:
    """Streams, graphs and pinned memory; pages of the size that the vendor's attention library is
    built for; number formats by the compute capability of the GPU, if it is there."""
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
