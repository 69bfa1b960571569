"""FlashAttention 3 (the module `flash_attn_interface`): attention over a paged cache as a CPU
reference with the real signature."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglcore_sim.vendors.paged import flash_attention, plant_module


def plant(sim: Any) -> None:
    """Make `import flash_attn_interface` in this process return a new module with the reference of
    `flash_attn_with_kvcache`, bound to `sim`. It takes paged caches with lengths and query offsets
    only, and raises NotImplementedError otherwise, RuntimeError for a call beyond the library's
    limits. Options that it does not use are ignored."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
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
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        if k is not None or page_table is None or cu_seqlens_q is None or cache_seqlens is None or not max_seqlen_q:
            raise NotImplementedError("this reference takes paged caches with lengths and query offsets only")
        parts = (q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q)
        return flash_attention(sim, parts, max_seqlen_q, softmax_scale, causal, window_size[0], softcap)

    plant_module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
