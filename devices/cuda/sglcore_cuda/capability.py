"""What an NVIDIA GPU can do, as its driver says; launch configurations and refusals follow from
these values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Capability:
    """The properties of one GPU that decide something. `version`: its compute capability."""

    name: str
    version: tuple[int, int]
    multiprocessors: int

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.version[0]}.{self.version[1]}"

    @property
    def evidence(self) -> str:
        """The figures that launches are tuned by."""
        return f"{self.multiprocessors} multiprocessors"


def read_capability(device: torch.device | None = None) -> Capability:
    """Of a GPU, or the current one; raises what torch raises if there is none."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    version = (properties.major, properties.minor)
    return Capability(properties.name, version, properties.multi_processor_count)
