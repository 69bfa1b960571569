"""MATE's FlashAttention (the modules `mate` and `flash_attn_interface`) as a CPU reference with the
real signature.

It has the interface and the preconditions of FlashAttention 3 (mate/mha_interface.py,
MooreThreads/mate), and kernels for some page sizes only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglcore_sim.vendors.paged import FLASH_ATTENTION, flash_attention, plant_module, require

PAGES = (1, 16, 64)


def plant(sim: Any) -> None:
    """Make `import mate` and `import flash_attn_interface` in this process return new modules with
    the reference of `flash_attn_with_kvcache`, bound to `sim`. It takes paged caches with lengths
    and query offsets only and raises NotImplementedError otherwise; pages of other than 1, 16 or 64
    tokens, and calls beyond the other limits, raise RuntimeError. Options that it does not use are
    ignored."""

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
        require(FLASH_ATTENTION, {f"pages of {PAGES}": k_cache.shape[1] in PAGES})
        left = -1 if window_size[0] is None else window_size[0]
        return flash_attention(sim, parts, max_seqlen_q, softmax_scale, causal, left, softcap)

    for module in ("mate", "flash_attn_interface"):
        plant_module(module, flash_attn_with_kvcache=flash_attn_with_kvcache)
