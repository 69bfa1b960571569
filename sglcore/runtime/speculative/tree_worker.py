"""The worker that verifies draft trees.

Its step is that of `SpeculativeWorker`; the accepted path becomes a chain before later stages read
it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.pools import TokenToKVPool
from sglcore.runtime.speculative.draft_batches import decode_batch, placed
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.tree import DraftTree, TreeTables
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker, Verified, VerifiedRows
from sglcore.runtime.token_table import TokenTable
from sglcore.sampling.sampler import SamplingState
from sglcore.sampling.state import SampledTokens
from sglcore.step.emitting_rows import RowPlan
from sglcore.step.tree_shapes import TreeShape
from sglcore.step.verification_rows import most_lens
from sglcore.worker.schedule_batch import ScheduleBatch


class Growing(Protocol):
    """A drafter of trees, which `TreeWorker` calls by `grow` in place of `advance`."""

    def grow(self, rows: DraftRows) -> DraftTree:
        """Do what `Drafter.advance` does, and return the structure of the tree."""
        ...


class TreeWorker(SpeculativeWorker):
    """Verifies a tree for each request; a chain for requests with masks or penalties."""

    def __init__(self, shape: TreeShape, runner: Any, token_table: TokenTable, limits: Any, *given: Any) -> None:
        """`given` are the other parameters of `SpeculativeWorker`; its drafter must be a `Growing`
        one.
        """
        self.shape = shape
        device = token_table.last.device
        kernels = runner.attn_backend.kernels
        self._trees = TreeTables(limits.max_requests + 1, shape.nodes, device, kernels)
        self._steps = torch.arange(shape.nodes, dtype=torch.int32, device=device)
        self._plan = RowPlan.silent()
        super().__init__(runner, token_table, limits, *given)

    def _place(self, staged: ForwardBatch, rows: VerifiedRows, nodes: Tensor | None) -> None:
        super()._place(staged, rows, nodes)
        trees = self._trees.of_slots(rows.slots)
        shape = rows.slots.shape[0], staged.num_tokens // max(rows.slots.shape[0], 1)
        shifts, words = trees[1][:, : shape[1]], trees[3][:, : shape[1]]
        staged.positions.view(shape).add_(shifts * (staged.req_pool_indices.view(shape) > 0))
        staged.visible = words.flatten().contiguous()

    def _ends(self, staged: ForwardBatch) -> Tensor:
        return staged.positions + 1

    def _decided(
        self,
        batch: ScheduleBatch,
        staged: ForwardBatch,
        rows: VerifiedRows,
        hidden: Tensor,
        logits: Tensor,
        state: SamplingState,
        plan: RowPlan,
    ) -> Verified:
        sampled, width = self.sampling.sampler.sample(logits, state), logits.shape[0] // rows.slots.shape[0]
        steps = self._steps_of(width)
        before = self._lengths.index_select(0, rows.slots)
        runs, path = self._walk(staged, rows, sampled, steps)
        if width > 1:
            assert staged.out_cache_loc is not None
            move_path(self.runner.attn_backend.token_to_kv_pool, staged.out_cache_loc.view(-1, width), path)
        firsts = torch.arange(0, logits.shape[0], width, dtype=torch.int32, device=path.device)
        order = (path + firsts[:, None]).flatten()
        chain = self._chain(batch, staged, rows, before, order)
        plan = plan if steps == width else self._plan_of(len(order))
        return Verified(chain, hidden.index_select(0, order), plan, along(sampled, order), runs, width, order)

    def _steps_of(self, width: int) -> int:
        return min(self.shape.steps, width)

    def _plan_of(self, size: int) -> RowPlan:
        if self._plan.batch_size != size:
            self._plan = RowPlan.each(size)
        return self._plan

    def _walk(
        self, staged: ForwardBatch, rows: VerifiedRows, sampled: SampledTokens[Tensor], steps: int
    ) -> tuple[Tensor, Tensor]:
        """Return `runs` int32[4, B] and paths int32[B, steps] of the kernel `tree_walk`.

        Also updates the tables for the next step.
        """
        runs, path = (
            torch.empty(*shape, dtype=torch.int32, device=rows.slots.device)
            for shape in ((4, len(rows.slots)), (len(rows.slots), steps))
        )
        tables = self._trees.held, self._table.last, self._lengths, self._proposals
        drawn = sampled.token_ids, staged.req_pool_indices
        self._kernels.tree_walk(*drawn, rows.slots, rows.limits, *tables, path, runs)
        return runs, path

    def _chain(
        self, batch: ScheduleBatch, staged: ForwardBatch, rows: VerifiedRows, before: Tensor, order: Tensor
    ) -> ForwardBatch:
        """Return the path rows `order` int32[B * steps] as the batch of a chain verification."""
        steps = len(order) // len(before)
        places = before[:, None] + self._steps[:steps]
        slots, positions = placed(rows.slots[:, None], places, rows.limits[:, None])
        ids = staged.input_ids.index_select(0, order)
        most = most_lens(batch, steps)
        chain = decode_batch(staged, lambda axis: order, slots.flatten(), positions.flatten(), ids, most)
        return replace(chain, width=steps)

    def _propose(self, rows: DraftRows) -> None:
        self._trees.put(rows.slots, cast("Growing", self.drafter).grow(rows), self._proposals)


def along(sampled: SampledTokens[Tensor], order: Tensor) -> SampledTokens[Tensor]:
    """Return the rows `order` int32[N] of a draw as new tensors: token ids, bad rows, and
    log-probabilities if it has them.
    """
    logprobs = sampled.logprobs
    if logprobs is not None:
        parts = {item.name: getattr(logprobs, item.name).index_select(0, order) for item in fields(logprobs)}
        logprobs = type(logprobs)(**parts)
    return SampledTokens(sampled.token_ids.index_select(0, order), sampled.bad_rows.index_select(0, order), logprobs)


def move_path(pool: TokenToKVPool, cells: Tensor, path: Tensor) -> None:
    """Copy, in every layer of `pool`, keys and values of the nodes in `path` int32[B, steps] to the
    KV slots after the root's, in the order of the path.

    `cells` int[B, N] are the KV slots of the N nodes of each request. All KV slots of a layer are
    read before one is written; a node that is already at its place stays.
    """
    sources, places = cells.gather(1, path[:, 1:].long()).flatten(), cells[:, 1 : path.shape[1]].flatten()
    for layer in range(pool.num_layers):
        pool.write_cells(layer, places, *pool.read_cells(layer, sources))
