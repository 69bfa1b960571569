"""Reads a checkpoint's configuration by transformers, for models that run on its classes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.checkpoint.config_types import KINDS, check_values
from sglcore.checkpoint.model_config import EMPTY, ModelConfig, RopeConfig, architecture_of, served
from sglcore.checkpoint.pooling_config import read_pooling
from sglcore.checkpoint.quantization_config import has_mxfp4_experts
from sglcore.core.errors import ConfigError
from sglcore.models.architecture_registry import ARCHITECTURES
from sglcore.models.checkpoint_code import CAUSAL

UNBOUNDED = 1 << 17
"""The context length of a model without positions."""
_READ = ("num_nextn_predict_layers", "num_labels", "id2label", "sentence_transformers", "classifier_pooling")
"""Keys that are read from the file itself, in addition to transformers' configuration."""


@dataclass(frozen=True, slots=True)
class Library:
    """The configuration from which transformers makes a checkpoint's model. `code`: the folder with
    the model's class; None: transformers has the class."""

    config: PreTrainedConfig
    code: Path | None = None

    def model(self, **options: Any) -> PreTrainedModel:
        """Make a new causal model without the checkpoint's weights; `options` go to the class, such
        as `dtype`. Raises the errors of its class."""
        config = deepcopy(self.config)  # the class writes into it
        if self.code is None:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        # Transformers' auto class would keep one model class for all folders with one configuration
        # class.
        found: Any = get_class_from_dynamic_module(config.auto_map[CAUSAL], self.code, local_files_only=True)
        return found._from_config(config, **options)


def transformers_config(folder: Path, task: str = "auto", runs_code: bool = False) -> ModelConfig:
    """Return the engine's configuration of a model. Heads, windows and positions are placeholders:
    the walk on the meta device (`shape_walk.walk`) finds them. `runs_code`: the classes are those
    in the folder, whose code runs. Raises `ConfigError` if transformers refuses the configuration,
    or if it has an unsupported option."""
    raw = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=runs_code)
    except Exception as error:
        raise ConfigError(
            f"transformers refuses {folder / 'config.json'}: {' '.join(str(error).split())}", remedy="use another model"
        ) from error
    _check(folder, raw, config, runs_code)
    config.__dict__.pop("quantization_config", None)  # the loader dequantises
    try:
        return described(folder, raw, Library(config, folder if runs_code else None), task)
    except AttributeError as error:
        raise ConfigError(f"{folder / 'config.json'} has no {error.name!r}", remedy="use another model") from error


def described(folder: Path, raw: Mapping[str, Any], library: Library, task: str) -> ModelConfig:
    """Return the engine's configuration for a `library` that was read. Raises `ConfigError` for a
    wrong value, AttributeError for a missing one."""
    config = library.config
    text = config.get_text_config(decoder=True)
    file = folder / "config.json"
    length = _length(file, text)
    return ModelConfig(
        path=folder,
        architecture=raw["architectures"][0],
        hidden_size=_whole(file, text, "hidden_size"),
        num_hidden_layers=_whole(file, text, "num_hidden_layers"),
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        intermediate_size=0,
        vocab_size=_whole(file, text, "vocab_size"),
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
        raw=MappingProxyType(dict(raw)),
        library=library,
    )


def _length(file: Path, text: PreTrainedConfig) -> int:
    """Return the longest context in tokens, from `max_position_embeddings` or `max_seq_len`;
    `UNBOUNDED` if the configuration has neither."""
    try:
        return _whole(file, text, "max_position_embeddings")
    except AttributeError:
        return _whole(file, text, "max_seq_len") if "max_seq_len" in text.to_dict() else UNBOUNDED


def _whole(file: Path, text: PreTrainedConfig, name: str) -> int:
    """Return a number that every model has. Raises `ConfigError`, with the model type's own name
    for it, for a wrong value, and AttributeError if it is missing."""
    value, own = getattr(text, name), text.attribute_map.get(name, name)
    wanted, is_right = KINDS[name]
    if not is_right(value):
        raise ConfigError(f"{file} has {own} = {value!r:.60}", wanted=wanted, remedy="download the checkpoint again")
    return value


def _check(folder: Path, raw: Mapping[str, Any], config: PreTrainedConfig, runs_code: bool) -> None:
    """Raise `ConfigError` for options that transformers' classes apply to a whole batch instead of
    each request, and for an unsupported architecture or format."""
    file = folder / "config.json"
    check_values(file, {name: raw.get(name) for name in _READ})
    name = architecture_of(file, raw)
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "none")
    if runs_code:
        known = raw["auto_map"][CAUSAL].rpartition(".")[2]
    if name != known:
        raise ConfigError(
            f"the architecture {name!r} is not supported: the language model of type {config.model_type!r} is {known}",
            wanted=f"that, or {served(name, ARCHITECTURES)}",
            remedy="use another model",
        )
    text = config.get_text_config(decoder=True)
    found = text.to_dict().get("rope_parameters")
    ropes = found if isinstance(found, Mapping) else EMPTY
    kinds = {str(each.get("rope_type")) for each in (ropes, *ropes.values()) if isinstance(each, Mapping)}
    for kind in sorted(kinds & {"dynamic", "longrope"}):
        raise ConfigError(
            f"{file} has the rope type {kind!r}, with which transformers rotates a whole batch as its longest "
            "request needs",
            remedy="use a model that sglcore implements (docs/models.md)",
        )
    if text.to_dict().get("attn_temperature_tuning"):
        raise ConfigError(
            f"{file} has attn_temperature_tuning, for which transformers counts the tokens of a step instead of "
            "a request's",
            remedy="use another model",
        )
    if has_mxfp4_experts(raw):
        raise ConfigError(
            f"{folder} has experts in mxfp4, which are read only for models that sglcore implements",
            remedy="leave --model-impl out, or use the plain version of this model",
        )
