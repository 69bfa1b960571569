"""Draft tokens in blocks, from a draft model that fills in masks (DFlash, arXiv 2602.06036).

KV slot i of the draft's pool holds the target's features of token i. Each row of a block is a
decode row with the block's end as its length, so that it also sees later rows of the block: a
forward stores all KV slots before it attends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import forward_context
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.draft_batches import decode_batch, placed
from sglcore.runtime.speculative.drafter import DraftRows


class BlockModel(Protocol):
    """The draft model of `BlockDrafter`: it stores target features and fills in mask tokens."""

    block_size: int
    mask_token_id: int

    def project(self, features: Tensor, /) -> Tensor:
        """Map the target's features [T, F] to [T, H]."""
        ...

    def inject(self, features: Tensor, batch: ForwardBatch, /) -> None:
        """Store keys and values of projected features in the KV slots of the batch's tokens."""
        ...


class BlockDrafter:
    """The `Drafter` of DFlash: stores target features in the draft's KV slots, then runs each root
    (a request's last sampled token) with its masks.

    One forward per step.
    """

    lookahead = 0
    reads_history = False

    def __init__(self, runner: ModelRunner, tokens: int, model: BlockModel, is_exact: bool = False) -> None:
        """`runner` runs `model` over the target's page table. `tokens` is less than the block size.

        `is_exact`: the host knows every length and must give each row's.
        """
        self._is_exact = is_exact
        self.tokens = tokens
        self.runner = runner
        self._model = model
        self._steps = torch.arange(model.block_size, dtype=torch.int32, device=runner.token_table.last.device)

    def advance(self, rows: DraftRows) -> Tensor:
        """Implements `Drafter.advance`: store the features of the target's rows, then draw all
        wanted tokens from one forward over the requests' blocks (none if no token is wanted).
        """
        self.inject(rows)
        count, size = len(rows.most_lens), self._model.block_size
        if not rows.wanted or not count:
            return torch.empty(count, rows.wanted, dtype=torch.int32, device=rows.ids.device)
        hidden = self.runner.forward(self.block(rows))[0].view(count, size, -1)
        logits = self.runner.logits(hidden[:, 1 : rows.wanted + 1].flatten(0, 1), None).unflatten(0, (count, -1))
        return torch.stack([rows.draw(logits[:, depth - 1], depth) for depth in range(1, rows.wanted + 1)], 1)

    def inject(self, rows: DraftRows) -> None:
        """Write the KV slots of all tokens that the target computed."""
        assert rows.features is not None
        batch = self.runner.prepared(replace(rows.batch, input_embeds=None, plan_record=None))
        with forward_context(self.runner.context(batch)):
            self._model.inject(self._model.project(rows.features), batch)

    def block(self, rows: DraftRows) -> ForwardBatch:
        """Return a decode batch of R * block_size rows: each request's block, which is its root and
        then mask tokens.

        A row without a KV slot goes to slot 0; no other row sees it.
        """
        limits, places = rows.limits[:, None], rows.lengths[:, None] + self._steps
        slots, positions = placed(rows.slots[:, None], places, limits)
        ends = torch.minimum(rows.lengths[:, None] + self._model.block_size, limits)
        ids = torch.full_like(places, self._model.mask_token_id)
        ids[:, 0] = rows.ids.index_select(0, rows.select)
        most = self._most_lens(rows)
        size = self._model.block_size
        placed_rows = slots.flatten(), positions.flatten(), ids.flatten(), most
        batch = decode_batch(rows.batch, lambda axis: rows.sources(axis).repeat_interleave(size), *placed_rows)
        return replace(batch, seq_lens=torch.where(places < limits, ends, 1).flatten())

    def _most_lens(self, rows: DraftRows) -> NDArray[np.int32]:
        """Return the host's lengths int32[R * block_size] of the rows of `block`: upper bounds, or
        exact if `is_exact`.
        """
        steps, limits = np.arange(self._model.block_size, dtype=np.int32), rows.host_limits[:, None]
        places = rows.most_lens[:, None] + steps
        most = np.minimum(rows.most_lens[:, None] + np.int32(len(steps)), limits)
        most = np.where(places < limits, most, np.int32(1)) if self._is_exact else most.repeat(len(steps), 1)
        return np.maximum(most, np.int32(1)).reshape(-1)

    def close(self) -> None:
        """Close the runner: free its graphs, and leave the communication groups, if any."""
        self.runner.close()
