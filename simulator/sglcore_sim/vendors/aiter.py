"""AITER: paged decode and batched prefill as CPU references under their true signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglcore_sim.vendors.paged import attend, cells_of, flat, plant_module

HALF = (torch.float16, torch.bfloat16)
PAGE_SIZES = (16, 32)


def plant(sim: Any) -> None:
    """Make `import aiter` give the references."""

    def paged_attention_v1(
        out: Tensor,
        workspace_buffer: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        block_tables: Tensor,
        cu_query_lens: Tensor | None,
        context_lens: Tensor,
        max_context_len: int,
        alibi_slopes: Tensor | None,
        kv_cache_dtype: str,
        kv_cache_layout: str,
        logits_soft_cap: float,
        k_scale: Tensor,
        v_scale: Tensor,
        fp8_out_scale: Tensor | None = None,
        partition_size: int = 256,
        mtp: int = 1,
        sliding_window: int = 0,
    ) -> Tensor:
        _check_decode(query, key_cache, workspace_buffer, block_tables, context_lens, kv_cache_dtype, kv_cache_layout)
        size, partitions = key_cache.shape[1], -(-max_context_len // partition_size)
        _check_workspace(workspace_buffer, query, partitions)

        def kernel() -> None:
            pages, lens = sim.host_view(block_tables), sim.host_view(context_lens).tolist()
            # Sequences longer than the partitions of this launch are cut, as on hardware.
            rows = [
                (i, i + 1, cells_of(pages[i], min(n, partitions * partition_size), size)) for i, n in enumerate(lens)
            ]
            caches = flat(sim.host_view(key_cache)), flat(sim.host_view(value_cache))
            attend(sim.host_view(out), sim.host_view(query), rows, *caches, scale, True, sliding_window - 1)

        reads = [query, key_cache, value_cache, block_tables, context_lens, k_scale, v_scale]
        sim.launch("aiter.paged_attention_v1", kernel, reads=reads, writes=[out, workspace_buffer])
        return out

    def mha_batch_prefill_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        kv_indptr: Tensor,
        kv_page_indices: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        return_attn_probs: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        if q.dtype not in HALF or k.dim() != 3:
            raise RuntimeError(
                f"takes half precision and cells [cells, heads, dim], not {q.dtype} and {tuple(k.shape)}"
            )
        made = torch.empty_like(q) if out is None else out
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

        def kernel() -> None:
            begin, first = sim.host_view(cu_seqlens_q).tolist(), sim.host_view(kv_indptr).tolist()
            cells = sim.host_view(kv_page_indices).to(torch.int64)
            rows = [(begin[i], begin[i + 1], cells[first[i] : first[i + 1]]) for i in range(len(begin) - 1)]
            views = sim.host_view(k), sim.host_view(v)
            attend(sim.host_view(made), sim.host_view(q), rows, *views, scale, causal, window_size[0])

        reads = [q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices]
        sim.launch("aiter.mha_batch_prefill_func", kernel, reads=reads, writes=[made])
        return made

    plant_module("aiter", paged_attention_v1=paged_attention_v1, mha_batch_prefill_func=mha_batch_prefill_func)


def _check_decode(
    query: Tensor, key_cache: Tensor, workspace: Tensor, tables: Tensor, lengths: Tensor, dtype: str, layout: str
) -> None:
    if query.dtype not in HALF or dtype != "auto" or layout != "NHD":
        raise ValueError(f"this reference takes half precision, 'auto' and 'NHD', not {query.dtype}, {dtype}, {layout}")
    if key_cache.shape[1] not in PAGE_SIZES or query.shape[-1] not in (64, 128):
        raise ValueError(f"no kernel for pages of {key_cache.shape[1]} and heads of {query.shape[-1]}")
    if tables.dtype != torch.int32 or lengths.dtype != torch.int32 or workspace.dtype != torch.uint8:
        raise ValueError("block_tables and context_lens must be int32, the workspace uint8")


def _check_workspace(workspace: Tensor, query: Tensor, partitions: int) -> None:
    rows, heads, dim = query.shape
    wanted = rows * heads * partitions * (dim * query.element_size() + 2 * 4)
    if workspace.numel() < wanted:
        raise ValueError(f"the workspace has {workspace.numel()} bytes, {partitions} partitions want {wanted}")
