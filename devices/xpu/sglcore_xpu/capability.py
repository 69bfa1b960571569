"""What an Intel GPU can do, as its driver says; launch configurations follow from these values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Capability:
    """The properties of one GPU that decide something. `cores`: Xe cores (sub-slices), each with
    several vector engines; `lanes`: the sizes that a sub-group may have, ascending; `local_bytes`:
    memory that a work-group shares; `has_matrix`: engines that multiply matrices, whose sub-groups
    are of the smallest size."""

    name: str
    cores: int
    engines: int
    lanes: tuple[int, ...]
    most_threads: int
    local_bytes: int
    has_matrix: bool

    def __str__(self) -> str:
        return f"{self.name}, {self.cores} Xe cores"

    @property
    def evidence(self) -> str:
        """The figures that launches are tuned by."""
        matrix = "matrix engines" if self.has_matrix else "no matrix engines"
        return f"{self.engines} vector engines, sub-groups of {' or '.join(map(str, self.lanes))}, {matrix}"


def read_capability(device: torch.device | None = None) -> Capability:
    """Of a GPU, or the current one; raises what torch raises if there is none."""
    found = torch.xpu.get_device_properties(torch.xpu.current_device() if device is None else device)
    return Capability(
        found.name,
        found.gpu_subslice_count,
        found.gpu_eu_count,
        tuple(sorted(found.sub_group_sizes)),
        found.max_work_group_size,
        found.local_mem_size,
        found.has_subgroup_matrix_multiply_accumulate,
    )
