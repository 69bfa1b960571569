"""Streams that use only some of a GPU's multiprocessors: green contexts, through torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.cuda import green_contexts

from sglcore.core.errors import ConfigError
from sglcore.runtime.overlap.parts import Partition
from sglcore_cuda.capability import read_capability

MULTIPLE = 8
"""The driver rounds numbers of multiprocessors up to a multiple of this, from compute capability
9.0 on; older GPUs allow smaller steps."""


def partition(device: torch.device) -> Partition:
    """Implements `DevicePackage.partition`: return the GPU's number of multiprocessors, the
    multiple to which counts are rounded, and the function that makes a stream on some of them.
    Makes no stream itself. Raises ConfigError for a torch without green contexts."""
    if not green_contexts.SUPPORTED:
        raise ConfigError(
            f"torch {torch.__version__} has no green contexts", remedy="install a build for CUDA 12.8 or later"
        )

    def stream(units: int) -> torch.Stream:
        """Make a stream on `units` multiprocessors, rounded up as MULTIPLE says. Raises ConfigError
        if the driver refuses."""
        try:
            made = _context(device.index or 0, units).Stream()
        except RuntimeError as error:
            raise ConfigError(f"the driver cannot create a green context: {str(error).splitlines()[0]}") from error
        # In torch 2.11 the returned stream does not equal the current stream when it is current.
        return torch.Stream(stream_id=made.stream_id, device_index=made.device_index, device_type=made.device_type)

    return Partition(read_capability(device).multiprocessors, MULTIPLE, stream)


@cache
def _context(index: int, units: int) -> Any:
    """Return a context of `units` multiprocessors of GPU `index`: the same one for equal arguments.
    It lives as long as the process, because its streams end with it. Raises RuntimeError if the
    driver refuses."""
    return green_contexts.GreenContext.create(num_sms=units, device_id=index)
