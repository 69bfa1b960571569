"""AITER: paged decode, batched prefill and attention over listed rows, as CPU references with the
real signatures.

Decode takes raw pointers (csrc/cpp_itfs/pa/pa_v1.py and pa_v1.cpp.jinja, ROCm/aiter): the reference
refuses calls for which the real kernel would access wrong memory. Prefill makes the checks of
csrc/py_itfs_ck/mha_batch_prefill_kernels.cu; attention over
listed rows those of aiter/ops/triton/attention/pa_decode_sparse.py, and of its kernels' arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglcore_sim.vendors.paged import adjacent, attend, cells_of, flat, ints, plant_module, require, together

DECODE, PREFILL = "aiter.paged_attention_v1", "aiter.mha_batch_prefill_func"
LISTED = "aiter.ops.triton.attention.pa_decode_sparse"
HALF = (torch.float16, torch.bfloat16)
PAGE_SIZES = (16, 32)
PARTITION = 256
"""Tokens per partition for which the kernel is compiled."""


def plant(sim: Any) -> None:
    """Make `import aiter` and `import aiter.ops.triton.attention.pa_decode_sparse` return modules
    with the references of `paged_attention_v1`, `mha_batch_prefill_func` and `pa_decode_sparse`,
    bound to the simulator `sim`. For a call beyond its limits the first raises ValueError, the
    others RuntimeError. Options that they do not use are ignored."""
    found = plant_module(LISTED, pa_decode_sparse=partial(pa_decode_sparse, sim))
    for name in ("aiter.ops.triton.attention", "aiter.ops.triton", "aiter.ops"):
        found = plant_module(name, __path__=[], **{found.__name__.rpartition(".")[2]: found})
    given = {each.__name__: partial(each, sim) for each in (paged_attention_v1, mha_batch_prefill_func)}
    plant_module("aiter", __path__=[], ops=found, **given)


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


def pa_decode_sparse(
    sim: Any,
    q: Tensor,
    unified_kv: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    attn_sink: Tensor,
    softmax_scale: float,
    kv_scales: Tensor | None = None,
    block_h: int | None = None,
    kv_splits: int | None = None,
    has_invalid: bool | None = True,
    skip_reduce: bool | None = False,
    USE_EXP2: bool | None = None,
    *,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_indptr: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with each token to the rows that its list names; -1 names none. A sink is a score
    without a value."""
    others = kv_scales, block_h, kv_splits, USE_EXP2, extra_cache, extra_indices, extra_indptr, out
    if any(x is not None for x in others) or not has_invalid or skip_reduce:
        raise NotImplementedError("this reference takes rows in half precision, with the default options")
    _check_listed(q, unified_kv, kv_indices, kv_indptr, attn_sink)
    made = torch.empty_like(q)

    def kernel() -> None:
        queries, rows, listed = (sim.host_view(x) for x in (q, unified_kv, kv_indices))
        begin, sinks = sim.host_view(kv_indptr).tolist(), sim.host_view(attn_sink)
        for token in range(len(queries)):
            named = listed[begin[token] : begin[token + 1]].long()
            keys = rows[named[named >= 0]].float()
            # The kernel scales the query before it rounds it to half precision.
            scores = (queries[token].float() * softmax_scale).to(q.dtype).float() @ keys.T
            shares = torch.cat((scores, sinks.unsqueeze(1)), dim=1).softmax(1)[:, :-1]
            sim.host_view(made)[token] = (shares @ keys).to(q.dtype)

    sim.launch(LISTED, kernel, reads=[q, unified_kv, kv_indices, kv_indptr, attn_sink], writes=[made])
    return made


def _check_listed(q: Tensor, rows: Tensor, listed: Tensor, starts: Tensor, sinks: Tensor) -> None:
    tokens, heads, dim = q.shape
    wanted = {
        "queries in half precision, and rows of their type": q.dtype in HALF and rows.dtype == q.dtype,
        "everything on one device": together(q, rows, listed, starts, sinks),
        "rows [rows, dim] of a power of two": rows.dim() == 2 and rows.shape[1] == dim and not dim & (dim - 1),
        "kv_indices int32, contiguous": listed.dim() == 1 and ints(listed, len(listed)),
        "kv_indptr int32[tokens + 1], contiguous": ints(starts, tokens + 1),
        "attn_sink float32[heads], contiguous": sinks.dtype == torch.float32
        and sinks.shape == (heads,)
        and sinks.is_contiguous(),
    }
    require(LISTED, wanted)


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
