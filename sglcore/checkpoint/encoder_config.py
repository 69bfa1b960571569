"""Translates configurations of encoders, of decoders without their output layer and of language
parts to the common names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglcore.core.errors import ConfigError

ENCODERS = frozenset(
    {
        *("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
        *("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
        *("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
        *("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    }
)
"""Architectures with bidirectional attention: each token also sees later tokens."""

CLASSIFIER = "ForSequenceClassification"
"""Suffix of architectures that pass pooled hidden states through a classification head."""


LANGUAGE_PARTS = (
    "VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
)
"""Suffixes of architectures that keep the language part's configuration in `text_config` in newer
files."""


def language_model(architecture: str) -> str:
    """Return the name of the same decoder with its output layer (`...ForCausalLM`), for one saved
    without it or with a classification head; any other name, also an encoder's, unchanged."""
    for end in (CLASSIFIER, "Model"):
        if architecture.endswith(end) and architecture not in ENCODERS:
            return architecture.removesuffix(end) + "ForCausalLM"
    return architecture


def common_words(architecture: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an architecture's own words translated to the common ones: only these words, none for
    an architecture that is not listed here. The file's words under the common names take
    precedence.

    - Vision-language models: the words in `text_config` of newer files.
    - ModernBERT: its layer types and rotary bases; its windows reach `local_attention` / 2 tokens
      to either side.
    - RoBERTa: its first position, which is the padding token's id + 1.
    - All encoders: their activation, if the file names none.
    """
    if architecture.endswith(LANGUAGE_PARTS):
        return {name: value for name, value in (raw.get("text_config") or {}).items() if value is not None}
    if "RobertaFor" in architecture or "RobertaModel" in architecture:
        return {"first_position": whole_number(raw, "pad_token_id", 1) + 1, "hidden_act": "gelu"}
    if not architecture.startswith("ModernBert"):
        return {"hidden_act": "gelu"} if architecture in ENCODERS else {}
    every, layers = (
        whole_number(raw, name, usual) for name, usual in (("global_attn_every_n_layers", 3), ("num_hidden_layers", 22))
    )
    return {
        "layer_types": ["sliding_attention" if layer % every else "full_attention" for layer in range(layers)],
        "sliding_window": whole_number(raw, "local_attention", 128) // 2 + 1,
        "hidden_act": "gelu",
        "rope_theta": raw.get("global_rope_theta", 160000.0),
        "rope_local_base_freq": raw.get("local_rope_theta", 10000.0),
    }


def whole_number(raw: Mapping[str, Any], name: str, usual: int) -> int:
    """Return an integer of a `config.json`, or the usual one if it is missing. Raises `ConfigError`
    for null and for another type."""
    found = raw.get(name, usual)
    if type(found) is not int:
        raise ConfigError(
            f"config.json has {name} = {found!r:.60}", wanted="a whole number", remedy="download the checkpoint again"
        )
    return found
