"""Attention in plain torch that stream graphs can capture. The first backend of a new device.

Shapes are fixed and nothing is read on the host. A captured plan gathers every page that a request
may have and masks by the lengths on the device, a block of keys at a time. Batches outside graphs
are planned as the reference plans them, by their host lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import Bucket
from sglcore.runtime.attention.reference import CapturedRows, ReferenceAttention, ReferencePlan, is_seen

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch

BLOCK_ELEMENTS = 1 << 24
"""Maximum elements of a block of keys, over all rows; bounds the memory of a gather."""


class GatheredAttention(ReferenceAttention):
    """Serves every shape, page size, window, softcap, sink and pool, in stream graphs."""

    facts = replace(ReferenceAttention.facts, features=ReferenceAttention.facts.features | {"capture"})

    def capture_plan(self, bucket: Bucket) -> ReferencePlan:
        """Implements `AttentionBackend.capture_plan` by sizes only: the rest is read on the device
        when the graph runs.

        Raises ValueError if the tokens of the bucket cannot be the same number for each request.
        """
        rows = bucket.num_tokens // bucket.batch_size
        if rows * bucket.batch_size != bucket.num_tokens:
            raise ValueError(
                f"{bucket.num_tokens} tokens of {bucket.batch_size} requests do not have the same number each"
            )
        pool = self.req_to_token_pool
        count = torch.arange(
            max(rows, pool.max_pages * pool.page_size), dtype=torch.int32, device=pool.page_table.device
        )
        captured = CapturedRows(bucket.batch_size, count[:rows], count)
        return ReferencePlan(self, self.token_to_kv_pool.generation, captured=captured)

    def refresh(self, plan: ReferencePlan, batch: ForwardBatch) -> None:
        """Implements `AttentionBackend.refresh`; does nothing: slots and lengths are read from the
        batch's buffers.
        """

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: ReferencePlan) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads * head_dim] to the same shape. Rows of
        padding requests hold results computed from page 0.
        """
        rows = plan.captured
        if rows is None:
            return super().attend(q, layer, batch, plan)
        groups = layer.num_heads // layer.num_kv_heads
        queries = q.view(rows.batch_size, len(rows.offsets), layer.num_kv_heads, groups, layer.head_dim)
        return self._attend(queries.float() * layer.scaling, rows, layer, batch).to(q.dtype).view(q.shape)

    def _attend(self, q: Tensor, rows: CapturedRows, layer: Attention, batch: ForwardBatch) -> Tensor:
        """Attend q float32 [B, n, kv_heads, group, dim], already scaled; return float32 of q's
        shape. B requests have n tokens each.

        An online softmax over blocks of pages, rescaled to the largest score so far. It starts from
        the sinks if there are any.
        """
        slots, seq_lens = batch.req_pool_indices, batch.seq_lens
        pool = self.req_to_token_pool
        table = pool.page_table.index_select(0, slots)
        last = (seq_lens - len(rows.offsets))[:, None] + rows.offsets
        page_elements = rows.batch_size * pool.page_size * layer.num_kv_heads * layer.head_dim
        step = max(1, BLOCK_ELEMENTS // page_elements)
        best = torch.full(q.shape[:-1], -torch.inf, device=q.device)
        total, out = torch.zeros_like(best), torch.zeros_like(q)
        if layer.sinks is not None:
            best, total = layer.sinks.float().view(q.shape[2:4]).expand_as(best), torch.ones_like(best)
        for first in range(0, pool.max_pages, step):
            keys, values = self._gathered(table[:, first : first + step], rows, layer)
            places = rows.places[first * pool.page_size :][: keys.shape[1]]
            mask = _visible(last, places, layer.sliding_window)
            if batch.visible is not None:
                mask &= is_seen(batch.visible[:, None, None], last[..., None] - places)
            scores = torch.einsum("bnhgd,blhd->bnhgl", q, keys)
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            scores = scores.masked_fill(~mask[:, :, None, None], -torch.inf)
            higher = torch.maximum(best, scores.amax(dim=-1))
            anchor = higher.masked_fill(higher == -torch.inf, 0.0)
            weights, scale = torch.exp(scores - anchor[..., None]), torch.exp(best - anchor)
            values = values.masked_fill(~mask.any(dim=1)[:, :, None, None], 0.0)
            out = out * scale[..., None] + torch.einsum("bnhgl,blhd->bnhgd", weights, values)
            total, best = total * scale + weights.sum(dim=-1), higher
        return out / total[..., None]

    def _gathered(self, pages: Tensor, rows: CapturedRows, layer: Attention) -> Iterator[Tensor]:
        """Yield two tensors: the keys of pages int32 [B, P], then their values.

        Each is a float32 copy [B, P * page_size, kv_heads, dim].
        """
        size = self.req_to_token_pool.page_size
        cells = (pages[:, :, None] * size + rows.places[:size]).view(-1)
        for found in self.token_to_kv_pool.read_cells(layer.layer_id, cells):
            yield found.view(pages.shape[0], -1, *found.shape[1:]).float()


def _visible(last: Tensor, places: Tensor, window: int | None) -> Tensor:
    """Return bool [B, n, L]: which queries see which tokens.

    Queries are at `last` int32 [B, n], tokens at `places` int32[L].
    """
    mask = places <= last[..., None]
    return mask if window is None else mask & (places > last[..., None] - window)
