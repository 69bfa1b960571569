"""Pack small host arrays into one array of 32-bit words, so that one copy moves them to a device,
and make their views there: float32 stays, every other dtype becomes int32.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGN = 8
"""Each array starts at a multiple of this many words; no device's vector loads need more."""


def lay_out(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Return the index of the first word of each array in the common block, a multiple of `ALIGN`,
    and the number of words of the block. Nothing is written.
    """
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.size // ALIGN) * ALIGN
    return starts, total


def write_words(words: np.ndarray, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> None:
    """Write the arrays into words int32, each from its index in `starts` (from `lay_out`). float32
    keeps its bits; values of every other dtype are converted to int32.
    """
    for array, start in zip(arrays, starts, strict=True):
        target = words[start : start + array.size]
        (target.view(np.float32) if array.dtype == np.float32 else target)[:] = array.reshape(-1)


def read_words(words: Tensor, arrays: Sequence[np.ndarray], starts: Sequence[int]) -> list[Tensor]:
    """Return views of words int32, one for each of `arrays`, from which only shape and dtype are
    read: float32, or int32 for every other dtype. `starts` is that of `lay_out`.
    """
    found = []
    for array, start in zip(arrays, starts, strict=True):
        part = words[start : start + array.size]
        part = part.view(torch.float32) if array.dtype == np.float32 else part
        found.append(part if array.ndim == 1 else part.view(array.shape))
    return found
