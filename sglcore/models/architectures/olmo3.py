"""OLMo 3: OLMo 2 with sliding windows in three of four layers, which have unscaled rotary."""

from __future__ import annotations

from typing import ClassVar

from sglcore.models.architectures.olmo2 import Olmo2ForCausalLM


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 2's layers; `rope_local_base_freq` is the rotary base of those with a sliding window."""

    knows: ClassVar[frozenset[str]] = frozenset({"rope_local_base_freq"})
