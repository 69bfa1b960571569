"""The kernel table of an NVIDIA GPU: the core's Triton kernels, with launch parameters for the
GPU's capability, and preferred to them, library kernels for DeepSeek's attention."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from sglcore.core.errors import DeviceError
from sglcore.device.package import resolve
from sglcore.runtime.kernels.table import KernelTable, Limited
from sglcore_cuda.capability import Capability, read_capability

if TYPE_CHECKING:
    from sglcore.runtime.kernels.triton import Tuning

ASYNC_COPIES = (8, 0)
"""The lowest compute capability with asynchronous copies: loads in flight need no registers."""
WIDE_PRODUCTS = frozenset({9, 10})
"""Major versions with matrix products of 64 rows that read both operands from shared memory. They
also have enough shared memory for 64 heads."""

LIBRARIES = MappingProxyType(
    {
        "flash_mla": ("sparse_mqa", "sglcore_cuda.sparse_flashmla:entry"),
        "flashinfer": ("index_top_k", "sglcore_cuda.sparse_flashinfer:entry"),
    }
)
"""For each library, the entry that it serves and the function that makes the entry for a
capability."""


def kernels() -> KernelTable:
    """Implements `DevicePackage.kernels`: return the table for the current GPU, Triton kernels with
    the libraries' entries before them. Raises `DeviceError` if Triton is not installed; a library
    that cannot be used is only noted in the table's `refused`."""
    try:
        from sglcore.runtime.kernels.triton import triton_kernels
    except ImportError as error:
        remedy = "pip install triton, or SGLCORE_KERNELS=reference for the slow reference kernels"
        raise DeviceError(f"the kernels of this device cannot be used: {error}", remedy=remedy) from error
    capability = read_capability()
    return with_libraries(triton_kernels(tuning(capability)), capability)


def with_libraries(table: KernelTable, capability: Capability) -> KernelTable:
    """Return the table with the entries that the libraries in LIBRARIES serve for this capability,
    each before the table's own function. For each library that cannot be used, the new table's
    `refused` holds the reason."""
    for library, (entry, reference) in LIBRARIES.items():
        table = table.offering(library, entry, partial(_made, reference, capability))
    return table


def _made(reference: str, capability: Capability) -> Limited:
    return resolve(reference, "cuda")(capability)


def tuning(capability: Capability) -> Tuning:
    """Return how Triton kernels are launched on a GPU of this capability.

    A kernel gets two programs for each multiprocessor, and decode attention four, and fewer if
    there is less work. Loads are kept in flight if the GPU has asynchronous copies (8.0 and newer).
    """
    from sglcore.runtime.kernels.triton import LaunchConfig, Tuning

    stages = 3 if capability.version >= ASYNC_COPIES else 1
    is_wide = capability.version[0] in WIDE_PRODUCTS
    return Tuning(
        lanes=32,
        programs=2 * capability.multiprocessors,
        decode_programs=4 * capability.multiprocessors,
        decode=LaunchConfig(128, min(stages, 2)),
        extend=LaunchConfig(128, min(stages, 2)),
        sparse_heads=64 if is_wide else 32,
        sparse_tokens=32 if is_wide else 16,
        sparse_mqa=LaunchConfig(256, min(stages, 2)),
        index_logits=LaunchConfig(128, stages),
    )
