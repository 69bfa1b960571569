"""What makes one row of a block of tokens, and what chooses blocks: parts of DeepSeek-V4's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sglcore.runtime.attention.sparse.compressed import DeepseekV4AttnBackend
    from sglcore.runtime.attention.sparse.layer import SparseLayer
    from sglcore.runtime.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Compressor:
    """A block's row: its tokens' values, weighed by their gates; then normed by `weight` float32 [D], and rotated as its first
    token. `ape` float32 [ratio, C] is added to gates; `cos_sin_cache` is that of `rotary`. The row goes to `rows` of
    the layer, and what a token without a block gives to `state`."""

    layer: SparseLayer
    rows: str
    state: str
    ape: Tensor
    weight: Tensor
    eps: float
    cos_sin_cache: Tensor

    def __call__(self, kv_gate: Tensor, batch: ForwardBatch, backend: DeepseekV4AttnBackend) -> None:
        """Of kv_gate [T, 2 C], values and gates side by side. Once for each forward: the state goes on."""
        _, plan = backend.planned(batch)
        pool, kernels, layer_id = backend.token_to_kv_pool, backend.kernels, self.layer.layer_id
        kept = self.layer.rows[self.state]
        completed = plan.completed[kept.ratio, kept.span]
        state, rows = pool.rows(layer_id, self.state), pool.rows(layer_id, self.rows)
        blocks = kernels.compress(kv_gate, state, self.ape, completed.reads, completed.writes)
        place = completed.block_positions, self.cos_sin_cache, rows, completed.out_rows
        kernels.norm_rope_store(blocks, self.weight, self.eps, *place, pool.codec(layer_id, self.rows))


@dataclass(frozen=True, slots=True)
class C4Indexer:
    """Chooses the complete blocks that each token attends to. `heads` queries score a block's key each."""

    layer: SparseLayer
    heads: int
    compressor: Compressor

    def __call__(
        self, queries: Tensor, weights: Tensor, kv_gate: Tensor, batch: ForwardBatch, backend: DeepseekV4AttnBackend
    ) -> None:
        """By queries [T, heads * D], not rotated yet, their weights [T, heads] and what the tokens give to blocks, [T, 2 C]: keys of
        blocks that end here are stored first, and may be chosen."""
        self.compressor(kv_gate, batch, backend)
        q = queries.unflatten(1, (self.heads, queries.shape[1] // self.heads))
        q = backend.kernels.rope_tail(q, batch.positions, self.compressor.cos_sin_cache, None, False)
        backend.choose(q, weights, self.layer, batch)
