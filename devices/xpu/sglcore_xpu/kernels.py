"""The kernel table of an Intel GPU: the core's Triton kernels, launched with sub-group sizes of the
GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sglcore.core.errors import DeviceError
from sglcore.runtime.kernels.compilers import triton_gap
from sglcore.runtime.kernels.table import KernelTable
from sglcore_xpu.capability import Capability, read_capability

if TYPE_CHECKING:
    from sglcore.runtime.kernels.triton import LaunchConfig, Tuning

COMPILER = "intel"
TRITON = "install the Triton of this torch: pip install --force-reinstall torch from its xpu index, which brings it"
WIDEST = 32
"""Sub-group size of kernels without matrix products; the compiler's default."""


def kernels() -> KernelTable:
    """Implements `DevicePackage.kernels`: return the table for the current GPU. Raises
    `DeviceError` if no Triton that compiles for it is installed."""
    if missing := triton_gap(COMPILER):
        raise DeviceError(f"the kernels of this device cannot be used: {missing}", remedy=TRITON)
    from sglcore.runtime.kernels.triton import triton_kernels

    return triton_kernels(tuning(read_capability()))


def tuning(capability: Capability) -> Tuning:
    """Return how Triton kernels are launched on a GPU of this capability.

    A kernel gets two programs for each Xe core. Matrix products use sub-groups of the size that the
    matrix engines have; products with many sums get the large register file. A tile of keys takes
    at most a quarter of the local memory.
    """
    from sglcore.runtime.kernels.triton import Tuning

    programs = 2 * capability.cores
    usual = Tuning(lanes=min(WIDEST, capability.lanes[-1]), programs=programs, decode_programs=programs)
    lanes = capability.lanes[0] if capability.has_matrix else usual.lanes

    def product(config: LaunchConfig, **options: str) -> LaunchConfig:
        threads = min(config.threads, capability.most_threads)
        return replace(config, threads=threads, lanes=lanes, options=options)

    return replace(
        usual,
        tile_bytes=min(usual.tile_bytes, capability.local_bytes // 4),
        decode=product(usual.decode),
        extend=product(usual.extend, grf_mode="large"),
        sparse_mqa=product(usual.sparse_mqa, grf_mode="large"),
        index_logits=product(usual.index_logits),
        moe=tuple(replace(tile, config=product(tile.config, grf_mode="large")) for tile in usual.moe),
    )
