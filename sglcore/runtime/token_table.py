"""What the device remembers of each slot between steps: its last token, and its history where sampling needs one.

Decode needs no host value: the next step's input is resolved from here, so it can be scheduled before this one is known.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TokenTable:
    """`last` int32[slots + 1]: the token last sampled for each slot."""

    def __init__(self, max_requests: int, max_model_len: int, device: str) -> None:
        self.last = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self._history_shape = (max_requests + 1, max_model_len + 1)
        self._history: Tensor | None = None

    @property
    def history(self) -> Tensor:
        """int32[slots + 1, context + 1]: the tokens of each slot, kept for rows whose sampling looks back. Made when the
        first such row arrives."""
        if self._history is None:
            self._history = torch.zeros(self._history_shape, dtype=torch.int32, device=self.last.device)
        return self._history

    def resolve_future(self, input_ids: Tensor) -> None:
        """Replace each negative id -s by the last token of slot s, in place. Waits for nothing."""
        futures = self.last[(-input_ids).clamp_(min=0)]
        torch.where(input_ids < 0, futures, input_ids, out=input_ids)

    def resolve_decode(self, input_ids: Tensor, slots: Tensor) -> None:
        """The same where every row brings its last token: input_ids int32[B] from slots int32[B]."""
        torch.index_select(self.last, 0, slots, out=input_ids)

    def publish(self, slots: Tensor, tokens: Tensor) -> None:
        """Remember tokens int32[N] as the last of slots int[N]."""
        self.last.scatter_(0, slots, tokens)

    def admit_history(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Store tokens int32[N] at positions int[N] of slots int[N]: what `new_history` gave, once it is on the device, and
        what was just sampled. Does not wait."""
        self.history[slots, positions] = tokens
