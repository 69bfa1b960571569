"""Compressed blocks of DeepSeek-V4's attention.

`Compressor` makes the row of a block, `C4Indexer` chooses blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sglcore.runtime.attention.sparse.compressed import DeepseekV4AttnBackend
    from sglcore.runtime.attention.sparse.sparse_layer import SparseLayer
    from sglcore.runtime.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Compressor:
    """A callable that stores the row of each block that a forward completes: the sum of its tokens'
    values weighted by their gates.

    The row is then normed with `weight` float32 [D] and rotated by the position of the block's
    first token. `ape` float32 [ratio, C] is added to the gates; `cos_sin_cache` is that of
    `rotary`. `rows` and `state` are names in `layer.rows`: of the rows that receive the result, and
    of the state that keeps tokens without a complete block.
    """

    layer: SparseLayer
    rows: str
    state: str
    ape: Tensor
    weight: Tensor
    eps: float
    cos_sin_cache: Tensor

    def __call__(self, kv_gate: Tensor, batch: ForwardBatch, backend: DeepseekV4AttnBackend) -> None:
        """Compress kv_gate [T, 2 C], values and gates side by side.

        Call once per forward: it advances the state.
        """
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
    """A callable that chooses the complete blocks that each token attends to, and stores them in
    the plan as `chosen`.

    Each block's key is scored by `heads` queries.
    """

    layer: SparseLayer
    heads: int
    compressor: Compressor

    def __call__(
        self, queries: Tensor, weights: Tensor, kv_gate: Tensor, batch: ForwardBatch, backend: DeepseekV4AttnBackend
    ) -> None:
        """Choose blocks by queries [T, heads * D], before rotary, and their weights [T, heads].

        `kv_gate` [T, 2 C] is the tokens' input of the compressor. Keys of blocks that end in this
        step are stored first and can be chosen.
        """
        self.compressor(kv_gate, batch, backend)
        q = queries.unflatten(1, (self.heads, queries.shape[1] // self.heads))
        q = backend.kernels.rope_tail(q, batch.positions, self.compressor.cos_sin_cache, None, False)
        backend.choose(q, weights, self.layer, batch)
