"""How many of a device's compute units the layers of prompts keep to beside decode steps: total functions of numbers.

Decode steps keep to none: they go first on all units, and have those that prompts never take for themselves. That needs one graph
for each size of a decode step, whatever the share, and on an H200 gives them their next token as soon as parts of their own do, at
the same speed of prompts (benchmarks/unit_shares.py).
"""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction

THRESHOLDS = (16, 64)
"""Rows that decode, from which on the next share holds."""
KEPT = (Fraction(1, 4), Fraction(3, 8), Fraction(1, 2))
"""Of all units, those that each share keeps free of prompts: more where more rows decode."""


def share(decode_rows: int) -> int:
    """Which share holds beside so many rows: a place in `KEPT`, never a lower one for more rows."""
    return bisect_right(THRESHOLDS, decode_rows)


def prompt_units(units: int, multiple: int) -> tuple[int, ...]:
    """The units of prompts for each share, of a device that has `units` and gives them in multiples: never more for more rows, at
    least one multiple, and one left. Empty for a device that is too small for that."""
    most = (units - 1) // multiple * multiple
    if most < multiple or units - most < 1:
        return ()
    return tuple(min(most, max(multiple, int(units * (1 - kept)) // multiple * multiple)) for kept in KEPT)
