"""Where a batch is cut into two halves, or that it is not: pure arithmetic over the lengths of its requests.

Every rank that decides for itself decides alike, because it reads the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

THETA = 0.4
"""A half has at least this part of the tokens; otherwise a request is cut in two."""


def cut(lengths: NDArray[np.int32], theta: float = THETA, align: int = 1) -> int:
    """Tokens of the first half, of requests with so many tokens (one or more each), a multiple of `align`; 0: there are no two halves.

    It is the boundary between two requests that is nearest to the middle, unless it leaves one half less than `theta` of the tokens:
    then the middle, inside a request. `theta` 0 cuts no request. Raises ValueError for theta not in [0, 0.5] and align below 1."""
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
    """By how many pauses the first half is ahead, in steps with prompts and in others. It changes when things run, never what
    comes out."""

    prompts: int = 0
    decode: int = 1


@dataclass(frozen=True, slots=True)
class CutTerms:
    """Which steps run as two halves: those of `least` tokens or more with prompts, of `least_decode` rows or more without. `theta` and
    `align` are those of `cut` for steps with prompts; a decode never parts the rows of a request. Every rank has the same: with other
    `staggers` it would call collectives in another order."""

    least: int = 2
    least_decode: int = 2
    theta: float = THETA
    align: int = 1
    staggers: Staggers = Staggers()

    def of_prompts(self, lengths: NDArray[np.int32]) -> int:
        """Tokens of the first half of requests with so many; 0: whole."""
        if int(lengths.sum()) < max(self.least, 2):
            return 0
        return cut(lengths, self.theta, self.align)

    def of_decode(self, requests: int, width: int = 1) -> int:
        """Rows of the first half of requests with `width` rows each; 0: whole."""
        if requests * width < max(self.least_decode, 2):
            return 0
        return cut(np.full(requests, width, np.int32), 0.0)
