"""The tokens of a batch one by one, as kernels over rows take them: worked out on the device, of any mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class TokenRows:
    """`slots` and `lens` int32 [T]: whose each token is, and how many tokens it sees with itself."""

    slots: Tensor
    lens: Tensor

    @classmethod
    def of(cls, batch: ForwardBatch) -> Self:
        """Of a batch that is on the device. Shares its tensors where each row is one token."""
        if batch.extend_seq_lens is None:
            return cls(batch.req_pool_indices, batch.seq_lens)
        slots = torch.repeat_interleave(batch.req_pool_indices, batch.extend_seq_lens, output_size=batch.num_tokens)
        return cls(slots, batch.positions + 1)

    @classmethod
    def empty(cls, num_tokens: int, device: torch.device) -> Self:
        """Padding, at fixed addresses."""
        slots = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        return cls(slots, torch.ones_like(slots))

    def copy_(self, other: TokenRows) -> None:
        """Become another of as many tokens, in place."""
        self.slots.copy_(other.slots)
        self.lens.copy_(other.lens)
