"""Attention of third in plain torch, by the four methods of the contract: rows of the page table, read on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket
from sglcore.runtime.memory.pools import CELL_MAJOR

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch


@dataclass(slots=True)
class RowsPlan(AttentionPlan):
    """Page rows int32 [B, pages], lengths int [B], and the queries of each row; None: one of each."""

    pages: Tensor
    seq_lens: Tensor
    queries: tuple[int, ...] | None = None


class RowsAttention(AttentionBackend[RowsPlan]):
    """Causal attention without windows, in every dtype and size."""

    facts = AttentionFacts(features=frozenset({"mixed", "capture"}), takes_stored=True, layouts=(CELL_MAJOR,))

    @classmethod
    def unavailable(cls) -> str:
        """Nowhere."""
        return ""

    def plan(self, batch: ForwardBatch) -> RowsPlan:
        """Page rows as they are now."""
        assert batch.seq_lens_cpu is not None
        rows, lengths = len(batch.seq_lens_cpu), batch.extend_seq_lens_cpu
        pages = self.req_to_token_pool.page_table.index_select(0, batch.req_pool_indices[:rows])
        queries = None if lengths is None else tuple(int(each) for each in lengths)
        return RowsPlan(self, self.generation, pages, batch.seq_lens[:rows], queries)

    def capture_plan(self, bucket: Bucket) -> RowsPlan:
        """Fixed page rows and lengths, which `refresh` writes."""
        pool = self.req_to_token_pool
        pages = pool.page_table.new_zeros(bucket.batch_size, pool.max_pages)
        return RowsPlan(self, self.generation, pages, torch.ones_like(pages[:, 0]))

    def refresh(self, plan: RowsPlan, batch: ForwardBatch) -> None:
        """Two copies on the device."""
        torch.index_select(self.req_to_token_pool.page_table, 0, batch.req_pool_indices, out=plan.pages)
        plan.seq_lens.copy_(batch.seq_lens)

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: RowsPlan) -> Tensor:
        """Rows beyond the real ones come out as zero."""
        out = torch.zeros_like(q)
        grouped = q.view(q.shape[0], layer.num_kv_heads, -1, layer.head_dim)
        if plan.queries is None:
            rows = len(plan.seq_lens)
            found = self._row(grouped[:rows, None], plan.pages, plan.seq_lens, layer)
            out[:rows] = found.reshape(rows, q.shape[1])
            return out
        start = 0
        for row, count in enumerate(plan.queries):
            part = slice(start, start + count)
            found = self._row(grouped[part][None], plan.pages[row : row + 1], plan.seq_lens[row : row + 1], layer)
            out[part] = found.reshape(count, q.shape[1])
            start += count
        return out

    def _row(self, q: Tensor, pages: Tensor, seq_lens: Tensor, layer: Attention) -> Tensor:
        """q [B, n, kv_heads, group, dim], the last n tokens of each row, over its pages; returns q's shape."""
        size, pool = self.req_to_token_pool.page_size, self.token_to_kv_pool
        places = torch.arange(pages.shape[1] * size, dtype=torch.int32, device=q.device)
        cells = (pages[:, :, None] * size + places[:size]).flatten(1)
        keys, values = (part[cells] for part in pool.kv(layer.layer_id))
        last = seq_lens[:, None] - q.shape[1] + places[: q.shape[1]]
        seen = places <= last[..., None]
        scores = torch.einsum("bnhgd,blhd->bnhgl", q.float() * layer.scaling, keys.float())
        weights = scores.masked_fill(~seen[:, :, None, None], -torch.inf).softmax(dim=-1)
        values = values.float().masked_fill(~seen.any(dim=1)[:, :, None, None], 0.0)
        return torch.einsum("bnhgl,blhd->bnhgd", weights, values).to(q.dtype)
