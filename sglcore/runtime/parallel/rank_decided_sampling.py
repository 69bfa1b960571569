"""Sampling by one rank for all ranks of a group.

If each rank drew its own token, ranks would diverge and wait for each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglcore.runtime.parallel.process_group import AnyGroup
from sglcore.sampling.sampler import Sampler, SamplingState
from sglcore.sampling.state import SampledTokens


class SampledByOne(Sampler):
    """A sampler that returns the tokens drawn by rank 0 of the group.

    The other ranks draw nothing, read no logits, and return no log-probabilities and no bad rows,
    which are not needed there.
    """

    def __init__(self, *sizes: Any, group: AnyGroup, **own: Any) -> None:
        """The other parameters are those of `Sampler`."""
        super().__init__(*sizes, **own)
        self._group = group

    def sample(self, logits: Tensor, state: SamplingState) -> SampledTokens[Tensor]:
        """Sample as `Sampler.sample`. The token ids are those of rank 0 on every rank; bad rows and
        log-probabilities are reported on rank 0 only.
        """
        if self._group.rank == 0:
            found = super().sample(logits, state)
            self._group.broadcast(found.token_ids)
            return found
        ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        self._group.broadcast(ids)
        return SampledTokens(ids, torch.zeros(len(logits), dtype=torch.bool, device=logits.device))

    def leaders(self, logits: Tensor, state: SamplingState, count: int) -> tuple[Tensor, Tensor]:
        """Rank candidates as `Sampler.leaders`; the result is the same on every rank.

        Otherwise ranks would verify different draft trees.
        """
        if self._group.rank == 0:
            tokens, likely = super().leaders(logits, state, count)
            both = torch.cat([tokens, likely.view(torch.int32)], 1)
        else:
            both = torch.empty(len(logits), 2 * count, dtype=torch.int32, device=logits.device)
        tokens, likely = self._group.broadcast(both).split(count, 1)
        return tokens, likely.view(torch.float32)

    def decided(self, *found: Tensor) -> tuple[Tensor, ...]:
        """Return rank 0's values on every rank. The tensors have one shape and dtype."""
        return self._group.broadcast(torch.stack(found)).unbind(0)
