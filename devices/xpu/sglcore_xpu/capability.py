"""The capability of an Intel GPU from its driver; launch parameters depend on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Capability:
    """The properties of one GPU that decide how kernels are launched. `name`: the product's name;
    `cores`: number of Xe cores (sub-slices); `engines`: of vector engines in all cores together;
    `lanes`: the possible sub-group (warp) sizes, ascending; `most_threads`: the largest work-group;
    `local_bytes`: shared memory of a work-group; `has_matrix`: it has matrix engines, which use the
    smallest sub-group size."""

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
        """The values that determine launch parameters, as text for the ledger."""
        matrix = "matrix engines" if self.has_matrix else "no matrix engines"
        return f"{self.engines} vector engines, sub-groups of {' or '.join(map(str, self.lanes))}, {matrix}"


def read_capability(device: torch.device | None = None) -> Capability:
    """Read the capability of `device`, or of the current GPU (None), from torch. Raises torch's
    error if there is none."""
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
