"""A checkpoint's configuration as transformers reads it, for models that run by its classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sglcore.checkpoint.config import EMPTY, ModelConfig, RopeConfig
from sglcore.checkpoint.files import read_json
from sglcore.checkpoint.pooling import read_pooling
from sglcore.device.errors import ConfigError
from sglcore.models.registry import ARCHITECTURES

UNBOUNDED = 1 << 17
"""The context of a model that has no positions."""


def transformers_config(folder: Path, task: str = "auto") -> ModelConfig:
    """What the engine asks of a model's configuration. Heads, windows and positions are not in it: the model itself tells
    them. Raises `ConfigError` for what transformers refuses, remote code among it."""
    raw = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, LookupError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(
            f"transformers refuses {folder / 'config.json'}: {' '.join(str(error).split())}", remedy="use another model"
        ) from error
    text = config.get_text_config(decoder=True)
    _check(folder, config, text)
    length = _length(text)
    return ModelConfig(
        path=folder,
        architecture=raw["architectures"][0],
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        intermediate_size=0,
        vocab_size=text.vocab_size,
        max_position_embeddings=length,
        context_length=length,
        rms_norm_eps=0.0,
        rope=RopeConfig(0.0, "default", 1.0, length, EMPTY),
        sliding_windows=(),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        attention_bias=False,
        mlp_bias=False,
        hidden_act="",
        dtype=str(text.dtype or "float32").removeprefix("torch."),
        moe=None,
        pooling=read_pooling(folder, raw["architectures"][0], raw, task),
        raw=MappingProxyType(raw),
        library=config,
    )


def _length(text: PreTrainedConfig) -> int:
    """The longest context."""
    try:
        return int(text.max_position_embeddings)
    except AttributeError:
        return UNBOUNDED


def _check(folder: Path, config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Raise `ConfigError` for what transformers' classes would do otherwise in a batch than alone."""
    known, name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type], (config.architectures or [""])[0]
    if name != known:
        raise ConfigError(
            f"the architecture {name!r} is not supported: transformers' language model of type {config.model_type!r} is "
            f"{known}",
            wanted=f"that, or one of {', '.join(sorted(ARCHITECTURES))}",
            remedy="use another model",
        )
    ropes = text.to_dict().get("rope_parameters") or {}
    kinds = {str(each.get("rope_type")) for each in (ropes, *ropes.values()) if isinstance(each, Mapping)}
    for kind in sorted(kinds & {"dynamic", "longrope"}):
        raise ConfigError(
            f"{folder / 'config.json'} has the rope type {kind!r}, by which transformers turns a whole batch as its longest "
            "request wants",
            remedy="use a model with a file of sglcore (docs/models.md)",
        )
    if config.to_dict().get("quantization_config"):
        raise ConfigError(
            f"{folder} is quantised, and quantised weights are read for models with a file of sglcore",
            remedy="use the plain version of this model, with --quantize if it is to be small",
        )
