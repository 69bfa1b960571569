"""FlashAttention 3 over the paged KV cache, if it is installed and the GPU is a Hopper."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionFacts, Unavailable
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.page_rows import PageRowsAttention, RowsPlan
from sglcore.runtime.attention.paged import window_left

CAPABILITY = (9, 0)
"""Its kernels use instructions of this architecture only."""

try:
    import flash_attn_interface  # pyright: ignore[reportMissingImports]
except (ImportError, OSError) as error:
    raise Unavailable(f"{error}: build it from the folder hopper of the flash-attention repository") from error


class FlashAttention(PageRowsAttention):
    """Decoder attention with or without windows and softcaps, in half precision: one library call
    serves decode and prefill. Importing this module raises Unavailable without the library."""

    facts = AttentionFacts(
        head_dims=(64, 96, 128, 192, 256),
        dtypes=("float16", "bfloat16"),
        features=frozenset({"sliding_window", "softcap", "mixed", "capture"}),
        takes_stored=True,
        library="flash_attn_interface",
    )

    @classmethod
    def unavailable(cls) -> str:
        """Return why the current GPU cannot run it; empty for compute capability 9.0, the only one
        it supports."""
        found = torch.cuda.get_device_capability()
        return "" if found == CAPABILITY else f"it needs a GPU of compute capability 9.0, this one has {found}"

    def attend_pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: RowsPlan, layer: Attention) -> Tensor:
        """Implements `PageRowsAttention.attend_pages`: q [T, heads, D] attends causally over pages
        of keys and values, as the plan lists them -> [T, heads, D]. One launch; its split depends
        only on sizes that are fixed in a captured plan. Does not wait."""
        left = window_left(layer.sliding_window)
        return flash_attn_interface.flash_attn_with_kvcache(
            q,
            k_pages,
            v_pages,
            cache_seqlens=plan.seq_lens,
            page_table=plan.pages,
            cu_seqlens_q=plan.starts,
            max_seqlen_q=plan.longest,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=(left, 0) if left >= 0 else (-1, -1),
            softcap=layer.softcap or 0.0,
        )
