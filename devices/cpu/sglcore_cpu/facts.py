"""The processor's facts."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts() -> Facts:
    """Host memory is device memory; a decode step is a list of native kernel calls."""
    return Facts(
        tensor_device="cpu",
        cache_loc_dtype="int64",
        page_size=16,
        shares_host_memory=True,
        collective_backend="gloo",
        preferred_dtype="bfloat16",
        default_graph="native",
    )
