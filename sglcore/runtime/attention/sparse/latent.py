"""Attention of heads that share one latent row a token (DeepSeek-V2's), over all rows or over those that an indexer chooses
(DeepSeek-V3.2's sparse attention). In the kernel table's entries, so for every device and in every graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket
from sglcore.runtime.attention.sparse.layer import SparseLayer
from sglcore.runtime.attention.sparse.tokens import Paged, TokenRows, choose_rows, joined, later_steps
from sglcore.runtime.hisparse.coordinator import HISPARSE, HostRows, names_of, rows_read
from sglcore.runtime.memory.rows import INDEX_KEYS, ROWS, RowPool

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch

LATENT = "latent"
"""The name of rows: what a token is to all heads."""


@dataclass(slots=True)
class LatentPlan(AttentionPlan):
    """The tokens of a batch; `chosen` int32 [T, K] are the rows that the last indexer to run chose of each token's request. `host`: where
    they are, if they lie in host memory."""

    tokens: TokenRows
    host: HostRows | None = None
    chosen: Tensor | None = None


class DeepseekSparseAttnBackend(AttentionBackend[LatentPlan]):
    """Layers store their rows themselves, at the batch's `out_cache_loc`: one for each token."""

    facts = AttentionFacts(
        features=frozenset({LATENT, HISPARSE, "capture", "mixed"}), takes_stored=True, layouts=(ROWS,)
    )
    token_to_kv_pool: RowPool

    def rows_of(self, batch: ForwardBatch) -> list[tuple[Tensor, Tensor]]:
        """Those of its tokens."""
        pool, places = self.token_to_kv_pool, batch.out_cache_loc
        assert places is not None
        return [(rows, places) for layer_id in range(pool.num_layers) for rows in pool.on_device(layer_id).values()]

    def plan(self, batch: ForwardBatch) -> LatentPlan:
        """On the device, by as many operations for any batch."""
        host = None if self.hisparse is None else self.hisparse.plan(batch)
        return LatentPlan(self, self.generation, TokenRows.of(batch, self.req_to_token_pool.max_tokens), host)

    def capture_plan(self, bucket: Bucket) -> LatentPlan:
        """One row for each token."""
        device = self.req_to_token_pool.page_table.device
        tokens = TokenRows.empty(bucket.num_tokens, self.req_to_token_pool.max_tokens, device)
        host = None if self.hisparse is None else self.hisparse.capture_plan(bucket.num_tokens)
        return LatentPlan(self, self.generation, tokens, host)

    def refresh(self, plan: LatentPlan, batch: ForwardBatch) -> None:
        """In place."""
        plan.tokens.copy_(TokenRows.of(batch, self.req_to_token_pool.max_tokens))

    def plan_steps(self, view: ForwardBatch, count: int) -> tuple[LatentPlan, ...]:
        """Plans of the decode batch `view` and of those after it, each with one token more, made together."""
        tokens = TokenRows.of(later_steps(view, count)[0], self.req_to_token_pool.max_tokens)
        return tuple(LatentPlan(self, self.generation, tokens.part(step, count)) for step in range(count))

    def choose(self, q: Tensor, weights: Tensor, layer: SparseLayer, batch: ForwardBatch) -> None:
        """The `top_k` rows of each token's request that an indexer scores highest, by q [T, H, D] and weights [T, H]; attention of this
        layer, and of those behind it that have no indexer, is over them. All where there are no more."""
        _, plan = self.planned(batch)
        pool, tokens = self.token_to_kv_pool, plan.tokens
        keys, codec = pool.rows(layer.layer_id, INDEX_KEYS), pool.codec(layer.layer_id, INDEX_KEYS)
        paged = Paged(self.req_to_token_pool.page_table, tokens.slots, tokens.lens, pool.page_size, tokens.most)
        plan.chosen = choose_rows(self.kernels, q, weights, keys, codec, paged, layer.top_k, names_of(plan.host))
        if plan.host is not None:
            plan.chosen = plan.host.choose(layer.layer_id, plan.chosen, tokens.slots)

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: LatentPlan) -> Tensor:
        """q [T, heads * row] to [T, heads * value_size]."""
        assert isinstance(layer, SparseLayer)
        pool, table, tokens = self.token_to_kv_pool, self.req_to_token_pool.page_table, plan.tokens
        rows, codec = pool.rows(layer.layer_id, LATENT), pool.codec(layer.layer_id, LATENT)
        q, how = q.view(q.shape[0], layer.num_heads, layer.head_dim), (layer.scaling, layer.value_size, codec)
        if layer.top_k:
            assert plan.chosen is not None
            attended = [
                self.kernels.sparse_mqa(q[part], found, plan.chosen[part], None, None, None, *how)
                for part, found in rows_read(plan.host, layer, rows)
            ]
            return joined(attended).flatten(1)
        given = rows, table, tokens.slots, tokens.lens, pool.page_size, *how
        return self.kernels.paged_mqa(q, *given).flatten(1)
