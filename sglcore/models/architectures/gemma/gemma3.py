"""Gemma 3, text: Gemma 2's layers with norms of query and key heads, and another rotary base in
sliding-window layers."""

from __future__ import annotations

from typing import ClassVar

from sglcore.models.architectures.gemma.gemma2 import Gemma2ForCausalLM


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with a norm for each query and key head, and without a soft cap on scores."""

    knows: ClassVar[frozenset[str]] = frozenset(
        {"query_pre_attn_scalar", "final_logit_softcapping", "rope_local_base_freq"}
    )
    qk_norm: ClassVar[bool] = True
