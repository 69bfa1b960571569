"""The bring-up of quirk: the standard order with page-major keys and values, and with the memory of
the device read before the pools are sized."""

from __future__ import annotations

from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.memory.accelerator import device_memory
from sglcore.runtime.memory.pools import PER_HEAD_BY_PAGE, PoolKind


def pool_kind() -> PoolKind:
    """Page-major, as the attention reads it."""
    return PER_HEAD_BY_PAGE


BRING_UP = STANDARD.insert(device_memory, before="sizes").insert(pool_kind, before="sizes")
"""When this changes: sglcore devices quirk --bring-up > sglcore_quirk/bring_up.txt"""
