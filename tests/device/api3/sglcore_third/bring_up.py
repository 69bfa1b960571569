"""The start of third: the standard order, with torch_third imported before anything touches the device, what it can do said
in the ledger, and its memory asked for before the pools are sized."""

from __future__ import annotations

import torch

from sglcore.device.bring_up import BringUp
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.memory.accelerator import device_memory
from sglcore_third.capability import Capability, read_capability
from sglcore_third.vendor import device_module


def vendor() -> str:
    """Have the vendor's module, which registers the device with torch."""
    return device_module().__name__


def capability(device: torch.device, ledger: DecisionLedger) -> Capability:
    """What the device is, for the ledger."""
    found = read_capability(device)
    ledger.record(Row("chip", "auto", str(found), found.evidence, "--device third:INDEX chooses another"))
    return found


BRING_UP: BringUp = (
    STANDARD.insert(vendor, before="device").insert(capability, before="kernels").insert(device_memory, before="sizes")
)
"""When this changes: sglcore devices third --bring-up > sglcore_third/bring_up.txt"""
