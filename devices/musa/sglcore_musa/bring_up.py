"""The bring-up of a Moore Threads GPU: the standard order, with an import of torch_musa before the
device is used."""

from __future__ import annotations

import sys
from importlib import import_module

import torch

from sglcore.core.errors import DeviceError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up import BringUp
from sglcore.runtime.bring_up import STANDARD
from sglcore.step.sizing import MemoryBudget, size_text
from sglcore_musa.kernels import triton_gap
from sglcore_musa.probe import EXTENSION, same_release
from sglcore_musa.vendor import musa

SHIM = "torchada"


def extension(ledger: DecisionLedger) -> str:
    """Import torch_musa, which registers the device; record its version in the ledger and return
    it. Raises DeviceError if it was built for another torch, ImportError if it is missing."""
    torch_musa = import_module("torch_musa")
    found = str(torch_musa.__version__)
    if not same_release(torch.__version__, found):
        raise DeviceError(
            f"found torch_musa {found} with torch {torch.__version__}",
            wanted="both of the same version",
            remedy=EXTENSION,
        )
    ledger.record(Row("extension", "auto", f"torch_musa {found}", f"it fits torch {torch.__version__}", EXTENSION))
    if SHIM in sys.modules:
        reason = (
            f"this process loaded {SHIM} {sys.modules[SHIM].__version__}, which patches torch; nothing here needs it"
        )
        ledger.record(Row("shim", "none", SHIM, reason, "start without importing it"))
    return found


def kernel_choices(kernels: object, ledger: DecisionLedger) -> str:
    """Return why the Triton kernels do not run on this machine (`triton_gap`), and then record it
    in the ledger; empty, and no row, if they run. `kernels` is not read: the parameter makes the
    step run after that table is made."""
    gap = triton_gap()
    if gap:
        ledger.record(Row("triton", "auto", "reference", gap, "the vendor's triton"))
    return gap


def device_memory(device: torch.device, model: object) -> MemoryBudget:
    """Return the memory budget for the KV cache, read after the weights are loaded (`model` is not
    read). Uses the extension's own call, because torch's device-neutral one fails in releases
    before 2.11.0.post2. Waits for the device, and releases memory that torch caches."""
    musa().synchronize(device)
    musa().empty_cache()
    free, total = musa().mem_get_info(device)
    return MemoryBudget(total, free, f"{size_text(free)} of {size_text(total)} free on {device}", default_share=0.85)


BRING_UP: BringUp = (
    STANDARD.insert(extension, before="device")
    .insert(kernel_choices, after="kernels")
    .insert(device_memory, before="sizes")
)
