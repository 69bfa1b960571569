"""What an accelerator has left for KV cells, as torch's own accelerator interface tells it. No device is named here."""

from __future__ import annotations

import torch

from sglcore.device.facts import Facts
from sglcore.step.sizing import MemoryBudget, size_text

DEFAULT_SHARE = 0.85
"""The share of free memory that cells may take: the rest is for activations, graphs and the allocator's own slack."""


def device_memory(facts: Facts, model: object) -> MemoryBudget:
    """A bring-up step: bytes that the device of `facts` has in all, and those that may still be taken once the weights are in,
    other processes' use counted.

    Memory that torch's allocator keeps cached counts as free. Waits for work in flight, so that what it still holds is
    not counted as taken; a start may. Raises what torch raises where the device can not be asked.
    """
    device = torch.device(facts.tensor_device)
    index = device.index or 0
    torch.accelerator.synchronize(index)
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info(index)
    evidence = f"{size_text(free)} of {size_text(total)} free on {facts.tensor_device}"
    return MemoryBudget(total, free, evidence, DEFAULT_SHARE)
