"""The capability of an AMD GPU from its driver; launch parameters and refusals depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ

WIDE_WAVE = 64
"""Wave size of the compute architecture (CDNA); the graphics architecture (RDNA) has 32."""

CONVERTED: Mapping[tuple[int, int], str] = MappingProxyType({(9, 4): E4M3FNUZ, (9, 5): E4M3FN})
"""By generation, the 8-bit float format that instructions convert (CDNA 3 and CDNA 4 instruction
sets, `V_CVT_PK_F32_FP8`); only generations with kernels that were compiled and inspected."""


@dataclass(frozen=True, slots=True)
class Capability:
    """The properties of one GPU that decide how kernels are launched. `name`: the product's name;
    `target`: the compilers' name of its architecture, such as "gfx942", for messages only;
    `wave_size`: threads of a wave (warp), 32 or 64; `compute_units`: their number."""

    name: str
    target: str
    wave_size: int
    compute_units: int
    float8: str | None = None
    """The 8-bit float format that its instructions convert; None: none."""

    def __str__(self) -> str:
        return f"{self.name}, {self.target}"

    @property
    def evidence(self) -> str:
        """The values that determine launch parameters, as text for the ledger."""
        converts = f", converts {self.float8}" if self.float8 else ""
        return f"{self.compute_units} compute units, waves of {self.wave_size}{converts}"


def read_capability(device: torch.device | None = None) -> Capability:
    """Read the capability of `device`, or of the current GPU (None), from torch. Raises torch's
    error if there is none."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    target = properties.gcnArchName.partition(":")[0]
    float8 = CONVERTED.get((properties.major, properties.minor))
    return Capability(properties.name, target, properties.warp_size, properties.multi_processor_count, float8)
