"""Runs a model without the runtime, for tests of the data flow through its layers."""

from __future__ import annotations

import torch

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context


class SumOfValues:
    """Stands in for attention: keeps q's shape and uses q, k and v."""

    def forward(self, q, k, v, layer, batch):
        """Return q plus the repeated sum of k and v."""
        return q + (k + v).repeat(1, q.shape[1] // k.shape[1])


def batch_of(tokens: int) -> ForwardBatch:
    """A batch with inputs only."""
    return ForwardBatch(
        input_ids=torch.arange(tokens, dtype=torch.int32) * 7 % 97, positions=torch.arange(tokens, dtype=torch.int32)
    )


def entered(model, batch):
    """Enter a forward context with the stand-in for attention."""
    return forward_context(ForwardContext(SumOfValues(), batch, model.attention_layers))  # pyright: ignore[reportArgumentType]
