"""The old device's bring-up: the standard order and its memory."""

from sglcore.runtime.bring_up import STANDARD
from sglcore.step.sizing import MemoryBudget


def device_memory(load_weights):
    """A fixed budget."""
    return MemoryBudget(1 << 30, 1 << 28, "planted memory", default_share=0.5)


BRING_UP = STANDARD.insert(device_memory, before="size_memory")
