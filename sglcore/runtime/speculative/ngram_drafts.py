"""Draft tokens without a model: the tokens that followed the same suffix earlier in the text
(prompt lookup).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.speculative.drafter import NONE, DraftRows


class NgramDrafter:
    """A `Drafter` that proposes the tokens after the latest earlier occurrence of the longest
    matching suffix.

    Suffixes have `least` to `most` tokens. If the text ends before enough tokens, the continuation
    is repeated.
    """

    lookahead = 0
    reads_history = True

    def __init__(self, tokens: int, least: int = 2, most: int = 4) -> None:
        self.tokens = tokens
        self._least, self._most = least, most

    def advance(self, rows: DraftRows) -> Tensor:
        """Implements `Drafter.advance`. Work grows with the longest text of the batch."""
        assert rows.history is not None
        if not rows.wanted or not len(rows.most_lens):
            return torch.empty(len(rows.most_lens), rows.wanted, dtype=torch.int32, device=rows.slots.device)
        known = rows.history[:, : int(rows.most_lens.max()) + 1].index_select(0, rows.slots)
        return propose(known, rows.lengths, rows.wanted, self._least, self._most)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def propose(known: Tensor, last: Tensor, tokens: int, least: int, most: int) -> Tensor:
    """Return draft tokens int32[R, tokens] for texts `known` int32[R, M].

    A text ends at index `last` int32[R]. The tokens are those after the latest occurrence of its
    longest suffix of `least` to `most` tokens that occurred before; NONE throughout if none did. No
    host reads.
    """
    width = known.shape[1]
    places = torch.arange(max(width, tokens, most), dtype=torch.int32, device=known.device)
    padded = torch.nn.functional.pad(known, (most - 1, 0), value=NONE)
    suffix = padded.gather(1, (last[:, None] + places[:most]).long())
    # For each place, compare the tokens up to it with the tokens at the end.
    same = padded.unfold(1, most, 1) == suffix[:, None]
    matching = same[..., -1] & (places[:width] < last[:, None])
    matched = matching.to(torch.int32)
    for back in range(2, most + 1):
        matching = matching & same[..., -back]
        matched += matching
    # The longest match first, then the latest.
    best = (matched * width).add_(places[:width]).amax(1)
    length, place = best // width, best % width
    ahead = places[:tokens] % (last - place).clamp_(min=1)[:, None]
    found = known.gather(1, ahead.add_(place[:, None] + 1).clamp_(max=width - 1).long())
    return found.masked_fill_((length < least)[:, None], NONE)
