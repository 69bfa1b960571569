"""Fewer buckets where a device bounds the captured pieces that may exist at a time. Sizes in, sizes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglcore.device.ledger import Row

MOST_CAPTURED = 256
"""Requests of the largest decode graph that is captured unasked. A capture queues a step and computes nothing."""
MOST_RECORDED = 64
"""The same where a step has to be computed to be recorded."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes of decode batches, one captured piece each, and of prompts, of `pieces` each."""

    decode: tuple[int, ...]
    prompts: tuple[int, ...] = ()
    pieces: int = 1

    @property
    def count(self) -> int:
        """Captured pieces of all sizes together."""
        return len(self.decode) + len(self.prompts) * self.pieces


def batch_sizes(most: int) -> tuple[int, ...]:
    """Powers of two below `most` requests, and that: a batch is padded to at most twice its size."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


def within(asked: Buckets, most: int | None) -> Buckets:
    """Buckets of at most `most` pieces: prompts are thinned first, then decode; the largest of each stays as long as any."""
    if most is None or asked.count <= most:
        return asked
    decode = thinned(asked.decode, most)
    return Buckets(decode, thinned(asked.prompts, (most - len(decode)) // asked.pieces), asked.pieces)


def thinned(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """At most `most` of the sizes, ascending, evenly spread from the largest down."""
    ordered = sorted(set(sizes))
    if len(ordered) <= most:
        return tuple(ordered)
    places = {len(ordered) - 1 - (place * len(ordered)) // most for place in range(most)}
    return tuple(ordered[place] for place in sorted(places))


def limit_row(asked: Buckets, fit: Buckets, most: int | None) -> Row | None:
    """What the ledger says of sizes that were left out; None if none were."""
    if asked == fit:
        return None
    wanted = f"{len(asked.decode)} of decode, {len(asked.prompts)} of prompts"
    got = f"{len(fit.decode)} of decode, {len(fit.prompts)} of prompts"
    reason = (
        f"they are {asked.count} captured pieces, and this device holds {most}; what is left out pads to the next size"
    )
    return Row(
        "graph buckets", wanted, got, reason, "fewer graph_buckets, a smaller max_batch_tokens, or --graph full", True
    )
