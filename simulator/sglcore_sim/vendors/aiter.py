"""AITER: paged decode and batched prefill as CPU references with the real signatures.

Decode takes raw pointers (csrc/cpp_itfs/pa/pa_v1.py and pa_v1.cpp.jinja, ROCm/aiter): the reference
refuses calls for which the real kernel would access wrong memory. Prefill makes the checks of
csrc/py_itfs_ck/mha_batch_prefill_kernels.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglcore_sim.vendors.paged import adjacent, attend, cells_of, flat, ints, plant_module, require, together

DECODE, PREFILL = "aiter.paged_attention_v1", "aiter.mha_batch_prefill_func"
HALF = (torch.float16, torch.bfloat16)
PAGE_SIZES = (16, 32)
PARTITION = 256
"""Tokens per partition for which the kernel is compiled."""


def plant(sim: Any) -> None:
    """Make `import aiter` in this process return a new module with the references of
    `paged_attention_v1` and `mha_batch_prefill_func`, bound to the simulator `sim`. For a call
    beyond its limits the first raises ValueError, the second RuntimeError. Options that they do not
    use are ignored."""
    plant_module(
        "aiter", **{each.__name__: partial(each, sim) for each in (paged_attention_v1, mha_batch_prefill_func)}
    )


def paged_attention_v1(
    sim: Any,
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
    _check_decode(
        {"out": out, "workspace": workspace_buffer, "query": query, "keys": key_cache, "values": value_cache},
        {"tables": block_tables, "lens": context_lens, "starts": cu_query_lens, "scales": (k_scale, v_scale)},
        (kv_cache_dtype, kv_cache_layout, partition_size, mtp),
    )
    size, partitions = key_cache.shape[1], -(-max_context_len // partition_size)
    require(DECODE, {"a workspace for every partition": _fits(workspace_buffer, query, partitions)}, ValueError)

    def kernel() -> None:
        pages, lens = sim.host_view(block_tables), sim.host_view(context_lens).tolist()
        # Sequences longer than this launch's partitions are truncated, as on hardware.
        rows = [(i, i + 1, cells_of(pages[i], min(n, partitions * partition_size), size)) for i, n in enumerate(lens)]
        caches = flat(sim.host_view(key_cache)), flat(sim.host_view(value_cache))
        attend(
            sim.host_view(out), sim.host_view(query), rows, *caches, scale, True, sliding_window - 1, logits_soft_cap
        )

    reads = [query, key_cache, value_cache, block_tables, context_lens, k_scale, v_scale]
    sim.launch(DECODE, kernel, reads=reads, writes=[out, workspace_buffer])
    return out


def mha_batch_prefill_func(
    sim: Any,
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
    _check_prefill(q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices)
    made = torch.empty_like(q) if out is None else out
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def kernel() -> None:
        begin, first = sim.host_view(cu_seqlens_q).tolist(), sim.host_view(kv_indptr).tolist()
        cells = sim.host_view(kv_page_indices).to(torch.int64)
        rows = [(begin[i], begin[i + 1], cells[first[i] : first[i + 1]]) for i in range(len(begin) - 1)]
        views = sim.host_view(k), sim.host_view(v)
        attend(sim.host_view(made), sim.host_view(q), rows, *views, scale, causal, window_size[0], logits_soft_cap)

    reads = [q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices]
    sim.launch(PREFILL, kernel, reads=reads, writes=[made])
    return made


def _check_decode(data: Mapping[str, Tensor], where: Mapping[str, Any], kinds: tuple[str, str, int, int]) -> None:
    query, keys, out = data["query"], data["keys"], data["out"]
    rows, heads, dim = query.shape
    scales, given = where["scales"], [*data.values(), where["tables"], where["lens"], *where["scales"]]
    wanted = {
        "half precision, 'auto', 'NHD', partitions of 256 and one query a row": kinds == ("auto", "NHD", PARTITION, 1),
        "one half precision for all": query.dtype in HALF and query.dtype == keys.dtype == data["values"].dtype,
        "an output of the queries' shape and type, contiguous": out.shape == query.shape
        and out.dtype == query.dtype
        and out.is_contiguous(),
        "everything on one device": together(*given),
        "queries whose heads lie side by side": query.stride()[1:] == (dim, 1),
        "keys and values of one shape and stride, heads contiguous": keys.stride() == data["values"].stride()
        and keys.shape == data["values"].shape
        and keys.stride(-1) == 1,
        f"pages of {PAGE_SIZES} and heads of 64 or 128": keys.shape[1] in PAGE_SIZES and dim in (64, 128),
        "as many query heads for each head of keys": heads % keys.shape[2] == 0,
        "block_tables int32[rows, pages], contiguous": ints(where["tables"], rows, where["tables"].shape[-1]),
        "context_lens int32[rows], contiguous": ints(where["lens"], rows),
        "cu_query_lens int32[rows + 1], contiguous": where["starts"] is None or ints(where["starts"], rows + 1),
        "scales of float32": all(scale.dtype == torch.float32 for scale in scales),
        "a workspace of bytes, contiguous": data["workspace"].dtype == torch.uint8
        and data["workspace"].is_contiguous(),
    }
    require(DECODE, wanted, ValueError)


def _fits(workspace: Tensor, query: Tensor, partitions: int) -> bool:
    """Return whether the workspace (bytes) holds two float32 numbers and a partial result in the
    queries' dtype for every row, head and partition. `query` is [rows, heads, dim]."""
    rows, heads, dim = query.shape
    return workspace.numel() >= rows * heads * partitions * (dim * query.element_size() + 2 * 4)


def _check_prefill(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, cell_starts: Tensor, cells: Tensor) -> None:
    rows, dim = len(starts) - 1, q.shape[-1]
    wanted = {
        "one half precision for all": q.dtype in HALF and q.dtype == k.dtype == v.dtype,
        "everything on one device": together(q, k, v, starts, cell_starts, cells),
        "tensors whose last dimension is contiguous": adjacent(q, k, v, cells),
        "cells [cells, heads, dim] of keys and of values": k.dim() == 3 and k.shape == v.shape and k.shape[-1] == dim,
        "heads that begin every 16 bytes": all(
            s * k.element_size() % 16 == 0 for s in (*k.stride()[:2], *v.stride()[:2])
        ),
        "heads of whole 8ths up to 256": dim % 8 == 0 and dim <= 256,
        "as many query heads for each head of keys": q.shape[1] % k.shape[1] == 0,
        "at least one row": rows > 0,
        "cu_seqlens_q int32[rows + 1], contiguous": ints(starts, rows + 1),
        "kv_indptr int32[rows + 1], contiguous": ints(cell_starts, rows + 1),
        "kv_page_indices of int32": cells.dtype == torch.int32,
    }
    require(PREFILL, wanted)
