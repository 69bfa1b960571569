"""The start of quirk: the standard order, with keys and values page-major, and its memory asked for
before the pools are sized."""

from __future__ import annotations

from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.memory.accelerator import device_memory
from sglcore.runtime.memory.pools import PER_HEAD_BY_PAGE, PoolKind


def pool_kind() -> PoolKind:
    """As the attention reads them."""
    return PER_HEAD_BY_PAGE


BRING_UP = STANDARD.insert(device_memory, before="sizes").insert(pool_kind, before="sizes")
"""When this changes: sglcore devices quirk --bring-up > sglcore_quirk/bring_up.txt"""
