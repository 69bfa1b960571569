"""Maps architectures to their classes. Imports no class until a model needs it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from sglcore.checkpoint.config import check_architecture

if TYPE_CHECKING:
    from sglcore.models.build import Architecture

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": "sglcore.models.deepseek_v2:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": "sglcore.models.deepseek_v3:DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM": "sglcore.models.deepseek_v3:DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM": "sglcore.models.deepseek_v4:DeepseekV4ForCausalLM",
        "GemmaForCausalLM": "sglcore.models.gemma:GemmaForCausalLM",
        "Gemma2ForCausalLM": "sglcore.models.gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "sglcore.models.gemma3:Gemma3ForCausalLM",
        "GptOssForCausalLM": "sglcore.models.gpt_oss:GptOssForCausalLM",
        "GraniteForCausalLM": "sglcore.models.granite:GraniteForCausalLM",
        "GraniteMoeHybridForCausalLM": "sglcore.models.granite_hybrid:GraniteMoeHybridForCausalLM",
        "GraniteMoeForCausalLM": "sglcore.models.granite_moe:GraniteMoeForCausalLM",
        "Olmo2ForCausalLM": "sglcore.models.olmo2:Olmo2ForCausalLM",
        "Olmo3ForCausalLM": "sglcore.models.olmo3:Olmo3ForCausalLM",
        "Phi3ForCausalLM": "sglcore.models.phi3:Phi3ForCausalLM",
        "LlamaForCausalLM": "sglcore.models.llama:LlamaForCausalLM",
        "GlmForCausalLM": "sglcore.models.glm:GlmForCausalLM",
        "Glm4ForCausalLM": "sglcore.models.glm4:Glm4ForCausalLM",
        "Glm4MoeForCausalLM": "sglcore.models.glm4_moe:Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM": "sglcore.models.deepseek_v3:DeepseekV3ForCausalLM",
        "GlmMoeDsaForCausalLM": "sglcore.models.deepseek_v3:GlmMoeDsaForCausalLM",
        "MixtralForCausalLM": "sglcore.models.mixtral:MixtralForCausalLM",
        "Qwen2MoeForCausalLM": "sglcore.models.qwen2_moe:Qwen2MoeForCausalLM",
        "MiMoForCausalLM": "sglcore.models.qwen2:MiMoForCausalLM",
        "MistralForCausalLM": "sglcore.models.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "sglcore.models.qwen2:Qwen2ForCausalLM",
        "Qwen3NextForCausalLM": "sglcore.models.qwen3_next:Qwen3NextForCausalLM",
        "Qwen3ForCausalLM": "sglcore.models.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "sglcore.models.qwen3_moe:Qwen3MoeForCausalLM",
        "Lfm2ForCausalLM": "sglcore.models.lfm2:Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM": "sglcore.models.lfm2_moe:Lfm2MoeForCausalLM",
        "NemotronHForCausalLM": "sglcore.models.nemotron_h:NemotronHForCausalLM",
        "Qwen3_5ForCausalLM": "sglcore.models.qwen3_5:Qwen35ForCausalLM",
        "Qwen3_5ForConditionalGeneration": "sglcore.models.qwen3_5:Qwen35ForCausalLM",
        "Qwen3_5MoeForCausalLM": "sglcore.models.qwen3_5:Qwen35ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration": "sglcore.models.qwen3_5:Qwen35ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration": "sglcore.models.qwen_vl:Qwen25VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration": "sglcore.models.qwen_vl:Qwen3VLForConditionalGeneration",
        "LlamaForSequenceClassification": "sglcore.models.llama:LlamaForCausalLM",
        "MistralForSequenceClassification": "sglcore.models.mistral:MistralForCausalLM",
        "Qwen2ForSequenceClassification": "sglcore.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForSequenceClassification": "sglcore.models.qwen3:Qwen3ForCausalLM",
        "LlamaModel": "sglcore.models.llama:LlamaForCausalLM",
        "MistralModel": "sglcore.models.mistral:MistralForCausalLM",
        "Qwen2Model": "sglcore.models.qwen2:Qwen2ForCausalLM",
        "Qwen3Model": "sglcore.models.qwen3:Qwen3ForCausalLM",
        "BertModel": "sglcore.models.bert:BertModel",
        "BertForMaskedLM": "sglcore.models.bert:BertModel",
        "BertForSequenceClassification": "sglcore.models.bert:BertModel",
        "RobertaModel": "sglcore.models.roberta:RobertaModel",
        "RobertaForMaskedLM": "sglcore.models.roberta:RobertaModel",
        "RobertaForSequenceClassification": "sglcore.models.roberta:RobertaModel",
        "XLMRobertaModel": "sglcore.models.roberta:RobertaModel",
        "XLMRobertaForMaskedLM": "sglcore.models.roberta:RobertaModel",
        "XLMRobertaForSequenceClassification": "sglcore.models.roberta:RobertaModel",
        "ModernBertModel": "sglcore.models.modernbert:ModernBertModel",
        "ModernBertForMaskedLM": "sglcore.models.modernbert:ModernBertModel",
        "ModernBertForSequenceClassification": "sglcore.models.modernbert:ModernBertModel",
    }
)
"""The architectures of this package, by the name in `config.json`."""


def model_class(architecture: str, extra: Mapping[str, str] = MappingProxyType({})) -> type[Architecture]:
    """Import the class of an architecture; entries of `extra` override the built-in ones. Raises
    `ConfigError` for an unknown name, and the errors of the import."""
    known = {**ARCHITECTURES, **extra}
    check_architecture(architecture, known)
    module, _, name = known[architecture].partition(":")
    return cast("type[Architecture]", getattr(import_module(module), name))
