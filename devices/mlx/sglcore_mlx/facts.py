"""The facts of a device on MLX."""

from __future__ import annotations

import sys

from sglcore.device.facts import Facts
from sglcore.device.system import host_system
from sglcore_mlx.probe import mlx_build


def facts(index: int = 0) -> Facts:
    """Memory is one for host and device; MLX orders its own work, so the core keeps no streams.
    Nothing is imported: the device's kind follows from the build that is installed."""
    return Facts(
        tensor_device=device_kind(),
        index_dtype="int32",
        page_size=16,
        shares_host_memory=True,
    )


def device_kind() -> str:
    """What MLX calls the device that this build computes on: "gpu" (Metal, CUDA) or "cpu"."""
    build = mlx_build(host_system())
    has_gpu = sys.platform == "darwin" or (build is not None and build.is_cuda)
    return "gpu" if has_gpu else "cpu"
