"""Maps architectures to their classes. Imports no class until a model needs it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from sglcore.checkpoint.model_config import check_architecture

if TYPE_CHECKING:
    from sglcore.models.layer_kinds import Architecture

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": "sglcore.models.architectures.deepseek.deepseek_v2:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": "sglcore.models.architectures.deepseek.deepseek_v3:DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM": "sglcore.models.architectures.deepseek.deepseek_v3:DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM": "sglcore.models.architectures.deepseek.deepseek_v4:DeepseekV4ForCausalLM",
        "GemmaForCausalLM": "sglcore.models.architectures.gemma.gemma:GemmaForCausalLM",
        "Gemma2ForCausalLM": "sglcore.models.architectures.gemma.gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "sglcore.models.architectures.gemma.gemma3:Gemma3ForCausalLM",
        "GptOssForCausalLM": "sglcore.models.architectures.gpt_oss:GptOssForCausalLM",
        "GraniteForCausalLM": "sglcore.models.architectures.granite.granite:GraniteForCausalLM",
        "GraniteMoeHybridForCausalLM": (
            "sglcore.models.architectures.granite.granite_hybrid:GraniteMoeHybridForCausalLM"
        ),
        "GraniteMoeForCausalLM": "sglcore.models.architectures.granite.granite_moe:GraniteMoeForCausalLM",
        "Olmo2ForCausalLM": "sglcore.models.architectures.olmo2:Olmo2ForCausalLM",
        "Olmo3ForCausalLM": "sglcore.models.architectures.olmo3:Olmo3ForCausalLM",
        "Phi3ForCausalLM": "sglcore.models.architectures.phi3:Phi3ForCausalLM",
        "LlamaForCausalLM": "sglcore.models.architectures.llama:LlamaForCausalLM",
        "GlmForCausalLM": "sglcore.models.architectures.glm.glm:GlmForCausalLM",
        "Glm4ForCausalLM": "sglcore.models.architectures.glm.glm4:Glm4ForCausalLM",
        "Glm4MoeForCausalLM": "sglcore.models.architectures.glm.glm4_moe:Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM": "sglcore.models.architectures.deepseek.deepseek_v3:DeepseekV3ForCausalLM",
        "GlmMoeDsaForCausalLM": "sglcore.models.architectures.deepseek.deepseek_v3:GlmMoeDsaForCausalLM",
        "MixtralForCausalLM": "sglcore.models.architectures.mixtral:MixtralForCausalLM",
        "Qwen2MoeForCausalLM": "sglcore.models.architectures.qwen.qwen2_moe:Qwen2MoeForCausalLM",
        "MiMoForCausalLM": "sglcore.models.architectures.qwen.qwen2:MiMoForCausalLM",
        "MistralForCausalLM": "sglcore.models.architectures.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "sglcore.models.architectures.qwen.qwen2:Qwen2ForCausalLM",
        "Qwen3NextForCausalLM": "sglcore.models.architectures.qwen.qwen3_next:Qwen3NextForCausalLM",
        "Qwen3ForCausalLM": "sglcore.models.architectures.qwen.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "sglcore.models.architectures.qwen.qwen3_moe:Qwen3MoeForCausalLM",
        "Lfm2ForCausalLM": "sglcore.models.architectures.lfm2:Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM": "sglcore.models.architectures.lfm2_moe:Lfm2MoeForCausalLM",
        "NemotronHForCausalLM": "sglcore.models.architectures.nemotron_h:NemotronHForCausalLM",
        "Qwen3_5ForCausalLM": "sglcore.models.architectures.qwen.qwen3_5:Qwen35ForCausalLM",
        "Qwen3_5ForConditionalGeneration": "sglcore.models.architectures.qwen.qwen3_5:Qwen35ForCausalLM",
        "Qwen3_5MoeForCausalLM": "sglcore.models.architectures.qwen.qwen3_5:Qwen35ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration": "sglcore.models.architectures.qwen.qwen3_5:Qwen35ForCausalLM",
        "Qwen4ExpForCausalLM": "sglcore.models.architectures.qwen.qwen4_exp:Qwen4ExpForCausalLM",
        "Qwen4ExpForConditionalGeneration": "sglcore.models.architectures.qwen.qwen4_exp:Qwen4ExpForCausalLM",
        "Qwen2_5_VLForConditionalGeneration": (
            "sglcore.models.architectures.qwen.qwen_vl:Qwen25VLForConditionalGeneration"
        ),
        "Qwen3VLForConditionalGeneration": "sglcore.models.architectures.qwen.qwen_vl:Qwen3VLForConditionalGeneration",
        "LlamaForSequenceClassification": "sglcore.models.architectures.llama:LlamaForCausalLM",
        "MistralForSequenceClassification": "sglcore.models.architectures.mistral:MistralForCausalLM",
        "Qwen2ForSequenceClassification": "sglcore.models.architectures.qwen.qwen2:Qwen2ForCausalLM",
        "Qwen3ForSequenceClassification": "sglcore.models.architectures.qwen.qwen3:Qwen3ForCausalLM",
        "LlamaModel": "sglcore.models.architectures.llama:LlamaForCausalLM",
        "MistralModel": "sglcore.models.architectures.mistral:MistralForCausalLM",
        "Qwen2Model": "sglcore.models.architectures.qwen.qwen2:Qwen2ForCausalLM",
        "Qwen3Model": "sglcore.models.architectures.qwen.qwen3:Qwen3ForCausalLM",
        "BertModel": "sglcore.models.architectures.encoders.bert:BertModel",
        "BertForMaskedLM": "sglcore.models.architectures.encoders.bert:BertModel",
        "BertForSequenceClassification": "sglcore.models.architectures.encoders.bert:BertModel",
        "RobertaModel": "sglcore.models.architectures.encoders.roberta:RobertaModel",
        "RobertaForMaskedLM": "sglcore.models.architectures.encoders.roberta:RobertaModel",
        "RobertaForSequenceClassification": "sglcore.models.architectures.encoders.roberta:RobertaModel",
        "XLMRobertaModel": "sglcore.models.architectures.encoders.roberta:RobertaModel",
        "XLMRobertaForMaskedLM": "sglcore.models.architectures.encoders.roberta:RobertaModel",
        "XLMRobertaForSequenceClassification": "sglcore.models.architectures.encoders.roberta:RobertaModel",
        "ModernBertModel": "sglcore.models.architectures.encoders.modernbert:ModernBertModel",
        "ModernBertForMaskedLM": "sglcore.models.architectures.encoders.modernbert:ModernBertModel",
        "ModernBertForSequenceClassification": "sglcore.models.architectures.encoders.modernbert:ModernBertModel",
    }
)
"""The architectures of this package, by the name in `config.json`."""


def model_class(architecture: str, extra: Mapping[str, str] = MappingProxyType({})) -> type[Architecture]:
    """Import the class of an architecture; entries of `extra`, name to `module:class`, override the
    built-in ones. Raises `ConfigError` for an unknown name, and the errors of the import."""
    known = {**ARCHITECTURES, **extra}
    check_architecture(architecture, known)
    module, _, name = known[architecture].partition(":")
    return cast("type[Architecture]", getattr(import_module(module), name))
