"""Declares the facts (`sglcore.device.facts.Facts`) of an Intel GPU, such as streams and default
graph kind."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts(index: int = 0) -> Facts:
    """Implements `DevicePackage.facts` for GPU number `index`: streams, graphs and pinned memory,
    and all dtypes of models, which the oldest of these GPUs support too. The same for every GPU;
    asks no driver and raises nothing."""
    return Facts(
        tensor_device=f"xpu:{index}",
        index_dtype="int64",
        has_streams=True,
        has_pinned_memory=True,
        reaches_pinned_memory=True,
        default_graph="full",
    )
