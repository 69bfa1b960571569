"""The kernel table of acme: the core's Triton kernels, launched as its capability wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglcore.core.errors import DeviceError
from sglcore.runtime.kernels.compilers import triton_gap
from sglcore.runtime.kernels.table import KernelTable
from sglcore_acme.capability import Capability, read_capability

if TYPE_CHECKING:
    from sglcore.runtime.kernels.triton import Tuning

COMPILER = "acme"
"""What the vendor's Triton calls its compiler, in `triton.backends`."""
TRITON = "install the Triton that compiles for acme"


def kernels() -> KernelTable:
    """The table for the current device; raises `DeviceError` if no Triton that compiles for it is
    installed."""
    if missing := triton_gap(COMPILER):
        raise DeviceError(f"the kernels of this device can not be used: {missing}", remedy=TRITON)
    from sglcore.runtime.kernels.triton import triton_kernels

    return triton_kernels(tuning(read_capability()))


def tuning(capability: Capability) -> Tuning:
    """Return the launch settings: two programs per core to fill the device, and one tile of keys at
    a time."""
    from sglcore.runtime.kernels.triton import LaunchConfig, Tuning

    return Tuning(
        lanes=capability.lanes,
        programs=2 * capability.cores,
        decode=LaunchConfig(128, 1),
        extend=LaunchConfig(256, 1, options={"acme_scratch": "large"}),
    )
