"""The bring-up of an NVIDIA GPU: the standard order, with what the GPU can do said in the ledger, and its memory asked."""

from __future__ import annotations

from sglcore.device.bring_up import BringUp
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.memory.accelerator import device_memory
from sglcore_cuda.capability import Capability, read_capability


def capability(ledger: DecisionLedger) -> Capability:
    """What the current GPU is, for the ledger."""
    found = read_capability()
    ledger.record(Row("GPU", "auto", str(found), found.evidence, "CUDA_VISIBLE_DEVICES chooses another"))
    return found


BRING_UP: BringUp = STANDARD.insert(capability, before="kernels").insert(device_memory, before="sizes")
