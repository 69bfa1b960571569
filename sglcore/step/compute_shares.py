"""How many compute units of a device prompt slices leave free for decode steps. Pure arithmetic.

Decode steps are not restricted: they have priority on all units, and the units that prompts never
use are theirs alone. This needs one graph for each decode size, independent of the share. On an
H200 the next token arrives as early as with restricted decode steps, at the same prefill speed
(benchmarks/unit_shares.py).
"""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction

THRESHOLDS = (16, 64)
"""Decode rows from which the next share applies."""
KEPT = (Fraction(1, 4), Fraction(3, 8), Fraction(1, 2))
"""Fraction of all units that each share keeps free of prompts; it grows with the number of decode
rows.
"""


def share(decode_rows: int) -> int:
    """Return the share for this number of decode rows: an index in `KEPT` that never falls with
    more rows.
    """
    return bisect_right(THRESHOLDS, decode_rows)


def prompt_units(units: int, multiple: int) -> tuple[int, ...]:
    """Return the units of prompts for each share, on a device with `units` units that are assigned
    in multiples.

    They never grow with the decode rows, are at least one multiple, and leave at least one unit.
    Returns an empty tuple if the device is too small.
    """
    most = (units - 1) // multiple * multiple
    if most < multiple or units - most < 1:
        return ()
    return tuple(min(most, max(multiple, int(units * (1 - kept)) // multiple * multiple)) for kept in KEPT)
