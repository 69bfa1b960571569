"""The kernel table of an AMD GPU: the core's Triton kernels, launched with the GPU's wave size, and
preferred to them, AITER's attention over listed rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sglcore.core.errors import DeviceError
from sglcore.device.package import resolve
from sglcore.runtime.kernels.table import KernelTable
from sglcore_hip.capability import WIDE_WAVE, Capability, read_capability
from sglcore_hip.compressor import CompressorHip

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
    table = with_libraries(triton_kernels(tuning(capability)), capability)
    return table if capability.float8 is None else table.storing(capability.float8)


def with_libraries(table: KernelTable, capability: Capability) -> KernelTable:
    """Return the table with AITER's function for `sparse_mqa`, or, if it cannot be used, with the
    reason in the table's `refused`.
    """
    return table.offering("aiter", "sparse_mqa", lambda: resolve("sglcore_hip.sparse_aiter:entry", "hip")(capability))


def tuning(capability: Capability) -> Tuning:
    """Return how Triton kernels are launched on a GPU of this capability.

    A kernel gets two programs for each compute unit. Launches count threads, so with waves of 64 a
    program of the same threads has half the waves; attention gets 256 threads there instead of 128,
    so it has four waves in both cases. Attention loads one tile of keys and values at a time: 64
    KiB of local memory hold no second.
    """
    from sglcore.runtime.kernels.triton import LaunchConfig, Tuning

    wide = capability.wave_size == WIDE_WAVE
    launches = Tuning(
        lanes=capability.wave_size,
        float8=capability.float8,
        programs=2 * capability.compute_units,
        decode_programs=2 * capability.compute_units,
        decode=LaunchConfig(256 if wide else 128, 1),
        extend=LaunchConfig(256 if wide else 128, 1),
    )
    return CompressorHip.of(capability).tuned(one_list(launches)) if wide else launches


def one_list(launches: Tuning) -> Tuning:
    """Return the launches with those of attention over the lists of `DeepseekV4HipRadixBackend`
    on waves of 64.

    A program holds 32 heads and one tile of 16 rows. Compiled for gfx942 with rows of 512 elements
    in bfloat16, it has 224 registers and 32 KiB of local memory, so two programs fit on a compute
    unit. With 64 heads and two tiles it has 307 and 64 KiB, and only one fits. For gfx950: 236 and
    337 registers. No speed was measured.
    """
    from sglcore.runtime.kernels.triton import LaunchConfig

    return replace(launches, sparse_heads=32, sparse_mqa=LaunchConfig(256, 1))
