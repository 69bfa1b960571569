"""Declares the facts (`sglcore.device.facts.Facts`) of an AMD GPU. torch names its devices "cuda"
on AMD GPUs too."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts(index: int = 0) -> Facts:
    """Implements `DevicePackage.facts` for GPU number `index`: streams, graphs and pinned memory,
    the same for every AMD GPU. Asks no driver and raises nothing."""
    return Facts(
        tensor_device=f"cuda:{index}",
        index_dtype="int64",
        page_size=16,
        has_streams=True,
        has_pinned_memory=True,
        reaches_pinned_memory=True,
        default_graph="full",
    )
