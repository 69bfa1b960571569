"""Drafts without a model (prompt lookup): the tokens that followed the last tokens when these
occurred earlier in the same text."""

from __future__ import annotations

import mlx.core as mx

from sglcore_mlx.speculative.verify import NONE

LEAST, MOST = 2, 4
"""Minimum and maximum length of the suffix that is searched."""


def propose(known: mx.array, last: mx.array, tokens: int, least: int = LEAST, most: int = MOST) -> mx.array:
    """Return draft tokens int32 [R, tokens] for texts known int32 [R, M]; `last` int32 [R]: index
    of each text's last token. They are the tokens after the latest earlier occurrence of the
    longest matching suffix of `least` to `most` tokens; if the text ends before there are enough,
    they repeat from that occurrence. A whole row is NONE if the last `least` tokens did not occur
    earlier. Lazy."""
    rows, width = known.shape
    places = mx.arange(max(width, tokens), dtype=mx.int32)
    padded = mx.concatenate([mx.full((rows, most - 1), NONE, mx.int32), known], axis=1)
    ends, before = last[:, None], places[None, :width] < last[:, None]
    matching, matched = before, mx.zeros((rows, width), mx.int32)
    for back in range(most):
        # Compare the token `back` positions before each place with that before the end.
        first = most - 1 - back
        wanted = mx.take_along_axis(padded, ends + first, axis=1)
        matching = matching & (padded[:, first : first + width] == wanted)
        matched = matched + matching.astype(mx.int32)
    # Prefer the longest match, then the latest.
    best = mx.max(matched * width + places[:width], axis=1)
    length, place = best // width, best % width
    ahead = places[None, :tokens] % mx.maximum(last - place, 1)[:, None]
    found = mx.take_along_axis(known, mx.minimum(ahead + place[:, None] + 1, width - 1), axis=1)
    return mx.where((length < least)[:, None], NONE, found)
