"""MATE's FlashAttention (the modules `mate` and `flash_attn_interface`) as a CPU reference under its true signature.

Its preconditions are those of FlashAttention 3, whose interface it has (mate/mha_interface.py, MooreThreads/mate), over
pages of the sizes that it has kernels for.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sglcore_sim.vendors.paged import attend, cells_of, flat, plant_module, require, require_flash_attention

CALL = "flash_attn_with_kvcache"
PAGES = (1, 16, 64)


def plant(sim: Any) -> None:
    """Make both imports give the reference."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | int | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (-1, -1),
        learnable_sink: Tensor | None = None,
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = -1,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        cp_tot_seqused_k: Tensor | None = None,
    ) -> Tensor:
        needed = (q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q)
        parts = tuple(part for part in needed if isinstance(part, Tensor))
        if k is not None or len(parts) < len(needed) or not max_seqlen_q:
            raise NotImplementedError("this reference takes paged caches with lengths and query offsets only")
        require_flash_attention(CALL, *parts)
        require(CALL, {f"pages of {PAGES}": k_cache.shape[1] in PAGES})
        window = tuple(-1 if side is None else side for side in window_size)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return _run(sim, parts, max_seqlen_q, scale, causal, window[0])

    for module in ("mate", "flash_attn_interface"):
        plant_module(module, flash_attn_with_kvcache=flash_attn_with_kvcache)


def _run(sim: Any, parts: tuple[Tensor, ...], longest: int, scale: float, causal: bool, left: int) -> Tensor:
    """One launch; `parts` are queries, both caches, the page table, the lengths and the queries' offsets."""
    q, k_cache, v_cache, table, lengths, starts = parts
    out, page_size = torch.empty_like(q), k_cache.shape[1]

    def kernel() -> None:
        begin, lens = sim.host_view(starts).tolist(), sim.host_view(lengths).tolist()
        pages = sim.host_view(table)
        # The launch has tiles for `longest` queries of a row; more are never computed.
        spans = [(start, min(end, start + longest)) for start, end in pairwise(begin)]
        rows = [
            (start, end, cells_of(pages[row], lens[row], page_size))
            for row, (start, end) in enumerate(spans)
            if end > start
        ]
        caches = flat(sim.host_view(k_cache)), flat(sim.host_view(v_cache))
        attend(sim.host_view(out), sim.host_view(q), rows, *caches, scale, causal, left)

    sim.launch(CALL, kernel, reads=list(parts), writes=[out])
    return out
