"""The capability of an NVIDIA GPU from its driver; launch parameters and refusals depend on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Capability:
    """The relevant properties of one GPU. `version`: its compute capability."""

    name: str
    version: tuple[int, int]
    multiprocessors: int

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.version[0]}.{self.version[1]}"

    @property
    def evidence(self) -> str:
        """The values that determine launch parameters."""
        return f"{self.multiprocessors} multiprocessors"


def read_capability(device: torch.device | None = None) -> Capability:
    """Read the capability of a GPU, or of the current one. Raises torch's error if there is
    none."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    version = (properties.major, properties.minor)
    return Capability(properties.name, version, properties.multi_processor_count)
