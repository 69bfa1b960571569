"""Drafters of the laws: one that is always right, one that never is, one that guesses, and one that
now and then has nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglcore.runtime.speculative.drafter import NONE, DraftRows


class Texts:
    """The whole texts of requests, by which a drafter knows what comes next. They differ in their
    first tokens."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]

    def following(self, known: list[int], count: int) -> list[int]:
        """The next `count` tokens of the text that begins so; NONE past its end."""
        for text in self._texts:
            # One that ended by its stop token may be drawn on for a step: nobody sees what comes.
            if text[: len(known)] == known[: len(text)]:
                found = text[len(known) : len(known) + count]
                return found + [NONE] * (count - len(found))
        raise AssertionError(f"no text begins with {known}")


class Knowing:
    """Reads each request's tokens from the history, and proposes by them. Waits for the device,
    which no real drafter does."""

    lookahead = 0
    reads_history = True

    def __init__(self, tokens: int, texts: Texts, vocab_size: int) -> None:
        self.tokens = tokens
        self.closed = False
        self._texts = texts
        self._vocab_size = vocab_size
        self._random = torch.Generator().manual_seed(0)

    def advance(self, rows: DraftRows) -> Tensor:
        """As `Drafter.advance`."""
        assert rows.history is not None
        history, found = rows.history.cpu(), torch.full((len(rows.slots), self.tokens), NONE, dtype=torch.int32)
        for row, (slot, last) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            # A request whose last token is drawn already may go on for a step: nobody sees what it
            # draws.
            if not rows.batch.forward_mode.is_decode or last < int(rows.limits[row]):
                found[row] = self.propose(history[slot, : last + 1].tolist())
        return found.to(rows.slots.device)

    def propose(self, known: list[int]) -> Tensor:
        """What comes next."""
        return torch.tensor(self._texts.following(known, self.tokens), dtype=torch.int32)

    def close(self) -> None:
        """Nothing to free."""
        self.closed = True


class Adversary(Knowing):
    """Never right."""

    def propose(self, known: list[int]) -> Tensor:
        return (super().propose(known).clamp(min=0) + 1) % self._vocab_size


class Guessing(Knowing):
    """Right for as many tokens as chance has it; sometimes it has fewer to propose, or none."""

    def propose(self, known: list[int]) -> Tensor:
        right = super().propose(known)
        first = int(torch.randint(self.tokens + 1, (), generator=self._random))
        if first < self.tokens:
            right[first] = (right[first].clamp(min=0) + 1) % self._vocab_size
            right[first + int(torch.randint(self.tokens, (), generator=self._random)) :] = NONE
        return right


DRAFTERS = {"oracle": Knowing, "adversary": Adversary, "guessing": Guessing}
