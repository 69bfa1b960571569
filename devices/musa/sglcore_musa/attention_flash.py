"""FlashAttention over the paged pool, from whichever library of the vendor offers it by its public names.

One call serves decode and prefill: page-table rows, lengths and query offsets, all on the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionFacts, AttentionPlan, Bucket, Unavailable
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.paged import as_pages, device_offsets, page_rows, window_left
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore_musa.vendor import musa

MODULES = ("flash_attn_interface", "mate")
FUNCTION = "flash_attn_with_kvcache"
ARGUMENTS = frozenset(
    {"cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size"}
)
CAPABILITY = (3, 1)
"""Its kernels are written for this generation."""


def find() -> Callable[..., Any]:
    """The library's function; raises Unavailable, saying what is missing where."""
    refused = []
    for name in MODULES:
        try:
            function = getattr(import_module(name), FUNCTION)
        except (ImportError, OSError, AttributeError) as error:
            refused.append(f"{name}: {error}")
            continue
        missing = sorted(ARGUMENTS - inspect.signature(function).parameters.keys())
        if not missing:
            return function
        refused.append(f"{name}.{FUNCTION} lacks {', '.join(missing)}")
    raise Unavailable(f"{'; '.join(refused)}: pip install mate from the vendor's index")


attend = find()
if musa().get_device_capability() < CAPABILITY:
    raise Unavailable(f"it is for GPUs of capability 3.1, this one has {musa().get_device_capability()}")


@dataclass(slots=True)
class FlashPlan(AttentionPlan):
    """Page rows int32[B, pages], lengths int32[B], query offsets int32[B + 1], and the longest query of the batch."""

    pages: Tensor
    seq_lens: Tensor
    starts: Tensor
    longest: int
    num_tokens: int


class FlashAttention(AttentionBackend):
    """Decoder attention with or without windows, in half precision."""

    facts = AttentionFacts(
        page_sizes=(1, 16, 64),
        head_dims=(64, 128, 256),
        dtypes=("float16", "bfloat16"),
        features=frozenset({"sliding_window", "mixed", "capture"}),
        takes_stored=True,
    )

    def plan(self, batch: ForwardBatch) -> FlashPlan:
        """Gather page rows on the device; waits for nothing."""
        assert batch.seq_lens is not None and batch.seq_lens_cpu is not None and batch.req_pool_indices is not None
        rows = len(batch.seq_lens_cpu)
        pages = page_rows(self.req_to_token_pool, batch.req_pool_indices[:rows])
        starts, longest, tokens = _queries(batch, rows)
        generation = self.token_to_kv_pool.generation
        return FlashPlan(self, generation, pages, batch.seq_lens[:rows], starts, longest, tokens)

    def capture_plan(self, bucket: Bucket) -> FlashPlan:
        """Fixed page rows and lengths, that `refresh` writes."""
        pool, size = self.req_to_token_pool, bucket.batch_size
        pages = pool.page_table.new_zeros(size, pool.max_pages)
        lengths = pages.new_ones(size)
        return FlashPlan(self, self.token_to_kv_pool.generation, pages, lengths, _counting(size + 1, pages), 1, size)

    def refresh(self, plan: AttentionPlan, batch: ForwardBatch) -> None:
        """Two copies on the device."""
        assert isinstance(plan, FlashPlan) and batch.seq_lens is not None and batch.req_pool_indices is not None
        page_rows(self.req_to_token_pool, batch.req_pool_indices, out=plan.pages)
        plan.seq_lens.copy_(batch.seq_lens)
        if batch.extend_seq_lens_cpu is not None:
            plan.starts, plan.longest, plan.num_tokens = _queries(batch, len(plan.pages))

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Attention, batch: ForwardBatch | None
    ) -> Tensor:
        """Store, then attend; rows beyond the real ones come out as zero."""
        assert batch is not None and batch.plan_record is not None
        plan = batch.plan_record.plan
        assert isinstance(plan, FlashPlan)
        self.store(k, v, layer, batch)
        if not plan.num_tokens:
            return torch.zeros_like(q)
        k_cache, v_cache = self.token_to_kv_pool.kv(layer.layer_id)
        page_size, left = self.token_to_kv_pool.page_size, window_left(layer.sliding_window)
        queries = q.view(-1, layer.num_heads, layer.head_dim)
        out = attend(
            queries[: plan.num_tokens],
            as_pages(k_cache, page_size),
            as_pages(v_cache, page_size),
            cache_seqlens=plan.seq_lens,
            page_table=plan.pages,
            cu_seqlens_q=plan.starts,
            max_seqlen_q=plan.longest,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=(left, 0) if left >= 0 else (-1, -1),
        )
        if plan.num_tokens < len(queries):
            out = torch.cat((out, out.new_zeros(len(queries) - plan.num_tokens, *out.shape[1:])))
        return out.view(q.shape)


def _queries(batch: ForwardBatch, rows: int) -> tuple[Tensor, int, int]:
    """Where each row's queries begin, the most of one row, and how many there are."""
    assert batch.seq_lens is not None
    if batch.extend_seq_lens_cpu is None:
        return _counting(rows + 1, batch.seq_lens), 1, rows
    assert batch.extend_seq_lens is not None
    lengths = batch.extend_seq_lens_cpu
    return device_offsets(batch.extend_seq_lens[:rows]), int(lengths.max(initial=0)), int(lengths.sum())


def _counting(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)
