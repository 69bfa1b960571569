"""`device_memory`, the bring-up step that measures the free memory of an accelerator by torch's
device-independent interface.

Names no device.
"""

from __future__ import annotations

import torch

from sglcore.device.facts import Facts
from sglcore.step.sizing import MemoryBudget, size_text

DEFAULT_SHARE = 0.85
"""The share of free memory that KV slots may take.

The rest is for activations, graphs and the allocator.
"""


def device_memory(facts: Facts, model: object) -> MemoryBudget:
    """Bring-up step: return total and free bytes of the device and the share for KV slots,
    `DEFAULT_SHARE`. `model` is not read: as a parameter it makes the step wait for the weights.

    Memory of other processes counts as used; memory that torch's allocator caches counts as free.
    Waits for work in flight, so that memory held by it counts as free too. Raises what torch raises
    if the device cannot be queried.
    """
    device = torch.device(facts.tensor_device)
    index = device.index or 0
    torch.accelerator.synchronize(index)
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info(index)
    evidence = f"{size_text(free)} of {size_text(total)} free on {facts.tensor_device}"
    return MemoryBudget(total, free, evidence, DEFAULT_SHARE)
