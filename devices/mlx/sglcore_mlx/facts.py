"""The facts of a device on MLX: what this package declares of it to the core."""

from __future__ import annotations

import sys

from sglcore.device.facts import Facts
from sglcore.device.system import host_system
from sglcore_mlx.probe import mlx_build


def facts(index: int = 0) -> Facts:
    """Implements `DevicePackage.facts`: host and device share memory; MLX orders its own work, so
    there are no streams. Does not import MLX: the installed build determines the device type."""
    return Facts(
        tensor_device=device_kind(),
        index_dtype="int32",
        page_size=16,
        shares_host_memory=True,
    )


def device_kind() -> str:
    """Return MLX's name of the device that the installed build uses: "gpu" (Metal, CUDA) or "cpu".
    Does not import MLX."""
    build = mlx_build(host_system())
    has_gpu = sys.platform == "darwin" or (build is not None and build.is_cuda)
    return "gpu" if has_gpu else "cpu"
