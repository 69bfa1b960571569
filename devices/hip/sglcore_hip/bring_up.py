"""The bring-up of an AMD GPU: the standard order, plus the GPU's capability for the ledger, and its
memory."""

from __future__ import annotations

import torch

from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up import BringUp
from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.memory.accelerator import device_memory
from sglcore_hip.capability import Capability, read_capability


def capability(device: torch.device, ledger: DecisionLedger) -> Capability:
    """Read the GPU's capability, record it in the ledger and return it. Raises torch's error if
    there is no such GPU."""
    found = read_capability(device)
    ledger.record(Row("GPU", "auto", str(found), found.evidence, "--device hip:INDEX chooses another"))
    return found


BRING_UP: BringUp = STANDARD.insert(capability, before="kernels").insert(device_memory, before="sizes")
