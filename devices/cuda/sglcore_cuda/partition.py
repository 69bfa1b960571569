"""Streams that run their kernels on some of a GPU's multiprocessors: green contexts, through
torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.cuda import green_contexts

from sglcore.device.errors import ConfigError
from sglcore.runtime.overlap.parts import Partition
from sglcore_cuda.capability import read_capability

MULTIPLE = 8
"""What the driver rounds up to from compute capability 9.0 on; it takes smaller ones before."""


def partition(device: torch.device) -> Partition:
    """The multiprocessors of a GPU. Raises ConfigError for a torch without green contexts."""
    if not green_contexts.SUPPORTED:
        raise ConfigError(
            f"torch {torch.__version__} has no green contexts", remedy="install a build for CUDA 12.8 or later"
        )

    def stream(units: int) -> torch.Stream:
        """Raises ConfigError where the driver refuses."""
        try:
            made = _context(device.index or 0, units).Stream()
        except RuntimeError as error:
            raise ConfigError(f"the driver makes no green context: {str(error).splitlines()[0]}") from error
        # torch 2.11 gives one that is not equal to itself as the current stream.
        return torch.Stream(stream_id=made.stream_id, device_index=made.device_index, device_type=made.device_type)

    return Partition(read_capability(device).multiprocessors, MULTIPLE, stream)


@cache
def _context(index: int, units: int) -> Any:
    """The first `units` multiprocessors of a GPU. It lives as long as the process: torch ends its
    streams with it."""
    return green_contexts.GreenContext.create(num_sms=units, device_id=index)
