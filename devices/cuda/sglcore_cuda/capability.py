"""The capability of an NVIDIA GPU from its driver; launch parameters and refusals depend on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Capability:
    """The properties of one GPU that decide how kernels are launched. `name`: the product's name;
    `version`: its compute capability, such as (9, 0); `multiprocessors`: their number."""

    name: str
    version: tuple[int, int]
    multiprocessors: int

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.version[0]}.{self.version[1]}"

    @property
    def evidence(self) -> str:
        """The values that determine launch parameters, as text for the ledger."""
        return f"{self.multiprocessors} multiprocessors"


def read_capability(device: torch.device | None = None) -> Capability:
    """Read the capability of `device`, or of the current GPU (None), from torch. Raises torch's
    error if there is none."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    version = (properties.major, properties.minor)
    return Capability(properties.name, version, properties.multi_processor_count)
