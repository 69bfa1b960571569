"""Latent attention (MLA) in its absorbed form: queries are multiplied by the matrix that makes keys
from a cache entry, and the result by the matrix that makes values (DeepSeek-V2, section 2.1.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sglcore.checkpoint.latent_config import FULL, INNER_EPS, LatentConfig
from sglcore.checkpoint.rope_config import halves_first
from sglcore.layers.build_scope import Scope
from sglcore.layers.linear import Linear
from sglcore.runtime.attention.sparse.latent import LATENT, DeepseekSparseAttnBackend
from sglcore.runtime.attention.sparse.sparse_layer import SparseLayer
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.kernel_choice import Call
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.kv_rows import INDEX_KEYS, KeptRows, Place, row_codec

Rows = Callable[[Tensor], Tensor]
"""A function of token rows."""
Projections = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""As `Projections` in `models/layer_kinds.py`."""


class LatentAttention(SparseLayer):
    """Attention over one cache entry for each token, which all heads share; with an indexer, over
    the entries that it selects."""

    def __init__(
        self, build: Scope, layer_id: int, rotary: Tensor, latent: LatentConfig, projections: Projections, output: Rows
    ) -> None:
        """`rotary` is the result of `cos_sin_cache`. `projections` maps hidden states [T, H] to
        queries [T, heads * query_dim], not yet rotated, cache entries [T, width], neither normed
        nor rotated, and query latents [T, q_rank] (None without a query rank). `output` maps [T,
        heads * value_dim] to [T, H]."""
        heads, rank, nope = build.config.num_attention_heads, latent.kv_rank, latent.nope_dim
        asked, float8 = build.kv_cache_dtype, build.kernels.float8
        place, codec = Place.PAGES, row_codec(asked, latent.width, latent.rope_dim, float8)
        if build.hisparse and latent.top_k:
            place = Place.HOST_PAGES
        rows = {LATENT: KeptRows(latent.width, build.dtype, place, codec=codec)}
        has_indexer = latent.top_k > 0 and latent.indexers[layer_id] == FULL
        if has_indexer:
            codec = row_codec(asked, latent.index_dim, float8=float8)
            rows[INDEX_KEYS] = KeptRows(latent.index_dim, build.dtype, codec=codec)
        super().__init__(
            layer_id,
            heads,
            latent.width,
            rows,
            LATENT,
            scaling=latent.scaling,
            value_size=rank,
            top_k=latent.top_k,
        )
        self.projections, self.output = projections, output
        self.norm = build.parameter("kv_a_layernorm.weight", rank, dtype=torch.float32)
        both = build.parameter("kv_b_proj.weight", heads * (nope + latent.value_dim), rank)
        both = both.view(heads, nope + latent.value_dim, rank)
        self.to_keys, self.to_values = both[:, :nope].transpose(1, 2), both[:, nope:]
        self.indexer = Indexer(build.at("indexer"), rows[INDEX_KEYS], rotary, latent) if has_indexer else None
        self._cos_sin, self._latent, self._build = rotary, latent, build
        self._choose(build)

    @property
    def size_by_head(self) -> int:
        """The elements of a token's keys and values for all heads, if they were stored instead of
        the latent row."""
        return self.num_heads * (self._latent.query_dim + self._latent.value_dim)

    def _choose(self, build: Scope) -> None:
        heads, latent, kept = self.num_heads, self._latent, self.rows[LATENT]
        query, positions = build.rows(heads, latent.query_dim), build.indices()
        self._turn = build.kernel(KernelTable.rope_tail, query, positions, self._cos_sin, None, False)
        row = build.rows(latent.width)
        stored = positions, self._cos_sin, kept.row, build.indices(dtype=build.index_dtype), kept.codec
        self._store = build.kernel(KernelTable.norm_rope_store, row, self.norm, INNER_EPS, *stored)
        self._keys = build.kernel(KernelTable.grouped_linear, build.rows(heads, latent.nope_dim), self.to_keys)
        self._values = build.kernel(KernelTable.grouped_linear, build.rows(heads, latent.kv_rank), self.to_values)

    def calls(self, page_size: int) -> Iterator[tuple[Entry[Any], Call]]:
        """Yield the kernel table's entry and sample arguments for each kernel that runs for this
        layer in `DeepseekSparseAttnBackend`. Kernels are chosen and checked with these at start-up;
        `page_size` is in tokens."""
        build, latent, kept = self._build, self._latent, self.rows[LATENT]
        q, one = build.rows(self.num_heads, latent.width), build.indices()
        how = latent.scaling, latent.kv_rank, kept.codec
        if not latent.top_k:
            yield KernelTable.paged_mqa, (q, kept.row, build.indices(1), one, one, page_size, *how)
            return
        yield KernelTable.sparse_mqa, (q, kept.row, build.indices(latent.top_k), None, None, None, *how)
        if self.indexer is None:
            return
        queries, keys = build.rows(latent.index_heads, latent.index_dim), self.rows[INDEX_KEYS]
        weights, logits, table = build.rows(latent.index_heads).float(), build.rows(page_size).float(), build.indices(1)
        scored = queries, weights, keys.row, table, one, one, page_size, 1.0, page_size, keys.codec
        yield KernelTable.index_logits, scored
        yield KernelTable.index_top_k, (logits, one, table, one, page_size, latent.top_k)

    def mix(self, hidden: Tensor, batch: ForwardBatch, backend: DeepseekSparseAttnBackend) -> Tensor:
        """Map hidden states [T, H] of the batch's tokens to [T, H]: projects, stores the tokens'
        cache entries, and attends. Decode steps run inside graphs: no host reads."""
        latent, tokens = self._latent, hidden.shape[0]
        queries, kept, inner = self.projections(hidden)
        pool, places = backend.token_to_kv_pool, batch.out_cache_loc
        assert places is not None
        stored = pool.rows(self.layer_id, LATENT), places, pool.codec(self.layer_id, LATENT)
        backend.before_store(self, batch)
        self._store(kept, self.norm, INNER_EPS, batch.positions, self._cos_sin, *stored)
        if self.indexer is not None and inner is not None:
            self.indexer(hidden, inner, batch, self, backend)
        queries = queries.view(tokens, self.num_heads, latent.query_dim)
        queries = self._turn(queries, batch.positions, self._cos_sin, None, False)
        keyed = self._keys(queries[..., : latent.nope_dim], self.to_keys)
        queries = torch.cat((keyed, queries[..., latent.nope_dim :]), dim=-1)
        mixed = backend.forward(queries.flatten(1), None, None, self, batch)
        mixed = mixed.view(tokens, self.num_heads, latent.kv_rank)
        return self.output(self._values(mixed, self.to_values).flatten(1))


class Indexer:
    """Selects the `top_k` cache entries that a query attends to, with a few small heads
    (DeepSeek-V3.2, section 2.1)."""

    def __init__(self, build: Scope, kept: KeptRows, rotary: Tensor, latent: LatentConfig) -> None:
        """`kept`: how the indexer's keys are stored; `rotary` is the result of `cos_sin_cache`."""
        heads, size, hidden = latent.index_heads, latent.index_dim, build.config.hidden_size
        self.wq_b = Linear(build, (("wq_b", heads * size),), latent.q_rank)
        self.wk = Linear(build, (("wk", size),), hidden)
        scope, dtype = build.at("k_norm"), torch.float32
        self.norm = scope.parameter("weight", size, dtype=dtype), scope.parameter("bias", size, dtype=dtype)
        self.weights_proj = build.parameter("weights_proj.weight", heads, hidden, dtype=torch.float32)
        if latent.is_paired:
            for name, count in (("wq_b", heads), ("wk", 1), ("k_norm", 1)):
                build.reorder(name, halves_first(count, size, latent.rope_dim))
        self._cos_sin, self._shape = rotary, (heads, size)
        self._weigh = build.kernel(KernelTable.linear, build.rows(hidden).float(), self.weights_proj, None)
        turned = build.rows(heads * size), build.rows(size), build.indices(), rotary, size
        self._turn = build.kernel(KernelTable.rotary, *turned)
        stored = build.indices(), rotary, kept.row, build.indices(dtype=build.index_dtype), kept.codec
        self._store = build.kernel(KernelTable.index_key_store, build.rows(size), *self.norm, INNER_EPS, *stored)

    def __call__(
        self,
        hidden: Tensor,
        inner: Tensor,
        batch: ForwardBatch,
        layer: LatentAttention,
        backend: DeepseekSparseAttnBackend,
    ) -> None:
        """Store the indexer's keys of `hidden` [T, H], and let `backend` select the entries that
        the batch's tokens attend to in `layer`, with queries from `inner` [T, q_rank]. The backend
        keeps the selection."""
        (heads, size), tokens = self._shape, hidden.shape[0]
        pool, places = backend.token_to_kv_pool, batch.out_cache_loc
        assert places is not None
        stored = pool.rows(layer.layer_id, INDEX_KEYS), places, pool.codec(layer.layer_id, INDEX_KEYS)
        weight, bias = self.norm
        self._store(self.wk(hidden), weight, bias, INNER_EPS, batch.positions, self._cos_sin, *stored)
        queries = self.wq_b(inner)
        # The kernel rotates keys too; there are none here.
        queries, _ = self._turn(queries, queries[:, :size], batch.positions, self._cos_sin, size)
        weights = self._weigh(hidden.float(), self.weights_proj, None)
        backend.choose(queries.view(tokens, heads, size), weights, layer, batch)
