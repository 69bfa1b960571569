"""The start of acme: the standard order, with its memory asked for before the pools are sized."""

from __future__ import annotations

from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.memory.accelerator import device_memory

BRING_UP = STANDARD.insert(device_memory, before="sizes")
"""When this changes: sglcore devices acme --bring-up > sglcore_acme/bring_up.txt"""
