"""The stepper of draft trees: a verification runs all nodes of each request's tree, and what it
accepted is a path.

The path becomes a chain: the draft model takes in its tokens, and its KV entries are written again,
next to each other, by the next step (`pool.Writes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx

from sglcore.sampling.state import SampledTokens
from sglcore.step.emitting_rows import RowPlan
from sglcore.step.sampling_arrays import SamplingInputs
from sglcore.step.step_output import StepOutput
from sglcore.step.tree_shapes import TreeShape
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.speculative.draft_stepper import DraftStepper
from sglcore_mlx.speculative.drafter import Begun, ChainDrafter, Pages, Roots
from sglcore_mlx.speculative.stepper import Forwarded, Verified
from sglcore_mlx.speculative.trees import DEPTHS, WORDS, DraftTree, chained, tables_of, walk
from sglcore_mlx.speculative.verify import NONE, Placed, Runs, padded


class TreeStepper(DraftStepper):
    """Drafts and verifies a tree for each request; a chain for all requests of a step with masks or
    penalties, which depend on earlier tokens."""

    def __init__(self, *given: Any, shape: TreeShape, **options: Any) -> None:
        """`given` and `options`: the arguments of `DraftStepper`, with a `ChainDrafter`."""
        super().__init__(*given, **options)
        self._shape = shape
        self._forward = replace(self._forward, keeps_entries=True)
        self._has_masks = False
        drafts = self._drafts
        drafts.trees = tables_of(chained(mx.full(drafts.proposals.shape, NONE, mx.int32), shape.nodes - 1))
        mx.eval(drafts.arrays())

    def _generate(self, batch: ScheduleBatch) -> StepOutput[mx.array]:
        self._has_masks = batch.masks is not None
        return super()._generate(batch)

    def _steps_of(self, width: int) -> int:
        return min(self._shape.steps, width)

    def _trees_of(self, slots: mx.array, width: int) -> mx.array:
        """Return the tables int32[B, 4, width] of the request slots [B]."""
        trees = self._drafts.trees
        assert trees is not None
        return trees[slots][:, :, :width]

    def _place(self, slots: mx.array, limits: mx.array, nodes: mx.array | None, width: int) -> Placed:
        placed = super()._place(slots, limits, nodes, width)
        depths = self._trees_of(slots, width)[:, DEPTHS]
        turned = placed.positions + depths - mx.arange(width, dtype=mx.int32)[None]
        return replace(placed, positions=mx.where(placed.is_usable, turned, 0), places=placed.positions)

    def _more_fields(self, placed: Placed, slots: mx.array) -> dict[str, mx.array]:
        return {"visible": self._trees_of(slots, placed.ids.shape[1])[:, WORDS].reshape(-1)}

    def _decide(
        self,
        batch: ScheduleBatch,
        plan: RowPlan,
        found: Forwarded,
        inputs: SamplingInputs,
        arrived: Mapping[str, mx.array],
    ) -> Verified:
        sampled = self._sampling.verify(batch, plan, found.logits, inputs, arrived, self._state, found.ends)
        slots, width = found.rows.slots, found.placed.ids.shape[1]
        steps, placed = self._steps_of(width), found.placed.first(found.rows.count)
        drawn, tables = sampled.token_ids.reshape(placed.ids.shape), self._trees_of(slots, width)
        runs, path = walk(drawn, placed, tables, self._drafts, slots, found.rows.limits, steps)
        self._drafts.lengths[slots] = runs.lengths
        self._state.last[slots] = runs.roots
        order = _order(path, width)
        chain = self._chain(found, padded(path, found.placed.ids.shape[0]), runs)
        return Verified(chain, RowPlan.each(len(order)), along(sampled, order), runs, width)

    def _chain(self, found: Forwarded, path: mx.array, runs: Runs) -> Forwarded:
        """Return a forward as that of the chains path int32[P, steps], and leave the entries of the
        accepted nodes to the next step."""
        size, width = found.placed.ids.shape
        steps, order = path.shape[1], _order(path, width)
        places = found.placed.slot_places[:, :1] + mx.arange(steps, dtype=mx.int32)[None]
        owners = found.placed.owners[:, :1]
        usable = (places < found.limits[:, None]) & (owners != 0)
        ids = found.placed.ids.reshape(-1)[order].reshape(size, steps)
        placed = Placed(ids, mx.where(usable, places, 0), mx.where(usable, owners, 0))
        own = {name: each[..., order] for name, each in found.fields.items() if name != "visible"}
        own |= placed.fields(found.page_table, self._table.page_size)
        if width > 1:
            is_taken = mx.arange(1, steps, dtype=mx.int32)[None] <= padded(runs.accepted, size)[:, None]
            cells = mx.where(is_taken, own["out_cache_loc"].reshape(size, steps)[:, 1:], 0)
            sources = order.reshape(size, steps)[:, 1:].reshape(-1)
            self._state.moved = [cells.reshape(-1), *(each[sources] for each in found.entries)]
        before = None if found.before is None else found.before[order]
        return replace(found, hidden=found.hidden[order], before=before, fields=own, placed=placed, entries=[])

    def _store(
        self, slots: mx.array, page_table: mx.array, begun: Begun, roots: mx.array, lengths: mx.array, width: int
    ) -> None:
        if not slots.shape[0]:
            return
        pages = Pages(self._state.draft_cells, page_table, self._table.page_size)
        tree = self._grown(pages, begun, Roots(roots, lengths), width)
        trees = self._drafts.trees
        assert trees is not None
        self._drafts.proposals[slots], trees[slots] = tree.tokens, tables_of(tree)

    def _grown(self, pages: Pages, begun: Begun, roots: Roots, width: int) -> DraftTree:
        drafter, shape = self.model_drafter, self._shape
        assert isinstance(drafter, ChainDrafter)
        if self._has_masks or self._sampling.is_penalised:
            tokens = drafter.propose(pages, begun, roots, shape.depth, self._sampling.drafting(width))
            return chained(tokens, shape.nodes - 1)
        return drafter.grow(pages, begun, roots, shape, self._sampling.ranking(width))


def along(sampled: SampledTokens[mx.array], order: mx.array) -> SampledTokens[mx.array]:
    """Return the rows `order` int32[N] of a sampling: token ids, bad rows, and log-probabilities if
    it has them."""
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = replace(logprobs, **{item.name: getattr(logprobs, item.name)[order] for item in fields(logprobs)})
    return SampledTokens(sampled.token_ids[order], sampled.bad_rows[order], logprobs)


def _order(path: mx.array, width: int) -> mx.array:
    """Return int32[B * steps]: the rows of paths int32[B, steps] among `width` rows of each
    request."""
    return (path + mx.arange(0, path.shape[0] * width, width, dtype=mx.int32)[:, None]).reshape(-1)
