"""Where a batch is split into two micro-batches, if at all: pure arithmetic on the lengths of its
requests.

Each rank computes it from the same numbers, so all ranks get the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

THETA = 0.4
"""Minimum share of the tokens in each half; below it, a request is split in two."""


def cut(lengths: NDArray[np.int32], theta: float = THETA, align: int = 1) -> int:
    """Return the number of tokens in the first half, a multiple of `align`; 0: the batch is not
    split.

    `lengths` are the tokens of each request, at least 1. The split is at the request boundary
    nearest to the middle. If that leaves less than `theta` of the tokens in one half, it is in the
    middle, inside a request. `theta` 0 splits no request. Raises ValueError for theta outside [0,
    0.5] or align below 1.
    """
    if not 0 <= theta <= 0.5 or align < 1:
        raise ValueError(f"theta {theta} and align {align}; wanted theta in [0, 0.5] and align of 1 or more")
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if not theta:
        ends = ends[ends % align == 0]
    inner = ends[ends < total]
    found = int(inner[np.argmin(np.abs(2 * inner - total))]) if len(inner) else 0
    if theta and min(found, total - found) < theta * total:
        found = total // 2
    found = (2 * found + align) // (2 * align) * align if theta else found
    return found if 0 < found < total else 0


@dataclass(frozen=True, slots=True)
class Staggers:
    """Number of pauses (waits for other ranks) that the first half passes before the second half
    starts, in steps with prompts and in decode steps. It changes the order of execution, never the
    results.
    """

    prompts: int = 0
    decode: int = 1


@dataclass(frozen=True, slots=True)
class CutTerms:
    """Which steps run as two micro-batches: steps with prompts of `least` tokens or more, and
    decode steps of `least_decode` rows or more.

    `theta` and `align` are those of `cut`, for steps with prompts; a decode step never splits the
    rows of a request. All ranks have the same terms: with different `staggers` they would call
    collectives in different orders.
    """

    least: int = 2
    least_decode: int = 2
    theta: float = THETA
    align: int = 1
    staggers: Staggers = Staggers()

    def of_prompts(self, lengths: NDArray[np.int32]) -> int:
        """Return the number of tokens in the first half of requests with `lengths` tokens, as `cut`
        finds it; 0: not split.
        """
        if int(lengths.sum()) < max(self.least, 2):
            return 0
        return cut(lengths, self.theta, self.align)

    def of_decode(self, requests: int, width: int = 1) -> int:
        """Return the number of rows in the first half of `requests` requests with `width` rows
        each, a multiple of `width`; 0: not split.
        """
        if requests * width < max(self.least_decode, 2):
            return 0
        return cut(np.full(requests, width, np.int32), 0.0)
