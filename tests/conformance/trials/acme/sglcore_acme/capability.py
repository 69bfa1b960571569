"""What one of the devices of acme can do, as its driver says; launch configurations follow from
these values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglcore_acme.vendor import device_module  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True, slots=True)
class Capability:
    """The properties that decide something. `cores`: what programs of a kernel are spread over;
    `lanes`: threads of a warp."""

    name: str
    cores: int
    lanes: int

    def __str__(self) -> str:
        return self.name

    @property
    def evidence(self) -> str:
        """The figures that launches are tuned by."""
        return f"{self.cores} cores, warps of {self.lanes}"


def read_capability(device: torch.device | None = None) -> Capability:
    """Of a device, or the current one; raises what torch raises if there is none."""
    module: Any = device_module()
    found = module.get_device_properties(module.current_device() if device is None else device)
    return Capability(found.name, found.clusters, found.simd_width)
