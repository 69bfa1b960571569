"""The values by which quirk differs from other devices. Each is explained in
sglcore/device/facts.py."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts(index: int = 0) -> Facts:
    """int32 indices, one float dtype, no steps in parallel with the host, and calls that take their
    sizes from the host."""
    return Facts(
        tensor_device=f"quirk:{index}",
        index_dtype="int32",
        dtypes=("bfloat16",),
        preferred_dtype="bfloat16",
        page_size=32,
        needs_host_lengths=True,
        allows_mixed_batches=False,
    )
