"""The kernel table of an AMD GPU: the core's Triton kernels, launched with the GPU's wave size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglcore.device.errors import DeviceError
from sglcore.runtime.kernels.table import KernelTable
from sglcore_hip.capability import WIDE_WAVE, Capability, read_capability

if TYPE_CHECKING:
    from sglcore.runtime.kernels.triton import Tuning


def kernels() -> KernelTable:
    """Implements `DevicePackage.kernels`: return the table for the current GPU. It stores 8-bit
    rows in the float format that the GPU converts. Raises `DeviceError` if Triton is not installed.
    """
    try:
        from sglcore.runtime.kernels.triton import triton_kernels
    except ImportError as error:
        remedy = (
            "install the Triton that belongs to this torch (pip install --force-reinstall torch from its ROCm index)"
        )
        raise DeviceError(f"the kernels of this device cannot be used: {error}", remedy=remedy) from error
    capability = read_capability()
    table = triton_kernels(tuning(capability))
    return table if capability.float8 is None else table.storing(capability.float8)


def tuning(capability: Capability) -> Tuning:
    """Return how Triton kernels are launched on a GPU of this capability.

    A kernel gets two programs for each compute unit. Launches count threads, so with waves of 64 a
    program of the same threads has half the waves; attention gets 256 threads there instead of 128,
    so it has four waves in both cases. Attention loads one tile of keys and values at a time: 64
    KiB of local memory hold no second.
    """
    from sglcore.runtime.kernels.triton import LaunchConfig, Tuning

    wide = capability.wave_size == WIDE_WAVE
    return Tuning(
        lanes=capability.wave_size,
        float8=capability.float8,
        programs=2 * capability.compute_units,
        decode_programs=2 * capability.compute_units,
        decode=LaunchConfig(256 if wide else 128, 1),
        extend=LaunchConfig(256 if wide else 128, 1),
    )
