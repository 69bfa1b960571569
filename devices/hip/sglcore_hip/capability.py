"""What an AMD GPU can do, as its driver says; launch configurations and refusals follow from these values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WIDE_WAVE = 64
"""Lanes of a wave of the compute architecture; the graphics architecture has 32."""


@dataclass(frozen=True, slots=True)
class Capability:
    """The properties of one GPU that decide something. `target`: what compilers call it, for people."""

    name: str
    target: str
    wave_size: int
    compute_units: int

    def __str__(self) -> str:
        return f"{self.name}, {self.target}"

    @property
    def evidence(self) -> str:
        """The figures that launches are tuned by."""
        return f"{self.compute_units} compute units, waves of {self.wave_size}"


def read_capability(device: torch.device | None = None) -> Capability:
    """Of a GPU, or the current one; raises what torch raises if there is none."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    target = properties.gcnArchName.partition(":")[0]
    return Capability(properties.name, target, properties.warp_size, properties.multi_processor_count)
