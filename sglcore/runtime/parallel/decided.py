"""What one rank decides for all: ranks that each drew a token would differ sooner or later, and wait for each other for ever."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglcore.runtime.parallel.group import AnyGroup
from sglcore.sampling.sampler import Sampler, SamplingState
from sglcore.sampling.state import SampledTokens


class SampledByOne(Sampler):
    """A sampler whose tokens are those that rank 0 of the group draws. On the other ranks nothing is drawn, no logits are read and
    no log-probabilities come: nobody asks them."""

    def __init__(self, *sizes: Any, group: AnyGroup, **own: Any) -> None:
        """The others are those of `Sampler`."""
        super().__init__(*sizes, **own)
        self._group = group

    def sample(self, logits: Tensor, state: SamplingState) -> SampledTokens[Tensor]:
        """As `Sampler.sample`, on every rank alike."""
        if self._group.rank == 0:
            found = super().sample(logits, state)
            self._group.broadcast(found.token_ids)
            return found
        ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        self._group.broadcast(ids)
        return SampledTokens(ids, torch.zeros(len(logits), dtype=torch.bool, device=logits.device))

    def leaders(self, logits: Tensor, state: SamplingState, count: int) -> tuple[Tensor, Tensor]:
        """As `Sampler.leaders`, on every rank alike: trees of other nodes, or of nodes in another order, would be verified by rows
        that do not fit together."""
        if self._group.rank == 0:
            tokens, likely = super().leaders(logits, state, count)
            both = torch.cat([tokens, likely.view(torch.int32)], 1)
        else:
            both = torch.empty(len(logits), 2 * count, dtype=torch.int32, device=logits.device)
        tokens, likely = self._group.broadcast(both).split(count, 1)
        return tokens, likely.view(torch.float32)

    def decided(self, *found: Tensor) -> tuple[Tensor, ...]:
        """As `Sampler.decided`: on every rank what rank 0 found."""
        return self._group.broadcast(torch.stack(found)).unbind(0)
