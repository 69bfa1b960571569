"""The bring-up of an Intel GPU: the standard order, plus the GPU's capability for the ledger, and
its memory."""

from __future__ import annotations

import torch

from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up import BringUp
from sglcore.device.facts import Facts
from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.memory import accelerator
from sglcore.step.sizing import MemoryBudget, size_text
from sglcore_xpu.capability import Capability, read_capability


def capability(device: torch.device, ledger: DecisionLedger) -> Capability:
    """Read the GPU's capability, record it in the ledger and return it. Raises torch's error if
    there is no such GPU."""
    found = read_capability(device)
    ledger.record(Row("GPU", "auto", str(found), found.evidence, "--device xpu:INDEX chooses another"))
    return found


def device_memory(facts: Facts, model: object) -> MemoryBudget:
    """Return the memory budget for the KV cache, as for any accelerator, read after the weights are
    loaded (`model` is not used otherwise). If the driver does not report free memory, all memory
    that this process has not reserved counts as free."""
    try:
        return accelerator.device_memory(facts, model)
    except RuntimeError:
        total = torch.xpu.get_device_properties(facts.tensor_device).total_memory
        free = total - torch.accelerator.memory_reserved(torch.device(facts.tensor_device))
        evidence = (
            f"{size_text(free)} of {size_text(total)} on {facts.tensor_device}; its driver does not report other use"
        )
        return MemoryBudget(total, free, evidence, accelerator.DEFAULT_SHARE)


BRING_UP: BringUp = STANDARD.insert(capability, before="kernels").insert(device_memory, before="sizes")
