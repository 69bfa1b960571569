"""FlashAttention over the paged KV cache, from the first vendor library that offers it under its
public name.

One call handles decode and prefill, with page table, lengths and query offsets on the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from sglcore.runtime.attention.contract import AttentionFacts, Unavailable
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.page_rows import PageRowsAttention, RowsPlan
from sglcore.runtime.attention.paged import window_left
from sglcore_musa.vendor import musa

MODULES = ("flash_attn_interface", "mate")
FUNCTION = "flash_attn_with_kvcache"
ARGUMENTS = frozenset(
    {"cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size", "softcap"}
)
CAPABILITY = (3, 1)
"""The lowest capability that its kernels support."""


def find() -> Callable[..., Any]:
    """Return the function `flash_attn_with_kvcache` of the first of MODULES that has it with all
    ARGUMENTS. Raises Unavailable, with a text that says what each module lacks, if none has."""
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


call = find()


class FlashAttention(PageRowsAttention):
    """Decoder attention with or without sliding windows and softcaps, in half precision.

    Sinks are not among its features: the library takes sinks only together with a window.
    """

    facts = AttentionFacts(
        page_sizes=(1, 16, 64),
        head_dims=(64, 128, 256),
        dtypes=("float16", "bfloat16"),
        features=frozenset({"sliding_window", "softcap", "mixed", "capture"}),
        takes_stored=True,
        library="mate",
    )

    @classmethod
    def unavailable(cls) -> str:
        """Return why the current GPU cannot run it; empty for capability 3.1 and newer."""
        found = musa().get_device_capability()
        return f"it needs a GPU of capability 3.1 or newer, this one has {found}" if found < CAPABILITY else ""

    def attend_pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: RowsPlan, layer: Attention) -> Tensor:
        """Implements `PageRowsAttention.attend_pages` with one call of the library: q [T, heads, D]
        attends causally over pages of keys and values, as the plan lists them -> [T, heads, D]."""
        left = window_left(layer.sliding_window)
        return call(
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
