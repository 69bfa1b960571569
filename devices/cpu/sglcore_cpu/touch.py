"""Memory that is given to cells before they are used, while the processor has nothing else to do.

The first write to a page waits until the system has found and cleared it; where the machine is a virtual one that gets its
memory on demand this takes longer than the products of a prompt's own layer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence

from torch import Tensor

from sglcore_cpu.arena import HUGE_PAGE

NAME = "sglcore-cells"
"""Of the thread."""
MOST_OF_AVAILABLE = 0.25
"""Cells that would take a greater part of the memory there is get it only as they are used."""
_POPULATE_WRITE = 23


def touch_when_idle(cells: Sequence[Tensor], available: int) -> tuple[bool, str]:
    """Start a thread that has every page of `cells` backed by memory, the first of each tensor first; contents stay, and
    writes go on meanwhile. It runs on cores that nobody else wants, and ends early once a tensor is gone.

    `available` are the bytes this process may take. Returns at once: whether there is such a thread, and why.
    """
    total = sum(part.nbytes for part in cells)
    if sys.platform != "linux" or total < HUGE_PAGE:
        return False, "as they are used"
    if total > MOST_OF_AVAILABLE * available:
        return False, f"as they are used: {total / 2**30:.1f} GiB are over a quarter of what is available"
    references = tuple(weakref.ref(part) for part in cells)
    threading.Thread(target=_touch_all, args=(references,), name=NAME, daemon=True).start()
    return True, "in advance, while cores are idle"


def _touch_all(references: Sequence[weakref.ref[Tensor]]) -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
    except OSError:
        return  # a container may refuse; at the priority of the others it would be in their way
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    offset, goes_on = 0, True
    while goes_on:
        goes_on = False
        for reference in references:
            cells = reference()
            if cells is None:
                return
            if offset >= cells.nbytes:
                continue
            if madvise(*_pages(cells.data_ptr() + offset, min(HUGE_PAGE, cells.nbytes - offset)), _POPULATE_WRITE):
                return  # a system older than 5.14, or one without memory left: cells get theirs when they are written
            goes_on = True
            del cells
        offset += HUGE_PAGE


def _pages(address: int, num_bytes: int) -> tuple[int, int]:
    """The first address and the bytes of the whole pages around these bytes."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    return first, -(-(address + num_bytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE
