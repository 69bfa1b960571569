"""Attention over a sliding window and over compressed blocks, including its projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.layers.build_scope import Scope
from sglcore.runtime.attention.sparse.compressed import COMPRESSED, DeepseekV4AttnBackend
from sglcore.runtime.attention.sparse.compressed_blocks import C4Indexer, Compressor
from sglcore.runtime.attention.sparse.sparse_layer import SparseLayer
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.kernel_choice import Call
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.deepseek_v4_rows import BLOCKS, INDEX_STATE, STATE, WINDOW, kept_rows
from sglcore.runtime.memory.kv_rows import INDEX_KEYS, KeptRows

Rows = Callable[[Tensor], Tensor]
"""A function of token rows."""


class OfIndex(Protocol):
    """The projections of an indexer, as `CompressedAttention` takes them
    (`layer_kinds.IndexProjections`): functions of token rows."""

    @property
    def queries(self) -> Rows:
        """Query latents [T, q_lora_rank] to the indexer's queries [T, index_heads * index_dim]."""
        ...

    @property
    def weights(self) -> Rows:
        """[T, H] to the weight of each indexer head, [T, index_heads]."""
        ...

    @property
    def blocks(self) -> Rows:
        """[T, H] to values and gates, concatenated, [T, 4 * index_dim]."""
        ...


class OfAttention(Protocol):
    """The projections of attention, as `CompressedAttention` takes them
    (`layer_kinds.CompressedProjections`): functions of token rows."""

    @property
    def latent(self) -> Rows:
        """[T, H] to [T, q_lora_rank]."""
        ...

    @property
    def queries(self) -> Rows:
        """[T, q_lora_rank] to [T, heads * head_dim]."""
        ...

    @property
    def keys(self) -> Rows:
        """[T, H] to [T, head_dim]."""
        ...

    @property
    def output(self) -> Rows:
        """[T, heads * head_dim] to [T, H]."""
        ...

    @property
    def blocks(self) -> Rows | None:
        """[T, H] to values and gates, concatenated, [T, 2 * series * head_dim]; None without
        blocks."""
        ...

    @property
    def index(self) -> OfIndex | None:
        """The indexer's projections; None without an indexer: queries attend to all blocks, if
        there are any.
        """
        ...


class CompressedAttention(SparseLayer):
    """Attention with one row for each token as key and value of all heads. The row contains the
    rotary embedding of its position, so the result is rotated back. With a compressor, tokens also
    attend to compressed blocks."""

    def __init__(
        self,
        build: Scope,
        layer_id: int,
        net: CompressedConfig,
        compression: Compression | None,
        rotary: Tensor,
        projections: OfAttention,
    ) -> None:
        is_sparse = compression is not None and compression.is_sparse
        super().__init__(
            layer_id,
            net.heads,
            net.head_dim,
            kept_rows(
                net, compression, build.dtype, build.drafts, build.kv_cache_dtype, build.hisparse, build.kernels.float8
            ),
            COMPRESSED,
            scaling=net.head_dim**-0.5,
            value_size=net.head_dim,
            top_k=net.index_topk if is_sparse else 0,
            sliding_window=net.window,
            sinks=build.parameter("sinks", net.heads, dtype=torch.float32),
        )
        self.projections, self._cos_sin, self._eps = projections, rotary, build.config.rms_norm_eps
        self._build, self._index_shape = build, (net.index_heads, net.index_dim)
        self.kv_norm = build.parameter("kv_norm.weight", net.head_dim, dtype=torch.float32)
        self.compressor = self.indexer = None
        if compression is not None:
            scope = build.at("compressor")
            self.compressor = self._compressor(scope, compression, net.head_dim, BLOCKS, STATE)
            if is_sparse:
                keys = self._compressor(scope.at("indexer"), compression, net.index_dim, INDEX_KEYS, INDEX_STATE)
                self.indexer = C4Indexer(self, net.index_heads, keys)

    def _compressor(self, scope: Scope, compression: Compression, size: int, rows: str, state: str) -> Compressor:
        ape = scope.parameter("position_bias", compression.ratio, compression.series * size, dtype=torch.float32)
        weight = scope.parameter("kv_norm.weight", size, dtype=torch.float32)
        return Compressor(self, rows, state, ape, weight, self._eps, self._cos_sin)

    def calls(self, page_size: int) -> Iterator[tuple[Entry[Any], Call]]:
        """Yield the kernel table's entry and sample arguments for each kernel that runs for this
        layer in `mix`: its own, those of its compressors and indexer, and those of
        `DeepseekV4AttnBackend`. Kernels are chosen and checked with these at start-up; `page_size`
        is in tokens."""
        build, one = self._build, self._build.indices()
        q, chosen, kept = build.rows(self.num_heads, self.head_dim), build.indices(1), self.rows[WINDOW]
        yield KernelTable.rope_tail, (q, one, self._cos_sin, self._eps, False)
        yield self._storing(self.kv_norm, kept)
        more = (None, None) if self.compressor is None else (self.rows[BLOCKS].row, chosen)
        attended = q, kept.row, chosen, *more, self.sinks, self.scaling, self.value_size, kept.codec
        yield KernelTable.sparse_mqa, attended
        for compressor in (self.compressor, None if self.indexer is None else self.indexer.compressor):
            if compressor is not None:
                yield from self._compressor_calls(compressor)
        if self.indexer is not None:
            heads, size = self._index_shape
            queries, keys = build.rows(heads, size), self.rows[INDEX_KEYS]
            count = keys.count(page_size)
            yield KernelTable.rope_tail, (queries, one, self._cos_sin, None, False)
            scored = queries, build.rows(heads), keys.row, chosen, one, one, count, 1.0, count, keys.codec
            yield KernelTable.index_logits, scored
            yield KernelTable.index_top_k, (build.rows(count).float(), one, chosen, one, count, self.top_k)

    def _compressor_calls(self, compressor: Compressor) -> Iterator[tuple[Entry[Any], Call]]:
        kept, build = self.rows[compressor.state], self._build
        given = build.rows(kept.size), kept.row, compressor.ape, build.indices(kept.span), build.indices()
        yield KernelTable.compress, given
        yield self._storing(compressor.weight, self.rows[compressor.rows])

    def _storing(self, weight: Tensor, kept: KeptRows) -> tuple[Entry[Any], Call]:
        build, one = self._build, self._build.indices()
        given = build.rows(kept.size), weight, self._eps, one, self._cos_sin, kept.row, one, kept.codec
        return KernelTable.norm_rope_store, given

    def mix(self, hidden: Tensor, batch: ForwardBatch, backend: DeepseekV4AttnBackend) -> Tensor:
        """Map hidden states [T, H] of the batch's tokens to [T, H]: projects, stores the tokens'
        rows and blocks, and attends. Decode steps run inside graphs: no host reads."""
        given, kernels, positions = self.projections, backend.kernels, batch.positions
        latent = given.latent(hidden)
        self._store(given.keys(hidden), batch, backend)
        if self.compressor is not None and given.blocks is not None:
            self.compressor(given.blocks(hidden), batch, backend)
        if self.indexer is not None and given.index is not None:
            index = given.index
            self.indexer(index.queries(latent), index.weights(hidden), index.blocks(hidden), batch, backend)
        # After the choice, because copies of the chosen blocks may run meanwhile.
        q = given.queries(latent).unflatten(1, (self.num_heads, self.head_dim))
        q = kernels.rope_tail(q, positions, self._cos_sin, self._eps, False)
        out = backend.forward(q.flatten(1), None, None, self, batch)
        out = out.unflatten(1, (self.num_heads, self.head_dim))
        return given.output(kernels.rope_tail(out, positions, self._cos_sin, None, True).flatten(1))

    def _store(self, keys: Tensor, batch: ForwardBatch, backend: DeepseekV4AttnBackend) -> None:
        _, plan = backend.planned(batch)
        pool = backend.token_to_kv_pool
        place = batch.positions, self._cos_sin, pool.rows(self.layer_id, WINDOW), plan.window_out
        codec = pool.codec(self.layer_id, WINDOW)
        backend.kernels.norm_rope_store(keys, self.kv_norm, self._eps, *place, codec)
