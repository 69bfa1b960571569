"""Memory for what is read from end to end at every step: on huge pages where the system gives them.

With pages of 4 KiB a stream of weights misses the address cache at every page; with 2 MiB it is a
tenth faster.
"""

from __future__ import annotations

import math
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
SETTING = "sys/kernel/mm/transparent_hugepage/enabled"


def huge_empty(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] of zeros without memory pages yet, aligned to 2 MiB if it is that
    large.

    The memory goes back to the system with its last tensor. Raises MemoryError where the system
    refuses.
    """
    if num_bytes < HUGE_PAGE or sys.platform != "linux":
        return torch.zeros(num_bytes, dtype=torch.uint8)
    try:
        mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes for weights: {error.strerror}") from None
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    huge = num_bytes // HUGE_PAGE * HUGE_PAGE
    try:
        # Only what fills its pages: a page of 2 MiB for the rest would be memory that nothing uses.
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
        mapped.madvise(mmap.MADV_HUGEPAGE, start, huge)
    except OSError:
        pass  # a kernel without huge pages: `huge_pages` says so, and the bytes are the same
    return whole[start : start + num_bytes]


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written."""
    return huge_empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def huge_pages(root: Path = Path("/")) -> tuple[bool, str]:
    """Whether the system gives huge pages to who asks, and its own words."""
    if sys.platform != "linux":
        return False, "this system has no way to ask for huge pages"
    try:
        text = (root / SETTING).read_text(encoding="utf-8").strip()
    except OSError:
        return False, f"/{SETTING} is not there"
    return "[never]" not in text, f"/{SETTING} says {text}"
