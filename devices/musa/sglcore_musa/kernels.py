"""The kernel table of a Moore Threads GPU: the core's Triton kernels if a Triton for it is
installed, otherwise the reference."""

from __future__ import annotations

from importlib import import_module

from sglcore.runtime.attention.contract import Unavailable
from sglcore.runtime.kernels.table import KernelTable
from sglcore_musa.vendor import musa

WARP = 32
"""Threads per warp of the newest generation; older ones have 128."""


def kernels() -> KernelTable:
    """Implements `DevicePackage.kernels`: return the core's Triton kernels, or the reference table
    if `triton_gap` gives a reason. The core's ledger row says which entries are the reference."""
    if triton_gap():
        return KernelTable()
    from sglcore.runtime.kernels.triton import Tuning, triton_kernels

    return triton_kernels(Tuning(lanes=lanes()))


def lanes() -> int:
    """Return the threads per warp of the current GPU, by its properties; 32 if they do not tell
    it."""
    properties = musa().get_device_properties(musa().current_device())
    return getattr(properties, "warp_size", WARP)  # foreign: older extensions do not tell it


def triton_gap() -> str:
    """Return why the core's Triton kernels can not run here, with the remedy; empty if they can.
    Imports Triton."""
    try:
        triton = import_module("triton")
        import_module("sglcore.runtime.kernels.triton")
    except (ImportError, Unavailable) as error:
        return f"{error}; install the triton that the vendor publishes"
    if triton.knobs.runtime.interpret if hasattr(triton, "knobs") else False:  # foreign: since triton 3.4
        return ""
    backends = import_module("triton.backends").backends
    named = ", ".join(sorted(backends))
    if not any(name in backends for name in ("musa", "mthreads")):
        return f"triton {triton.__version__} compiles for {named}; install the triton that the vendor publishes"
    return ""
