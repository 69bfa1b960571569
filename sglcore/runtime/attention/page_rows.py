"""Attention by libraries that take page-table rows, lengths and query offsets on the device."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionPlan, Bucket
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.paged import as_pages, device_offsets, page_rows, with_padding
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.pools import CELL_MAJOR


@dataclass(slots=True)
class RowsPlan(AttentionPlan):
    """The plan of `PageRowsAttention`: the arguments of one library call.

    `pages` int32[B, pages per request] and `seq_lens` int32[B]; `starts` int32[B + 1], the offsets
    of the requests' query tokens; `longest`, the maximum number of query tokens of a request;
    `num_tokens`, without padding.
    """

    pages: Tensor
    seq_lens: Tensor
    starts: Tensor
    longest: int
    num_tokens: int


class PageRowsAttention(AttentionBackend[RowsPlan]):
    """A base for backends that call a library: a subclass only implements `attend_pages`.

    Planning gathers on the device; does not wait.
    """

    @abstractmethod
    def attend_pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: RowsPlan, layer: Attention) -> Tensor:
        """Attend q [num_tokens, heads, dim] to pages; return a new tensor of q's shape.

        Pages are [pages, page_size, kv_heads, dim], or [pages, kv_heads, page_size, dim] in a
        page-major pool.
        """

    def plan(self, batch: ForwardBatch) -> RowsPlan:
        """Implements `AttentionBackend.plan`: gather the page-table rows of the batch."""
        assert batch.seq_lens_cpu is not None
        rows, lengths = len(batch.seq_lens_cpu), batch.extend_seq_lens_cpu
        if lengths is None:
            starts, longest, tokens = _range(rows + 1, batch.seq_lens), 1, rows
        else:
            assert batch.extend_seq_lens is not None
            starts = device_offsets(batch.extend_seq_lens[:rows])
            longest, tokens = int(lengths.max(initial=0)), int(lengths.sum())
        pages = page_rows(self.req_to_token_pool, batch.req_pool_indices[:rows])
        generation = self.token_to_kv_pool.generation
        return RowsPlan(self, generation, pages, batch.seq_lens[:rows], starts, longest, tokens)

    def capture_plan(self, bucket: Bucket) -> RowsPlan:
        """Implements `AttentionBackend.capture_plan` for decode with one token per request:
        allocate page rows and lengths, which `refresh` writes.
        """
        pool, size = self.req_to_token_pool, bucket.batch_size
        pages = pool.page_table.new_zeros(size, pool.max_pages)
        lengths = torch.ones_like(pages[:, 0])
        generation = self.token_to_kv_pool.generation
        return RowsPlan(self, generation, pages, lengths, _range(size + 1, lengths), 1, size)

    def refresh(self, plan: RowsPlan, batch: ForwardBatch) -> None:
        """Implements `AttentionBackend.refresh`: copy page rows and lengths on the device."""
        page_rows(self.req_to_token_pool, batch.req_pool_indices, out=plan.pages)
        plan.seq_lens.copy_(batch.seq_lens)

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: RowsPlan) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads * head_dim] to the same shape. Padding
        rows are zero.
        """
        if not plan.num_tokens:
            return torch.zeros_like(q)
        pool = self.token_to_kv_pool
        k_pages, v_pages = pool.kv(layer.layer_id)
        if pool.layout == CELL_MAJOR:
            k_pages, v_pages = as_pages(k_pages, pool.page_size), as_pages(v_pages, pool.page_size)
        queries = q.view(-1, layer.num_heads, layer.head_dim)
        out = self.attend_pages(queries[: plan.num_tokens], k_pages, v_pages, plan, layer)
        return with_padding(out, q)


def _range(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)
