"""DeepSeek-V4's attention: over the rows of a sliding window and, in layers with compression, over
the rows of complete blocks: all blocks, or those that the layer's indexer chooses.

It uses only entries of the kernel table, so it runs on every device and in every graph. The plan is
computed once per forward, on the device, for all layers; only chosen blocks are computed layer by
layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket
from sglcore.runtime.attention.sparse.host_rows import HISPARSE, HostRows, names_of, rows_read
from sglcore.runtime.attention.sparse.sparse_layer import SparseLayer
from sglcore.runtime.attention.sparse.token_queries import (
    Paged,
    RequestRows,
    TokenRows,
    choose_rows,
    joined,
)
from sglcore.runtime.memory.deepseek_v4_rows import BLOCKS, STATE, WINDOW, DeepSeekV4TokenToKVPool
from sglcore.runtime.memory.kv_rows import INDEX_KEYS, ROWS, KeptRows, Place

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch

COMPRESSED = "compressed"
"""The feature of layers that need this backend."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The blocks that a forward completes, at most N: the arrays that the kernel table's
    `compress_plan` writes, int32.

    For each block, `reads` [N, span] are its tokens' sources (the index of a token of this step; -2
    - r for row r of the state; -1 for none), `block_positions` [N] its first position, `out_rows`
    [N] the row to store it at. `writes` [T] is each token's row in the state (0: not kept).
    """

    reads: Tensor
    block_positions: Tensor
    out_rows: Tensor
    writes: Tensor

    @classmethod
    def empty(cls, count: int, span: int, num_tokens: int, device: torch.device) -> Completed:
        """Return zeros for `count` blocks of `span` tokens each, in a batch of `num_tokens`."""
        sizes = (count, span), (count,), (count,), (num_tokens,)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


@dataclass(slots=True)
class CompressedPlan(AttentionPlan):
    """The plan of `DeepseekV4AttnBackend` for one batch.

    `window` int32 [T, W]: the rows in each token's window; `window_out` int [T]: the row at which
    the token's own is stored. `blocks` int32 [T, X], by ratio: the blocks of layers that see all of
    them. `completed`, by ratio and span: the blocks that the batch completes. `chosen` int32 [T,
    K]: the blocks that the last indexer chose. `host` locates blocks in host memory, if they are
    there.
    """

    tokens: TokenRows
    window: Tensor
    window_out: Tensor
    blocks: Mapping[int, Tensor]
    completed: Mapping[tuple[int, int], Completed]
    host: HostRows | None = None
    chosen: Tensor | None = None


class DeepseekV4AttnBackend(AttentionBackend[CompressedPlan]):
    """The attention backend of DeepSeek-V4. Layers store window rows themselves, `Compressor`
    stores block rows.
    """

    facts = AttentionFacts(
        features=frozenset({COMPRESSED, HISPARSE, "capture", "mixed"}), takes_stored=True, layouts=(ROWS,)
    )
    token_to_kv_pool: DeepSeekV4TokenToKVPool

    def rows_of(self, batch: ForwardBatch) -> list[tuple[Tensor, Tensor]]:
        """Implements `AttentionBackend.rows_of`: the rows of the batch's tokens, of the blocks they
        complete, and of states.
        """
        plan, pool, found = self.plan(batch), self.token_to_kv_pool, []
        for layer_id, layer in enumerate(pool.layers):
            for name, rows in pool.on_device(layer_id).items():
                kept = layer[name]
                place = plan.window_out
                if name != WINDOW:
                    completed = plan.completed[kept.ratio, layer[STATE].span]
                    place = completed.writes if kept.ring else completed.out_rows
                found.append((rows, place))
        return found

    def plan(self, batch: ForwardBatch) -> CompressedPlan:
        """Implements `AttentionBackend.plan` on the device, with the same number of operations for
        any batch. Host lengths bound the sizes.
        """
        tokens = TokenRows.of(batch, self.req_to_token_pool.max_tokens)
        counts = {kept.ratio: _most_completed(batch, kept.ratio) for kept in self.token_to_kv_pool.states}
        plan = self._empty(tokens, counts, self._window_out(batch))
        self._fill_lists(plan, batch)
        self._complete(plan, batch)
        if self.hisparse is not None:
            plan.host = self.hisparse.plan(batch)
        return plan

    def capture_plan(self, bucket: Bucket) -> CompressedPlan:
        """Implements `AttentionBackend.capture_plan`, with the largest possible number of rows."""
        device = self.req_to_token_pool.page_table.device
        tokens = TokenRows.empty(bucket.num_tokens, self.req_to_token_pool.max_tokens, device)
        states = self.token_to_kv_pool.states
        counts = {kept.ratio: most_completed(bucket.num_tokens, bucket.batch_size, kept.ratio) for kept in states}
        plan = self._empty(tokens, counts, torch.zeros_like(tokens.slots))
        if self.hisparse is not None:
            plan.host = self.hisparse.capture_plan(bucket.num_tokens)
        return plan

    def refresh(self, plan: CompressedPlan, batch: ForwardBatch) -> None:
        """Implements `AttentionBackend.refresh`: update the plan in place."""
        plan.tokens.copy_(TokenRows.of(batch, self.req_to_token_pool.max_tokens))
        plan.window_out.copy_(self._window_out(batch))
        self._fill_lists(plan, batch)
        self._complete(plan, batch)

    def choose(self, q: Tensor, weights: Tensor, layer: SparseLayer, batch: ForwardBatch) -> None:
        """Choose for each token the `top_k` complete blocks that an indexer scores highest; sets
        the plan's `chosen`.

        Scores come from q [T, H, D] and weights [T, H]. All blocks are chosen if there are at most
        `top_k`.
        """
        _, plan = self.planned(batch)
        pool, tokens, kept = self.token_to_kv_pool, plan.tokens, layer.rows[INDEX_KEYS]
        keys, codec = pool.rows(layer.layer_id, INDEX_KEYS), pool.codec(layer.layer_id, INDEX_KEYS)
        lens, count, most = tokens.lens // kept.ratio, kept.count(pool.page_size), tokens.most // kept.ratio
        paged = Paged(self.req_to_token_pool.page_table, tokens.slots, lens, count, most)
        plan.chosen = choose_rows(self.kernels, q, weights, keys, codec, paged, layer.top_k, names_of(plan.host))
        if plan.host is not None:
            plan.chosen = plan.host.choose(layer.layer_id, plan.chosen, tokens, None)

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: CompressedPlan) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads * size] to [T, heads * value_size]."""
        assert isinstance(layer, SparseLayer)
        pool, blocks = self.token_to_kv_pool, layer.rows.get(BLOCKS)
        window, codec = pool.rows(layer.layer_id, WINDOW), pool.codec(layer.layer_id, WINDOW)
        q = q.view(q.shape[0], layer.num_heads, layer.head_dim)
        how = layer.sinks, layer.scaling, layer.value_size, codec
        if blocks is None:
            return self.kernels.sparse_mqa(q, window, plan.window, None, None, *how).flatten(1)
        chosen = plan.chosen if layer.top_k else plan.blocks[blocks.ratio]
        assert chosen is not None
        attended = [
            self.kernels.sparse_mqa(q[part], window, plan.window[part], rows, chosen[part], *how)
            for part, rows in rows_read(plan.host, layer, pool.rows(layer.layer_id, BLOCKS))
        ]
        return joined(attended).flatten(1)

    def _window_out(self, batch: ForwardBatch) -> Tensor:
        found = batch.out_cache_loc if self.token_to_kv_pool.window_table is None else batch.window_cache_loc
        assert found is not None
        return found

    def _empty(self, tokens: TokenRows, counts: Mapping[int, int], window_out: Tensor) -> CompressedPlan:
        """Allocate a plan with unwritten lists.

        `counts` are numbers of completed blocks, by ratio.
        """
        pool, size, device = self.token_to_kv_pool, len(tokens.slots), tokens.slots.device
        (width,) = (each for each in self.shape.windows if each is not None)
        window = torch.empty(size, width, dtype=torch.int32, device=device)
        blocks = {
            ratio: torch.empty(size, tokens.most // ratio, dtype=torch.int32, device=device)
            for ratio in pool.listed_ratios
        }
        completed = {
            (kept.ratio, kept.span): Completed.empty(counts[kept.ratio], kept.span, size, device)
            for kept in pool.states
        }
        return CompressedPlan(self, self.generation, tokens, window, window_out, blocks, completed)

    def _windows(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the page table int32 [S, P] by which window rows are found, and the tokens'
        positions int32 [T] in it: those of all tokens if the pool has no window pages.
        """
        windows = self.token_to_kv_pool.window_table
        if windows is None:
            return self.req_to_token_pool.page_table, batch.positions
        assert batch.window_positions is not None
        return windows.page_table, batch.window_positions

    def _fill_lists(self, plan: CompressedPlan, batch: ForwardBatch) -> None:
        slots, size, (table, positions) = plan.tokens.slots, self.token_to_kv_pool.page_size, self._windows(batch)
        self.kernels.window_rows(table, slots, positions, plan.window.shape[1], size, plan.window)
        for ratio, out in plan.blocks.items():
            self.kernels.block_rows(self.req_to_token_pool.page_table, slots, batch.positions, ratio, size, out)

    def _complete(self, plan: CompressedPlan, batch: ForwardBatch) -> None:
        rows = RequestRows.of(batch)
        for kept in self.token_to_kv_pool.states:
            self._fill_completed(plan.completed[kept.ratio, kept.span], kept, rows, plan.tokens.slots, batch)

    def _fill_completed(
        self, out: Completed, kept: KeptRows, rows: RequestRows, slots: Tensor, batch: ForwardBatch
    ) -> None:
        """Write to `out` the blocks that the batch completes, for states in the format `kept`.

        States in window pages are named from the first page that a request still has.
        """
        pool, table, offsets = self.token_to_kv_pool, self.req_to_token_pool.page_table, None
        state_table = None if kept.place is Place.SLOTS else table
        if state_table is not None and pool.window_table is not None:
            assert batch.window_seq_lens is not None
            state_table, offsets = pool.window_table.page_table, batch.seq_lens - batch.window_seq_lens
        self.kernels.compress_plan(
            *rows,
            slots,
            batch.positions,
            table,
            state_table,
            offsets,
            pool.page_size,
            kept.ratio,
            kept.ring,
            out.reads,
            out.block_positions,
            out.out_rows,
            out.writes,
        )


def most_completed(num_tokens: int, batch_size: int, ratio: int) -> int:
    """Return the maximum number of blocks of `ratio` tokens that `num_tokens` tokens of
    `batch_size` requests can complete.
    """
    return min(num_tokens, num_tokens // ratio + batch_size)


def _most_completed(batch: ForwardBatch, ratio: int) -> int:
    """Return the number of blocks of `ratio` tokens that a batch completes; an upper bound without
    host lengths, or if a decode has several rows per request (`width`).
    """
    ends, lengths = batch.seq_lens_cpu, batch.extend_seq_lens_cpu
    if ends is None or batch.width is not None:
        return most_completed(batch.num_tokens, batch.batch_size // (batch.width or 1), ratio)
    begins = ends - (1 if lengths is None else lengths)
    return int((ends // ratio - begins // ratio).sum())
