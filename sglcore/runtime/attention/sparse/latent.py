"""Latent attention (MLA) of DeepSeek-V2, and the sparse attention of DeepSeek-V3.2.

All heads share one latent row per token. A query attends to all rows, or to those that an indexer
chooses. It uses only entries of the kernel table, so it runs on every device and in every graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket
from sglcore.runtime.attention.sparse.host_rows import HISPARSE, HostRows, names_of, rows_read
from sglcore.runtime.attention.sparse.sparse_layer import SparseLayer
from sglcore.runtime.attention.sparse.token_queries import Paged, TokenRows, choose_rows, joined
from sglcore.runtime.memory.kv_rows import INDEX_KEYS, ROWS, RowPool

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch

LATENT = "latent"
"""The name of the rows: the latent of a token, shared by all heads."""


@dataclass(slots=True)
class LatentPlan(AttentionPlan):
    """The plan of `DeepseekSparseAttnBackend` for one batch.

    `chosen` int32 [T, K] are the rows that the last indexer chose for each token. `host` locates
    rows in host memory, if they are there.
    """

    tokens: TokenRows
    host: HostRows | None = None
    chosen: Tensor | None = None


class DeepseekSparseAttnBackend(AttentionBackend[LatentPlan]):
    """The attention backend of MLA and of DeepSeek-V3.2. Layers store their rows themselves, one
    per token, at the batch's `out_cache_loc`.
    """

    facts = AttentionFacts(
        features=frozenset({LATENT, HISPARSE, "capture", "mixed"}), takes_stored=True, layouts=(ROWS,)
    )
    token_to_kv_pool: RowPool

    def rows_of(self, batch: ForwardBatch) -> list[tuple[Tensor, Tensor]]:
        """Implements `AttentionBackend.rows_of`: the rows of the batch's tokens."""
        pool, places = self.token_to_kv_pool, batch.out_cache_loc
        assert places is not None
        return [(rows, places) for layer_id in range(pool.num_layers) for rows in pool.on_device(layer_id).values()]

    def plan(self, batch: ForwardBatch) -> LatentPlan:
        """Implements `AttentionBackend.plan` on the device, with the same number of operations for
        any batch.
        """
        host = None if self.hisparse is None else self.hisparse.plan(batch)
        return LatentPlan(self, self.generation, TokenRows.of(batch, self.req_to_token_pool.max_tokens), host)

    def capture_plan(self, bucket: Bucket) -> LatentPlan:
        """Implements `AttentionBackend.capture_plan`, with one row per token."""
        device = self.req_to_token_pool.page_table.device
        tokens = TokenRows.empty(bucket.num_tokens, self.req_to_token_pool.max_tokens, device)
        host = None if self.hisparse is None else self.hisparse.capture_plan(bucket.num_tokens)
        return LatentPlan(self, self.generation, tokens, host)

    def refresh(self, plan: LatentPlan, batch: ForwardBatch) -> None:
        """Implements `AttentionBackend.refresh`: update the tokens in place."""
        plan.tokens.copy_(TokenRows.of(batch, self.req_to_token_pool.max_tokens))

    def before_store(self, layer: Attention, batch: ForwardBatch) -> None:
        """Order the rows that a layer is about to store after copies that read among them."""
        _, plan = self.planned(batch)
        if plan.host is not None:
            plan.host.before_store(layer.layer_id)

    def choose(self, q: Tensor, weights: Tensor, layer: SparseLayer, batch: ForwardBatch) -> None:
        """Choose the `top_k` rows that an indexer scores highest.

        Scores come from q [T, H, D] and weights [T, H]. This layer, and the layers after it without
        an indexer, attend to these rows. All rows are chosen if there are at most `top_k`.
        """
        batch, plan = self.planned(batch)
        pool, tokens = self.token_to_kv_pool, plan.tokens
        keys, codec = pool.rows(layer.layer_id, INDEX_KEYS), pool.codec(layer.layer_id, INDEX_KEYS)
        paged = Paged(self.req_to_token_pool.page_table, tokens.slots, tokens.lens, pool.page_size, tokens.most)
        plan.chosen = choose_rows(self.kernels, q, weights, keys, codec, paged, layer.top_k, names_of(plan.host))
        if plan.host is not None:
            plan.chosen = plan.host.choose(layer.layer_id, plan.chosen, tokens, batch.out_cache_loc)

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: LatentPlan) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads * size] to [T, heads * value_size]."""
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
