"""Draft tokens from a draft model, one after another.

Every forward of the target rewrites the draft's KV slots. A draft that reads features keeps token i
+ 1 and the target's features of token i in KV slot i (EAGLE, MTP). Any other draft keeps token i,
as the target does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.draft_batches import decode_batch, placed
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.step.batch_field import Axis

NO_RUNS: Mapping[str, None] = MappingProxyType(dict.fromkeys(("run_slots", "run_targets", "run_lens", "run_rows")))
"""The fields by which the target verifies recurrent states, absent: a draft without states does not
read them, nor do its graphs.
"""


class AutoregressiveDrafter(ABC):
    """The base of drafters that run one forward of a model for each draft token.

    The first forward has the target's rows, the others one row per request. `lookahead`: distance
    from the position of a KV slot to the position of the token that it holds.
    """

    lookahead: int
    reads_history = False

    def __init__(self, runner: ModelRunner, tokens: int) -> None:
        """`runner` is the draft's, over the target's page table."""
        self.tokens = tokens
        self.runner = runner

    @abstractmethod
    def take_in(self, rows: DraftRows) -> Tensor:
        """Write KV slots for the target's rows.

        Return hidden states [R, H] for the first draft tokens.
        """

    def advance(self, rows: DraftRows) -> Tensor:
        """Implements `Drafter.advance` by `take_in`, then `follow` for the wanted tokens."""
        return self.follow(rows, self.take_in(rows), rows.wanted)

    def follow(self, rows: DraftRows, hidden: Tensor, wanted: int) -> Tensor:
        """Return int32[R, wanted], each draft token after the one before it.

        The first is drawn from `hidden` [R, H], each further one from a forward of one row per
        request.
        """
        found, count = list[Tensor](), len(rows.most_lens)
        if not wanted or (not count and rows.batch.step_plan is None):
            return torch.empty(count, wanted, dtype=torch.int32, device=rows.ids.device)
        for depth in range(1, wanted + 1):
            if found:
                hidden = self.run(self.decode(rows, found[-1], depth - 1 - self.lookahead, hidden))
            found.append(rows.draw(self.runner.logits(hidden, None), depth) if count else rows.ids[:0])
        return torch.stack(found, 1)

    def run(self, batch: ForwardBatch) -> Tensor:
        """Run one forward of the draft, [T, H]; the next one overwrites the result."""
        return self.runner.forward(batch)[0]

    def decode(self, rows: DraftRows, ids: Tensor, beyond: int, hidden: Tensor | None = None) -> ForwardBatch:
        """Return a decode batch of one token per request, with ids int32[R], in the KV slot at
        length + `beyond`; `beyond` may be -1.

        A request's length is its number of valid KV slots of the target (`rows.lengths`). A row at
        or past `rows.limits` goes to slot 0. `hidden` [R, H] become the features of the batch;
        ignored if `lookahead` is 0.
        """
        slots, positions = placed(rows.slots, rows.lengths + beyond, rows.limits)
        room = self.runner.attn_backend.req_to_token_pool.max_tokens
        most_lens = np.minimum(rows.most_lens + np.int32(beyond + 1), np.int32(room))
        plan = None if rows.batch.step_plan is None else self.runner.replayed(rows.batch.step_plan.of_emitting())
        features = hidden if self.lookahead else None
        return decode_batch(rows.batch, rows.sources, slots, positions, ids, most_lens, features, plan)

    def close(self) -> None:
        """Close the runner: free its graphs, and leave the communication groups, if any."""
        self.runner.close()


class FeatureDrafter(AutoregressiveDrafter):
    """The drafter with a model that reads features: EAGLE, EAGLE-3, and MTP layers."""

    lookahead = 1

    def __init__(self, runner: ModelRunner, tokens: int, project: Callable[[Tensor], Tensor]) -> None:
        """`project` maps the target's features [T, F] to the model's input [T, H]."""
        super().__init__(runner, tokens)
        self._project = project

    def take_in(self, rows: DraftRows) -> Tensor:
        assert rows.features is not None
        features = self._project(rows.features)
        plan = rows.batch.step_plan
        if plan is not None and plan.is_decode:
            plan = self.runner.replayed(plan.of_rows(plan.global_num_tokens))
        given: dict[str, Any] = {"input_embeds": None, "features": features, "plan_record": None, "step_plan": plan}
        if self.runner.state_pool is None:
            given |= NO_RUNS
        batch = replace(rows.batch, input_ids=rows.ids, **given)
        return self.run(batch).index_select(0, rows.select)


class StandaloneDrafter(AutoregressiveDrafter):
    """The drafter with any model with the target's vocabulary.

    In a verified step the first forward also has the rows of the new roots, so that they do not
    need a forward of their own, as they do after a prefill.
    """

    lookahead = 0

    def take_in(self, rows: DraftRows) -> Tensor:
        roots, plan = rows.ids.index_select(0, rows.select), rows.batch.step_plan
        if rows.batch.forward_mode.is_decode if plan is None else plan.is_decode:
            return self.run(self._with_roots(rows, roots))[rows.batch.num_tokens :]
        # If one data-parallel shard has a prefill, all shards run their roots separately; later
        # forwards overwrite wrong KV slots.
        self.run(replace(rows.batch, input_embeds=None, plan_record=None))
        return self.run(self.decode(rows, roots, 0)) if len(roots) or plan is not None else roots

    def _with_roots(self, rows: DraftRows, roots: Tensor) -> ForwardBatch:
        """Return the accepted rows of a verification, followed by the new root of each request."""
        batch, ends = rows.batch, rows.lengths.repeat_interleave(rows.width, output_size=rows.batch.num_tokens)
        root = self.decode(rows, roots, 0)
        slots, positions = placed(batch.req_pool_indices, batch.positions, ends)
        assert batch.seq_lens_cpu is not None and root.seq_lens_cpu is not None
        plan = None if batch.step_plan is None else self.runner.replayed(batch.step_plan.with_emitting())

        def sources(axis: Axis) -> Tensor:
            return torch.cat([torch.arange(batch.num_tokens, device=ends.device), rows.sources(axis)])

        return decode_batch(
            batch,
            sources,
            torch.cat([slots, root.req_pool_indices]),
            torch.cat([positions, root.positions]),
            torch.cat([batch.input_ids, root.input_ids]),
            np.concatenate([batch.seq_lens_cpu, root.seq_lens_cpu]),
            plan=plan,
        )
