"""The language part of Qwen 2.5-VL (Bai et al. 2025) and Qwen 3-VL.

Image embeddings come with the prompt. Heads are rotated by three positions if the prompt has them
(mrope). The vision part is not read, nor are the features that it would add to later layers.
"""

from __future__ import annotations

from sglcore.models.architectures.qwen.qwen2 import Qwen2ForCausalLM
from sglcore.models.architectures.qwen.qwen3 import Qwen3ForCausalLM
from sglcore.models.decoder import CausalLM


class LanguagePart(CausalLM):
    """The decoder of a model with a vision part."""

    ignored = (r"model\.(visual|vision_tower)\..*",)

    @classmethod
    def own_name(cls, name: str) -> str:
        """Remove `language_model.` from a name.

        Newer files have it after `model.`, converted files before.
        """
        return super().own_name(name.removeprefix("language_model.")).replace("model.language_model.", "model.", 1)


class Qwen25VLForConditionalGeneration(LanguagePart, Qwen2ForCausalLM):
    """The decoder of Qwen 2.5-VL, with Qwen 2's layers."""


class Qwen3VLForConditionalGeneration(LanguagePart, Qwen3ForCausalLM):
    """The decoder of Qwen 3-VL, with Qwen 3's layers."""
