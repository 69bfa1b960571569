"""AITER over the paged KV cache: its paged decode with page tables, its batched prefill with lists
of KV slots.

Supported features are read from the installed AITER's functions and from the GPU's properties.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket, Unavailable
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.paged import (
    as_pages,
    cell_list,
    device_offsets,
    page_rows,
    window_left,
    with_padding,
)
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore_hip.capability import WIDE_WAVE, read_capability

try:
    import aiter  # pyright: ignore[reportMissingImports]
except (ImportError, OSError) as error:
    raise Unavailable(f"{error}: pip install amd-aiter, or build it from its repository") from error

WANTED = ("paged_attention_v1", "mha_batch_prefill_func")
MISSING = tuple(name for name in WANTED if not hasattr(aiter, name))  # foreign: what a version offers
if MISSING:
    raise Unavailable(f"this AITER has no {', '.join(MISSING)}: pip install --upgrade amd-aiter")

DECODES_WINDOWS = "sliding_window" in inspect.signature(aiter.paged_attention_v1).parameters
"""Versions before 2026 do not support sliding windows in decode."""
PARTITION = 256
"""Tokens of a sequence per workgroup; the partial results of all partitions are stored and then
combined."""


@dataclass(slots=True)
class AiterPlan(AttentionPlan):
    """The inputs of one batch: `rows` for a decode step (one token for each request), otherwise
    `lists`; both None for a batch without requests. `num_tokens`: the number of real tokens,
    without padding."""

    num_tokens: int
    rows: PageRows | None = None
    lists: CellLists | None = None


@dataclass(frozen=True, slots=True)
class PageRows:
    """What decode reads: page table int32 [B, pages], lengths int32 [B], query offsets int32 [B +
    1]. `longest`: the longest sequence that can come, in tokens; `partial`: memory for partial
    results of sequences of that length."""

    pages: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    longest: int
    partial: Tensor


@dataclass(frozen=True, slots=True)
class CellLists:
    """What prefill reads: query offsets int32 [B + 1], offsets of KV slots int32 [B + 1], KV slots
    int32 [total] of all requests in turn; and the largest numbers of queries and of KV slots of one
    request."""

    query_starts: Tensor
    cell_starts: Tensor
    cells: Tensor
    longest_query: int
    longest_sequence: int


class AiterAttention(AttentionBackend[AiterPlan]):
    """Decoder attention with or without softcaps, in half precision; with sliding windows if the
    installed version supports them in decode. Importing this module raises Unavailable without the
    library, or with one that lacks a function."""

    facts = AttentionFacts(
        page_sizes=(16, 32),
        head_dims=(64, 128),
        dtypes=("float16", "bfloat16"),
        features=frozenset({"softcap", "mixed", "capture"} | ({"sliding_window"} if DECODES_WINDOWS else set())),
        takes_stored=True,
        library="aiter",
    )

    @classmethod
    def unavailable(cls) -> str:
        """Return why the current GPU cannot run it; empty if its waves (warps) are 64 wide."""
        found = read_capability().wave_size
        return "" if found == WIDE_WAVE else f"its kernels need waves of {WIDE_WAVE}, this GPU has waves of {found}"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._one = torch.ones(1, dtype=torch.float32, device=self.req_to_token_pool.page_table.device)

    def plan(self, batch: ForwardBatch) -> AiterPlan:
        """Gather page table rows for a decode step, or list the KV slots of all requests for a step
        with prompts, on the device; does not wait."""
        assert batch.seq_lens_cpu is not None
        lengths, generation = batch.seq_lens_cpu, self.token_to_kv_pool.generation
        count, extends = len(lengths), batch.extend_seq_lens_cpu
        slots, seq_lens = batch.req_pool_indices[:count], batch.seq_lens[:count]
        if not count:
            return AiterPlan(self, generation, 0)
        if extends is None:
            rows = self._rows(page_rows(self.req_to_token_pool, slots), seq_lens, int(lengths.max()))
            return AiterPlan(self, generation, count, rows=rows)
        assert batch.extend_seq_lens is not None
        starts = device_offsets(seq_lens)
        cells = cell_list(self.req_to_token_pool, slots, starts, int(lengths.sum()))
        query_starts = device_offsets(batch.extend_seq_lens[:count])
        lists = CellLists(query_starts, starts, cells, int(extends.max()), int(lengths.max()))
        return AiterPlan(self, generation, int(extends.sum()), lists=lists)

    def capture_plan(self, bucket: Bucket) -> AiterPlan:
        """Make a decode plan for `bucket.batch_size` requests with fixed page table rows and
        lengths, which `refresh` writes, and memory for the longest possible request. Does not
        wait."""
        pool, size = self.req_to_token_pool, bucket.batch_size
        pages = pool.page_table.new_zeros(size, pool.max_pages)
        rows = self._rows(pages, torch.ones_like(pages[:, 0]), pool.max_pages * pool.page_size)
        return AiterPlan(self, self.token_to_kv_pool.generation, size, rows=rows)

    def refresh(self, plan: AiterPlan, batch: ForwardBatch) -> None:
        """Overwrite page table rows and lengths of the plan with those of the batch, by copies on
        the device; does not wait. Returns None: the graph itself needs no update."""
        assert plan.rows is not None
        page_rows(self.req_to_token_pool, batch.req_pool_indices, out=plan.rows.pages)
        plan.rows.seq_lens.copy_(batch.seq_lens)

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: AiterPlan) -> Tensor:
        """Implements `AttentionBackend.attend`: q [T, heads * D] -> [T, heads * D] by paged decode,
        or by batched prefill if the plan has lists; padding rows become zero. Does not wait."""
        if not plan.num_tokens:
            return torch.zeros_like(q)
        queries = q.view(-1, layer.num_heads, layer.head_dim)
        real = queries[: plan.num_tokens]
        if plan.rows is not None:
            out = self._decode(real, layer, plan.rows)
        else:
            assert plan.lists is not None
            out = self._extend(real, layer, plan.lists)
        return with_padding(out, q)

    def _decode(self, q: Tensor, layer: Attention, rows: PageRows) -> Tensor:
        k_cache, v_cache = self.token_to_kv_pool.kv(layer.layer_id)
        size, out = self.token_to_kv_pool.page_size, torch.empty_like(q)
        window = {} if layer.sliding_window is None else {"sliding_window": layer.sliding_window}
        aiter.paged_attention_v1(
            out,
            rows.partial,
            q,
            as_pages(k_cache, size),
            as_pages(v_cache, size),
            layer.scaling,
            rows.pages,
            rows.query_starts,
            rows.seq_lens,
            rows.longest,
            None,
            "auto",
            "NHD",
            layer.softcap or 0.0,
            self._one,
            self._one,
            None,
            PARTITION,
            **window,
        )
        return out

    def _extend(self, q: Tensor, layer: Attention, lists: CellLists) -> Tensor:
        k_cache, v_cache = self.token_to_kv_pool.kv(layer.layer_id)
        left = window_left(layer.sliding_window)
        return aiter.mha_batch_prefill_func(
            q,
            k_cache,
            v_cache,
            lists.query_starts,
            lists.cell_starts,
            lists.cells,
            lists.longest_query,
            lists.longest_sequence,
            softmax_scale=layer.scaling,
            logits_soft_cap=layer.softcap or 0.0,
            causal=True,
            window_size=(left, 0) if left >= 0 else (-1, -1),
        )

    def _rows(self, pages: Tensor, seq_lens: Tensor, longest: int) -> PageRows:
        """Return the inputs of decode, with new memory for the partial results: for each request,
        head and partition of a sequence of `longest` tokens a result in the KV cache's dtype, and
        its sum and maximum in float32."""
        count = len(seq_lens)
        dim = max(head_dim for _, head_dim in self.shape.layers)
        each = dim * self.token_to_kv_pool.kv(0)[0].element_size() + 2 * 4
        size = count * self.shape.num_heads * -(-longest // PARTITION) * each
        starts = torch.arange(count + 1, dtype=torch.int32, device=pages.device)
        return PageRows(pages, seq_lens, starts, longest, pages.new_empty(size, dtype=torch.uint8))
