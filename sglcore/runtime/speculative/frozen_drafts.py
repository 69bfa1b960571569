"""Draft tokens from a draft model without KV slots of its own.

Its queries attend to the target's KV slots. No forward of the draft adds KV slots. It knows its
earlier draft tokens only by its own hidden states. All its forwards of a step therefore have the
same position and KV slots, and attention is planned once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch, Turn
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.draft_batches import decode_batch, placed
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.target_features import features_of


class FrozenDrafter:
    """A `Drafter` that runs one forward per draft token, of one row per request.

    The input is the last token and the features of the token before it.
    """

    lookahead = 0
    reads_history = False

    def __init__(self, runner: ModelRunner, tokens: int, feature_size: int) -> None:
        """`runner` is the draft's, over the target's page table and KV slots.

        The next forward reads the last `feature_size` elements of each of its output rows.
        """
        self.tokens = tokens
        self.runner = runner
        self._feature_size = feature_size
        self._epoch = 0

    def advance(self, rows: DraftRows) -> Tensor:
        """Implements `Drafter.advance` by `follow` for the wanted tokens: nothing is stored."""
        return self.follow(rows, rows.wanted)

    def follow(self, rows: DraftRows, wanted: int) -> Tensor:
        """Return int32[R, wanted], each draft token drawn after the one before it, by one forward
        for each; no forward without requests or if `wanted` is 0.
        """
        count, found = len(rows.most_lens), list[Tensor]()
        if not wanted or not count:
            return torch.empty(count, wanted, dtype=torch.int32, device=rows.ids.device)
        batch = self.planned(self.first(rows), wanted)
        for depth in range(1, wanted + 1):
            hidden = self.runner.forward(batch)[0]
            found.append(rows.draw(self.runner.logits(hidden, None), depth))
            batch = self.following(batch, found[-1], hidden)
        return torch.stack(found, 1)

    def first(self, rows: DraftRows) -> ForwardBatch:
        """Return the batch of each root, with the target's features of the token before it.

        Its position is that of the token before it, the last one with a KV slot.
        """
        assert rows.features is not None
        self._epoch += 1
        slots, positions = placed(rows.slots, rows.lengths - 1, rows.limits)
        ids, features = (each.index_select(0, rows.select) for each in (rows.ids, rows.features))
        room = self.runner.attn_backend.req_to_token_pool.max_tokens
        most = np.minimum(rows.most_lens, np.int32(room))
        batch = decode_batch(rows.batch, rows.sources, slots, positions, ids, most, features)
        return replace(batch, turn=Turn(self._epoch, 0))

    def planned(self, batch: ForwardBatch, steps: int) -> ForwardBatch:
        """Plan attention for `steps` forwards and record the plan on the batch, unless a graph
        runs it: graphs have their own plans. Return the batch itself.
        """
        runner = self.runner
        if runner.graphs is None or not runner.graphs.can_run(batch):
            plan = runner.attn_backend.plan(runner.prepared(batch))
            batch.mark_forward_metadata_ready(plan, steps=steps)
        return batch

    def following(self, batch: ForwardBatch, ids: Tensor, hidden: Tensor) -> ForwardBatch:
        """Return the batch for the next draft token, with `ids` and the features in the output
        `hidden` of the last forward.

        Position and KV slots are the same.
        """
        features = features_of(hidden, self._feature_size)
        return replace(batch, input_ids=ids, features=features, turn=self.later(batch))

    def later(self, batch: ForwardBatch) -> Turn:
        """Return the turn of the next forward with the same plan."""
        assert batch.turn is not None
        return batch.turn._replace(step=batch.turn.step + 1)

    def close(self) -> None:
        """Close the runner: free its graphs, and leave the communication groups, if any."""
        self.runner.close()
