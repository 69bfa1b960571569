"""Proposals without a model: what followed the last tokens when they occurred before in the same
text (prompt lookup)."""

from __future__ import annotations

import mlx.core as mx

from sglcore_mlx.speculative.verify import NONE

LEAST, MOST = 2, 4
"""How many tokens at the end of a text are looked for."""


def propose(known: mx.array, last: mx.array, tokens: int, least: int = LEAST, most: int = MOST) -> mx.array:
    """int32[R, tokens] for texts known int32[R, M] of which `last` int32[R] is the last token that
    is there: what came after the latest earlier occurrence of the longest suffix of `least` to
    `most` tokens, again and again where it ends before enough tokens; NONE for a text whose last
    `least` tokens did not occur before. Queues only."""
    rows, width = known.shape
    places = mx.arange(max(width, tokens), dtype=mx.int32)
    padded = mx.concatenate([mx.full((rows, most - 1), NONE, mx.int32), known], axis=1)
    ends, before = last[:, None], places[None, :width] < last[:, None]
    matching, matched = before, mx.zeros((rows, width), mx.int32)
    for back in range(most):
        # Behind each place, the token so far back beside the one at the end.
        first = most - 1 - back
        wanted = mx.take_along_axis(padded, ends + first, axis=1)
        matching = matching & (padded[:, first : first + width] == wanted)
        matched = matched + matching.astype(mx.int32)
    # The longest match first, then the latest.
    best = mx.max(matched * width + places[:width], axis=1)
    length, place = best // width, best % width
    ahead = places[None, :tokens] % mx.maximum(last - place, 1)[:, None]
    found = mx.take_along_axis(known, mx.minimum(ahead + place[:, None] + 1, width - 1), axis=1)
    return mx.where((length < least)[:, None], NONE, found)
