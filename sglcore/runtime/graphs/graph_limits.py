"""Reduces the number of buckets if a device bounds the number of captured pieces.

Pure functions of sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglcore.core.ledger import Row

MOST_CAPTURED = 256
"""Maximum requests of a decode graph by default. A capture only records, it computes nothing."""
MOST_RECORDED = 64
"""Maximum requests of a decode graph by default on devices without streams, which must compute a
step to record it.
"""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes of decode batches and of prefills.

    A decode size is one captured piece, a prefill size `pieces` of them.
    """

    decode: tuple[int, ...]
    prompts: tuple[int, ...] = ()
    pieces: int = 1

    @property
    def count(self) -> int:
        """Number of captured pieces of all sizes together."""
        return len(self.decode) + len(self.prompts) * self.pieces


def batch_sizes(most: int) -> tuple[int, ...]:
    """Return the powers of two below `most`, and `most`: padding at most doubles a batch."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


def within(asked: Buckets, most: int | None) -> Buckets:
    """Return buckets with at most `most` pieces.

    Prefill sizes are thinned first, then decode sizes. The largest size of each kind is dropped
    last.
    """
    if most is None or asked.count <= most:
        return asked
    decode = thinned(asked.decode, most)
    return Buckets(decode, thinned(asked.prompts, (most - len(decode)) // asked.pieces), asked.pieces)


def thinned(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Return at most `most` of the sizes, ascending, evenly spread from the largest down."""
    ordered = sorted(set(sizes))
    if len(ordered) <= most:
        return tuple(ordered)
    places = {len(ordered) - 1 - (place * len(ordered)) // most for place in range(most)}
    return tuple(ordered[place] for place in sorted(places))


def limit_row(asked: Buckets, fit: Buckets, most: int | None) -> Row | None:
    """Return the ledger row for the sizes of `asked` that are left out of `fit`, because the device
    holds `most` pieces; None if none are.
    """
    if asked == fit:
        return None
    wanted = f"{len(asked.decode)} of decode, {len(asked.prompts)} of prompts"
    got = f"{len(fit.decode)} of decode, {len(fit.prompts)} of prompts"
    reason = (
        f"they are {asked.count} captured pieces, and this device holds {most}; a size that is left out is padded "
        "to the next one"
    )
    return Row(
        "graph buckets", wanted, got, reason, "fewer graph_buckets, a smaller max_batch_tokens, or --graph full", True
    )
