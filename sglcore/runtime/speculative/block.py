"""Proposals of a whole block by one forward of a draft that fills in masks (DFlash, arXiv 2602.06036).

Cell i of the draft's pool holds what the target made of token i. Each row of a block is a row of a decode whose length is the
block's end, so that it sees the rows behind it too: a forward stores all cells before it attends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sglcore.device.batch import ForwardMode
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import forward_context
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.autoregressive import placed
from sglcore.runtime.speculative.drafter import DraftRows


class BlockModel(Protocol):
    """What is injected, and what stands for a token that is to be found."""

    block_size: int
    mask_token_id: int

    def project(self, features: Tensor, /) -> Tensor:
        """The target's features [T, F] to [T, H]."""
        ...

    def inject(self, features: Tensor, batch: ForwardBatch, /) -> None:
        """Store what layers make of projected features in the cells of the batch's tokens."""
        ...


class BlockDrafter:
    """The target's features into the draft's cells, then one forward of each root and masks behind it."""

    lookahead = 0
    reads_history = False

    def __init__(self, runner: ModelRunner, tokens: int, model: BlockModel, is_exact: bool = False) -> None:
        """`runner` is that of `model`, over the target's page table; `tokens` are at most a block's but the root. `is_exact`: the host
        knows every length, and must tell each row's."""
        self._is_exact = is_exact
        self.tokens = tokens
        self.runner = runner
        self._model = model
        self._steps: Tensor | None = None

    def advance(self, rows: DraftRows) -> Tensor:
        """As `Drafter.advance`."""
        self.inject(rows)
        count, size = len(rows.most_lens), self._model.block_size
        if not rows.wanted or not count:
            return torch.empty(count, rows.wanted, dtype=torch.int32, device=rows.ids.device)
        hidden = self.runner.forward(self.block(rows))[0].view(count, size, -1)
        logits = self.runner.logits(hidden[:, 1 : rows.wanted + 1].flatten(0, 1), None).unflatten(0, (count, -1))
        return torch.stack([rows.draw(logits[:, depth - 1], depth) for depth in range(1, rows.wanted + 1)], 1)

    def inject(self, rows: DraftRows) -> None:
        """Write the cells of all that the target computed."""
        assert rows.features is not None
        batch = self.runner.prepared(replace(rows.batch, input_embeds=None, plan_record=None))
        with forward_context(self.runner.context(batch)):
            self._model.inject(self._model.project(rows.features), batch)

    def block(self, rows: DraftRows) -> ForwardBatch:
        """A decode of every row of each request's block; one without a cell goes to slot 0, and no row sees it."""
        size, count = self._model.block_size, len(rows.most_lens)
        places = (rows.lengths[:, None] + self._places(rows.lengths)).flatten()
        slots, limits = (each.repeat_interleave(size, output_size=count * size) for each in (rows.slots, rows.limits))
        ends = torch.minimum(rows.lengths + size, rows.limits).repeat_interleave(size, output_size=count * size)
        slots, positions = placed(slots, places, limits)
        ids = rows.ids.new_full((count, size), self._model.mask_token_id)
        ids[:, 0] = rows.ids.index_select(0, rows.select)
        most = np.minimum(rows.most_lens + np.int32(size), rows.host_limits).repeat(size)
        if self._is_exact:
            behind = (rows.most_lens[:, None] + np.arange(size, dtype=np.int32)).reshape(-1)
            most = np.where(behind < rows.host_limits.repeat(size), most, np.int32(1))
        return type(rows.batch)(
            forward_mode=ForwardMode.DECODE,
            batch_size=count * size,
            num_tokens=count * size,
            req_pool_indices=slots,
            seq_lens=torch.where(places < limits, ends, torch.ones_like(ends)),
            input_ids=ids.flatten(),
            positions=positions,
            num_token_non_padded=rows.batch.num_token_non_padded,
            seq_lens_cpu=np.maximum(most, np.int32(1)),
        )

    def _places(self, like: Tensor) -> Tensor:
        if self._steps is None:
            self._steps = torch.arange(self._model.block_size, dtype=torch.int32, device=like.device)
        return self._steps

    def close(self) -> None:
        """Free the runner's graphs."""
        self.runner.close()
