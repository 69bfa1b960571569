"""DeepSeek-V4's attention on GPUs with waves of 64: each token reads one list of KV rows in one
pool, as AITER's kernels take them.

The rows belong to pages, as everywhere: block rows to pages of all tokens, window rows and the
state of overlapping blocks to window pages. So a request that continues from a cached page finds
exactly the rows that it would have stored itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.sparse.compressed import CompressedPlan, DeepseekV4AttnBackend
from sglcore.runtime.attention.sparse.sparse_layer import SparseLayer
from sglcore.runtime.attention.sparse.token_queries import TokenRows
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.kernel_choice import Call
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.deepseek_v4_rows import BLOCKS, WINDOW
from sglcore.runtime.memory.kv_rows import Place
from sglcore.runtime.memory.pools import ReqToTokenPool
from sglcore_hip.capability import WIDE_WAVE, read_capability
from sglcore_hip.compressor import CompressorHip


class DeepseekV4HipRadixBackend(DeepseekV4AttnBackend):
    """`DeepseekV4AttnBackend` with one list per token: a plan's `blocks` int32 [T, W + X], by
    ratio, are rows of the window, then of blocks, in the pool's joined rows.

    Layers with an indexer have no such list: there, `blocks` int32 [T, W] are the rows of the
    window in the joined rows, and `choose` appends those that it chose. Layers with a window only,
    and blocks in host memory, are read as the base class reads them.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        pool = self.token_to_kv_pool
        joined = {layer[BLOCKS].ratio: pool.joined(place) for place, layer in enumerate(pool.layers) if BLOCKS in layer}
        self._first_windows = {ratio: found[1] for ratio, found in joined.items() if found is not None}
        """By ratio, the number of block rows before the window rows in the joined rows."""

    @classmethod
    def unavailable(cls) -> str:
        """Return why the current GPU is not served; empty if its waves are 64 wide."""
        found = read_capability().wave_size
        return "" if found == WIDE_WAVE else f"it serves GPUs with waves of {WIDE_WAVE}, this GPU has waves of {found}"

    @classmethod
    def remark(cls) -> str:
        """Return how its compressor is launched."""
        return str(CompressorHip.of(read_capability()))

    @classmethod
    def calls(cls, layer: Attention, table: ReqToTokenPool) -> Iterable[tuple[Entry[Any], Call]]:
        """Implements `AttentionBackend.calls`: attention over blocks on the device has one list, as
        wide as it can be."""
        for entry, call in super().calls(layer, table):
            blocks = layer.rows.get(BLOCKS)
            if entry is KernelTable.sparse_mqa and blocks is not None and blocks.place is Place.PAGES:
                assert isinstance(layer, SparseLayer) and layer.sliding_window is not None
                width = layer.sliding_window + (layer.top_k or table.max_tokens // blocks.ratio)
                q, rows, chosen, _, _, *more = call
                assert isinstance(chosen, Tensor)
                yield entry, (q, rows, chosen.new_empty(len(chosen), width), None, None, *more)
            else:
                yield entry, call

    def choose(self, q: Tensor, weights: Tensor, layer: SparseLayer, batch: ForwardBatch) -> None:
        """Implements `DeepseekV4AttnBackend.choose`; `chosen` are the rows of the window, then of
        the chosen blocks, in the joined rows."""
        super().choose(q, weights, layer, batch)
        if self.token_to_kv_pool.joined(layer.layer_id) is not None:
            _, plan = self.planned(batch)
            assert plan.chosen is not None
            plan.chosen = torch.cat((plan.blocks[layer.rows[BLOCKS].ratio], plan.chosen), dim=1)

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: CompressedPlan) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads * size] to [T, heads * value_size]."""
        assert isinstance(layer, SparseLayer)
        joined = self.token_to_kv_pool.joined(layer.layer_id)
        if joined is None:
            return super().attend(q, layer, batch, plan)
        listed = plan.chosen if layer.top_k else plan.blocks[layer.rows[BLOCKS].ratio]
        assert listed is not None
        q = q.view(q.shape[0], layer.num_heads, layer.head_dim)
        codec = self.token_to_kv_pool.codec(layer.layer_id, WINDOW)
        how = layer.sinks, layer.scaling, layer.value_size, codec
        return self.kernels.sparse_mqa(q, joined[0], listed, None, None, *how).flatten(1)

    def _empty(self, tokens: TokenRows, counts: Mapping[int, int], window_out: Tensor) -> CompressedPlan:
        plan = super()._empty(tokens, counts, window_out)
        size, width = plan.window.shape
        plan.blocks = {
            ratio: plan.window.new_empty(size, width + (blocks.shape[1] if blocks is not None else 0))
            for ratio in self._first_windows
            for blocks in (plan.blocks.get(ratio),)
        }
        return plan

    def _fill_lists(self, plan: CompressedPlan, batch: ForwardBatch) -> None:
        slots, size, (table, positions) = plan.tokens.slots, self.token_to_kv_pool.page_size, self._windows(batch)
        width = plan.window.shape[1]
        self.kernels.window_rows(table, slots, positions, width, size, plan.window)
        for ratio, first in self._first_windows.items():
            out = plan.blocks[ratio]
            torch.where(plan.window < 0, plan.window, plan.window + first, out=out[:, :width])
            if out.shape[1] > width:
                blocks = out.new_empty(len(out), out.shape[1] - width)
                self.kernels.block_rows(self.req_to_token_pool.page_table, slots, batch.positions, ratio, size, blocks)
                out[:, width:] = blocks
