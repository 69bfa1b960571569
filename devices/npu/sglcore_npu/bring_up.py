"""The NPU's bring-up: the standard order, with an import of torch_npu before the device is used."""

from __future__ import annotations

from importlib import import_module

import torch

from sglcore.core.errors import DeviceError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up import BringUp
from sglcore.runtime.bring_up import STANDARD, LoadedModel
from sglcore.runtime.memory.accelerator import device_memory
from sglcore_npu.kernels import LARGE, offers, takes_nz
from sglcore_npu.probe import same_release


def extension(ledger: DecisionLedger) -> str:
    """Import torch_npu, which registers the device and its operators, allow its internal weight
    layouts, record its version in the ledger and return it.

    Raises DeviceError if it was built for another torch, ImportError if it is missing.
    """
    torch_npu = import_module("torch_npu")
    found, wanted = str(torch_npu.__version__), torch.__version__.partition("+")[0]
    if not same_release(torch.__version__, found):
        raise DeviceError(
            f"found torch_npu {found} with torch {torch.__version__}",
            wanted="both of the same version",
            remedy=f"pip install torch_npu=={wanted}, or the torch that fits",
        )
    torch_npu.npu.config.allow_internal_format = True  # foreign: the extension's own switch, off by default
    ledger.record(Row("extension", "auto", f"torch_npu {found}", f"it fits torch {wanted}", "pip install torch_npu"))
    return found


def kernel_choices(model: LoadedModel, ledger: DecisionLedger) -> tuple[Row, ...]:
    """Return ledger rows for what depends on the model: in how many linear layers the weight is
    packed, and for an MoE model that the reference runs the experts. Record them; decide
    nothing."""
    layers = model.weights.linears
    packed = sum(takes_nz(layer.weight) for layer in layers) if offers("npu_format_cast") else 0
    what = f"{packed} of {len(layers)} weights in blocks"
    reason = f"16-bit weights of whole blocks and at least {LARGE} elements get the layout of the matrix units"
    rows = [Row("linear", "auto", what, reason, "--dtype bfloat16")]
    if model.config.moe is not None:
        reason = "every expert runs on every token: the vendor's grouped product requires an expert for each token"
        rows.append(Row("experts", "auto", "reference", reason, "none on this device"))
    ledger.record(*rows)
    return tuple(rows)


BRING_UP: BringUp = (
    STANDARD.insert(extension, before="device")
    .insert(kernel_choices, after="model")
    .insert(device_memory, before="sizes")
)
