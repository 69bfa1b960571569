"""The kernel table of acme: the core's Triton kernels, launched as its capability wants."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sglcore.device.errors import DeviceError
from sglcore.runtime.kernels.table import KernelTable
from sglcore_acme.capability import Capability, read_capability

if TYPE_CHECKING:
    from sglcore.runtime.kernels.triton import Tuning

COMPILER = "acme"
"""What the vendor's Triton calls its compiler, in `triton.backends`."""
TRITON = "install the Triton that compiles for acme"


def kernels() -> KernelTable:
    """The table for the current device; raises `DeviceError` if no Triton that compiles for it is installed."""
    if missing := triton_gap():
        raise DeviceError(f"the kernels of this device can not be used: {missing}", remedy=TRITON)
    from sglcore.runtime.kernels.triton import triton_kernels

    return triton_kernels(tuning(read_capability()))


def triton_gap() -> str:
    """Why the core's Triton kernels can not run here; empty if they can."""
    try:
        from sglcore.runtime.kernels.triton.rounding import INTERPRETED
    except ImportError as error:
        return str(error)
    compilers = import_module("triton.backends").backends
    if INTERPRETED.value or COMPILER in compilers:
        return ""
    return f"the Triton that is installed compiles for {', '.join(sorted(compilers))}"


def tuning(capability: Capability) -> Tuning:
    """How kernels are launched: as many programs as fill the device twice; one tile of keys at a time."""
    from sglcore.runtime.kernels.triton import LaunchConfig, Tuning

    return Tuning(
        lanes=capability.lanes,
        programs=2 * capability.cores,
        decode=LaunchConfig(128, 1),
        extend=LaunchConfig(256, 1, options={"acme_scratch": "large"}),
    )
