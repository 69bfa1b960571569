"""Which class runs which architecture. Imports nothing; a reference is imported when a model of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, cast

from sglcore.checkpoint.config import check_architecture

if TYPE_CHECKING:
    from sglcore_mlx.layers.build import Build
    from sglcore_mlx.models.contract import Model


class ModelClass(Protocol):
    """What an architecture's reference names.

    `ignored` are patterns of checkpoint names that this model leaves unread; `stripped` is a prefix that a checkpoint's
    names may have before ours.
    """

    ignored: tuple[str, ...]
    stripped: str

    def __call__(self, build: Build) -> Model:
        """Build the model; its weights are not read yet."""
        ...


ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "sglcore_mlx.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "sglcore_mlx.models.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "sglcore_mlx.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "sglcore_mlx.models.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "sglcore_mlx.models.qwen3_moe:Qwen3MoeForCausalLM",
        "BertModel": "sglcore_mlx.models.bert:BertModel",
        "BertForMaskedLM": "sglcore_mlx.models.bert:BertModel",
    }
)
"""The architectures of this package, by the name in `config.json`."""


def model_class(architecture: str) -> ModelClass:
    """Import the class of an architecture; raises `ConfigError` for an unknown name, and what the import raises."""
    check_architecture(architecture, ARCHITECTURES)
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return cast("ModelClass", getattr(import_module(module), name))
