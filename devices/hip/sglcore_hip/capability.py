"""What an AMD GPU can do, as its driver says; launch configurations and refusals follow from these
values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ

WIDE_WAVE = 64
"""Lanes of a wave of the compute architecture; the graphics architecture has 32."""

CONVERTED: Mapping[tuple[int, int], str] = MappingProxyType({(9, 4): E4M3FNUZ, (9, 5): E4M3FN})
"""By generation, for those for which kernels that read them so were compiled and looked at (CDNA 3
and CDNA 4 instruction sets, `V_CVT_PK_F32_FP8`)."""


@dataclass(frozen=True, slots=True)
class Capability:
    """The properties of one GPU that decide something. `target`: what compilers call it, for
    people."""

    name: str
    target: str
    wave_size: int
    compute_units: int
    float8: str | None = None
    """The form of 8-bit floats that its instructions convert."""

    def __str__(self) -> str:
        return f"{self.name}, {self.target}"

    @property
    def evidence(self) -> str:
        """The figures that launches are tuned by."""
        converts = f", converts {self.float8}" if self.float8 else ""
        return f"{self.compute_units} compute units, waves of {self.wave_size}{converts}"


def read_capability(device: torch.device | None = None) -> Capability:
    """Of a GPU, or the current one; raises what torch raises if there is none."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    target = properties.gcnArchName.partition(":")[0]
    float8 = CONVERTED.get((properties.major, properties.minor))
    return Capability(properties.name, target, properties.warp_size, properties.multi_processor_count, float8)
