"""Proposals without a model: what followed the last tokens when they occurred before in the same text (prompt lookup)."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.speculative.drafter import NONE, DraftRows


class NgramDrafter:
    """Finds the latest earlier occurrence of the longest suffix of `least` to `most` tokens, and proposes what came after it,
    again and again where it ends before enough tokens."""

    lookahead = 0
    reads_history = True

    def __init__(self, tokens: int, least: int = 2, most: int = 4) -> None:
        self.tokens = tokens
        self._least, self._most = least, most

    def advance(self, rows: DraftRows) -> Tensor:
        """As `Drafter.advance`. Work grows with the longest text of the batch."""
        assert rows.history is not None
        if not rows.wanted or not len(rows.most_lens):
            return torch.empty(len(rows.most_lens), rows.wanted, dtype=torch.int32, device=rows.slots.device)
        known = rows.history[:, : int(rows.most_lens.max()) + 1].index_select(0, rows.slots)
        return propose(known, rows.lengths, rows.wanted, self._least, self._most)

    def close(self) -> None:
        """Nothing to free."""


def propose(known: Tensor, last: Tensor, tokens: int, least: int, most: int) -> Tensor:
    """int32[R, tokens] for texts known int32[R, M] of which `last` int32[R] is the last token that is there; NONE for a text
    whose last `least` tokens did not occur before. No host reads."""
    places = torch.arange(known.shape[1], dtype=torch.int32, device=known.device)
    matched = torch.zeros_like(known)
    same = (places >= 0) & (places < last[:, None])
    for back in range(most):
        own = known.gather(1, (last - back).clamp_(min=0)[:, None].long())
        shifted = torch.nn.functional.pad(known, (back, 0), value=NONE)[:, : known.shape[1]]
        same = same & (shifted == own) & (places >= back) & (last >= back)[:, None]
        matched += same
    # The longest match first, then the latest.
    best = (matched.clamp(max=most) * known.shape[1] + places).amax(1).to(torch.int32)
    length, place = best // known.shape[1], best % known.shape[1]
    period = last - place
    steps = torch.arange(tokens, dtype=torch.int32, device=known.device)
    found = known.gather(
        1, (place[:, None] + 1 + steps % period.clamp(min=1)[:, None]).clamp_(max=known.shape[1] - 1).long()
    )
    return torch.where((length >= least)[:, None], found, NONE).to(torch.int32)
