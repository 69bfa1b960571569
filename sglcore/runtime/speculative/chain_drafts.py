"""Draft tokens from a draft model, one after another.

Every forward of the target rewrites the draft's KV slots. A draft that reads features keeps token i
+ 1 and the target's features of token i in KV slot i (EAGLE, MTP). Any other draft keeps token i,
as the target does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import ForwardMode
from sglcore.device.plan import StepPlan
from sglcore.runtime.batch_split import filter_batch
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.drafter import DraftRows


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
        plan = None if rows.batch.step_plan is None else rows.batch.step_plan.of_emitting()
        return decode_batch(rows.batch, slots, positions, ids, most_lens, hidden if self.lookahead else None, plan)

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
        batch = replace(rows.batch, input_ids=rows.ids, input_embeds=None, features=features, plan_record=None)
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
        plan = None if batch.step_plan is None else batch.step_plan.with_emitting()
        return decode_batch(
            batch,
            torch.cat([slots, root.req_pool_indices]),
            torch.cat([positions, root.positions]),
            torch.cat([batch.input_ids, root.input_ids]),
            np.concatenate([batch.seq_lens_cpu, root.seq_lens_cpu]),
            plan=plan,
        )


def placed(slots: Tensor, positions: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return slots and positions int32[R].

    Those at or past `ends` are replaced by position 0 of slot 0 (scratch).
    """
    usable = positions < ends
    return slots * usable, positions * usable


def decode_batch(
    like: ForwardBatch,
    slots: Tensor,
    positions: Tensor,
    ids: Tensor,
    most_lens: NDArray[np.int32],
    features: Tensor | None = None,
    plan: StepPlan | None = None,
) -> ForwardBatch:
    """Return a decode batch of one token per row, int32[R] each, for a draft's runner.

    `most_lens` are upper bounds of the lengths. `plan`: of a forward of several data-parallel
    shards; all its rows may belong to other shards.
    """
    if plan is not None and not len(most_lens):
        return no_tokens(like, plan, features)
    return type(like)(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(most_lens),
        num_tokens=len(most_lens),
        req_pool_indices=slots,
        seq_lens=positions + 1,
        input_ids=ids,
        positions=positions,
        num_token_non_padded=like.num_token_non_padded,
        seq_lens_cpu=most_lens,
        features=features,
        step_plan=plan,
    )


def no_tokens(like: ForwardBatch, plan: StepPlan, features: Tensor | None = None) -> ForwardBatch:
    """Return a batch without rows, for a step in which only other data-parallel shards have rows.
    `features`, if given, are [0, F].
    """
    given = {"forward_mode": ForwardMode.IDLE, "input_embeds": None, "features": features, "step_plan": plan}
    return replace(filter_batch(like, 0, 0), **given)
