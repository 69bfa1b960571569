"""Drafters of the laws: one with only correct draft tokens, one with none, and one that guesses and
at times drafts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.runtime.speculative.drafter import NONE, DraftRows


class Texts:
    """The whole texts of requests, from which a drafter knows the next tokens. They differ in their
    first tokens."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]

    def following(self, known: list[int], count: int) -> list[int]:
        """Return the next `count` tokens of the text that begins with `known`; NONE past its
        end."""
        for text in self._texts:
            # A request that ended by its stop token may run one more step; the result is discarded.
            if text[: len(known)] == known[: len(text)]:
                found = text[len(known) : len(known) + count]
                return found + [NONE] * (count - len(found))
        raise AssertionError(f"no text begins with {known}")


class Knowing:
    """Reads each request's tokens from the history, and drafts the tokens that follow in its text.
    Waits for the device, which no real drafter does."""

    lookahead = 0
    reads_history = True

    def __init__(self, tokens: int, texts: Texts, vocab_size: int) -> None:
        self.tokens = tokens
        self.closed = False
        self._texts = texts
        self._vocab_size = vocab_size
        self._random = torch.Generator().manual_seed(0)

    def advance(self, rows: DraftRows) -> Tensor:
        """See `Drafter.advance`."""
        assert rows.history is not None
        history, found = rows.history.cpu(), torch.full((len(rows.slots), self.tokens), NONE, dtype=torch.int32)
        for row, (slot, last) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            # A request with its last token already drawn may run one more step; the result is
            # discarded.
            if not rows.batch.forward_mode.is_decode or last < int(rows.limits[row]):
                found[row] = self.propose(history[slot, : last + 1].tolist())
        return found.to(rows.slots.device)

    def propose(self, known: list[int]) -> Tensor:
        """Return the draft tokens after `known`."""
        return torch.tensor(self._texts.following(known, self.tokens), dtype=torch.int32)

    def close(self) -> None:
        """Free nothing; records the call."""
        self.closed = True


class Adversary(Knowing):
    """Drafts only wrong tokens."""

    def propose(self, known: list[int]) -> Tensor:
        return (super().propose(known).clamp(min=0) + 1) % self._vocab_size


class Guessing(Knowing):
    """Drafts a random number of correct tokens, then a wrong one; sometimes it drafts fewer tokens,
    or none."""

    def propose(self, known: list[int]) -> Tensor:
        right = super().propose(known)
        first = int(torch.randint(self.tokens + 1, (), generator=self._random))
        if first < self.tokens:
            right[first] = (right[first].clamp(min=0) + 1) % self._vocab_size
            right[first + int(torch.randint(self.tokens, (), generator=self._random)) :] = NONE
        return right


DRAFTERS = {"oracle": Knowing, "adversary": Adversary, "guessing": Guessing}


MAKERS = MappingProxyType(
    {
        "NgramDrafter": "lookup",
        "FeatureDrafter": "eagle",
        "TreeDrafter": "eagle",
        "MultiHeadDrafter": "mtp",
        "StandaloneDrafter": "standalone",
        "StandaloneTreeDrafter": "standalone",
        "BlockDrafter": "dflash",
        "FrozenDrafter": "frozen_mtp",
        "FrozenTreeDrafter": "frozen_mtp",
    }
)
"""The file of `speculative/kinds` that makes each drafter."""


def make_instead(monkeypatch: pytest.MonkeyPatch, name: str, other: Any) -> None:
    """Let starts make `other` in place of the drafter of this name."""
    monkeypatch.setattr(f"sglcore.runtime.speculative.kinds.{MAKERS[name]}_steps.{name}", other)
