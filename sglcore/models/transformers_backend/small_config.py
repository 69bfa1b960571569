"""Shrinks a configuration of transformers: fewer layers, heads, experts and tokens, but every kind
of layer.

Sizes are recognised by their names; everything else stays. The result is checked on the models:
every layer of the whole model, described by the classes and options in it, must occur in the small
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from sglcore.core.errors import ConfigError
from sglcore.models.transformers_backend.transformers_config import Library

PARAMETERS = 80_000_000
"""The most parameters of a small model."""
_SMALL = 4_000_000
"""A model with no more parameters is not shrunk."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "mamba_n_heads",
    "mamba_num_heads",
)
_HEADS += ("n_mamba_heads", "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads")
_WIDTHS = (
    "hidden_size",
    "n_embd",
    "d_model",
    "embed_dim",
    "word_embed_proj_dim",
    "mamba_d_ssm",
    "lru_width",
    "conv_dim",
)
_WIDTHS += ("block_dim", "attention_hidden_size", "embedding_size")
_INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "dff", "block_ff_dim", "mlp_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = (
    "num_experts_per_tok",
    "top_k_experts",
    "moe_topk",
    "moe_k",
    "num_experts_per_token",
    "n_group",
    "num_expert_group",
)
_GROUPS = ("n_groups", "mamba_n_groups")
_SHARED = ("num_kv_shared_layers",)
_WINDOWS = ("sliding_window", "window_size", "attention_window_size")
"""Sliding windows, shortened so that they matter in short texts."""
LEAST_HEADS, LEAST_WIDTH, INNER, WINDOW, WORDS = 4, 64, 128, 6, 512


def shrunk(library: Library) -> Library:
    """Return a small configuration with the same options; `library` itself if its model is small
    already. Raises `ConfigError` if none is found.
    """
    whole = _empty(library)
    if _count(whole) <= _SMALL:
        return library
    kinds, values = set(_kinds(whole)), library.config.to_dict()
    said = ""
    for layers in (4, 8, 16, 32, 64, 128):
        try:
            config = type(library.config).from_dict(_smaller(values, layers))
            model = _empty(small := Library(config, library.code))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            continue
        missing, count = kinds - set(_kinds(model)), _count(model)
        said = f"with {layers} layers it has {count} parameters, and {len(missing)} kinds of layers are missing"
        if count > PARAMETERS:
            break
        if not missing:
            return small
    raise ConfigError(
        f"no small model like {library.config.model_type!r} was found to compare: {said}", remedy="use another model"
    )


def _empty(library: Library) -> PreTrainedModel:
    with torch.device("meta"), no_init_weights():
        return library.model(dtype=torch.float32)


def _count(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _smaller(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a configuration's values with small sizes and at most `layers` layers, also in nested
    configurations.
    """
    depth = next((values[name] for name in _LAYERS if _is_size(values.get(name))), layers)
    divisor, made = _divisor(values), {}
    for name, value in values.items():
        match value:
            case {"model_type": _}:
                made[name] = _smaller(value, layers)
            case dict():
                made[name] = {key: each for key, each in value.items() if not str(key).isdigit() or int(key) < layers}
            case list():
                kept = value[:layers] if len(value) == depth else value
                made[name] = [_size(name, each, values, divisor) for each in kept]
            case _:
                made[name] = _size(name, value, values, divisor)
    return made | {name: min(layers, values[name]) for name in _LAYERS if _is_size(values.get(name))}


def _size(name: str, value: Any, values: Mapping[str, Any], divisor: int) -> Any:
    if "token_id" in name and _is_size(value):
        return value % WORDS
    if not _is_size(value):
        return value
    if name in _HEADS or name in _WIDTHS:
        return value // divisor
    if name in _KV_HEADS:
        return _kv_heads(value, values, divisor)
    if name in _SHARED:
        return value // 2
    if name.endswith(_INNER):
        return min(value, INNER)
    if name in _EXPERTS:
        return _experts(value, values)
    if name in _WINDOWS:
        return min(value, WINDOW)
    return min(value, WORDS) if "vocab_size" in name else value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _divisor(values: Mapping[str, Any]) -> int:
    """Return the greatest divisor of all heads and widths that leaves at least `LEAST_HEADS` heads,
    a head for each group, and `LEAST_WIDTH` elements; 1 if there is none.
    """
    heads = [values[name] for name in _HEADS if _is_size(values.get(name))]
    widths = [values[name] for name in _WIDTHS if _is_size(values.get(name))]
    least = max([LEAST_HEADS, *(values[name] for name in _GROUPS if _is_size(values.get(name)))])
    most = min((*(each // least for each in heads), *(each // LEAST_WIDTH for each in widths)), default=1)
    return next((by for by in range(most, 1, -1) if not any(each % by for each in (*heads, *widths))), 1)


def _kv_heads(count: int, values: Mapping[str, Any], divisor: int) -> int:
    """Return the number of KV heads: equal to the heads if it was, else 2, or 1 if a number of
    heads is odd."""
    heads = {values[name] for name in _HEADS if _is_size(values.get(name))}
    if count in heads:
        return count // divisor
    return min(count, 1 if any(each // divisor % 2 for each in heads) else 2)


def _experts(count: int, values: Mapping[str, Any]) -> int:
    """Return the least divisor of `count` that is at least 4 and at least twice the experts of a
    token and the groups; `count` itself if there is none.
    """
    least = max([4, *(2 * values[name] for name in _CHOSEN if _is_size(values.get(name)))])
    return next(size for size in range(min(least, count), count + 1) if count % size == 0)


def _kinds(model: PreTrainedModel) -> Iterator[object]:
    """Yield a hashable description of each of a model's layers (members of module lists)."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from map(_kind, module)


def _kind(module: nn.Module) -> object:
    """Return a hashable description of a module: its class, its attributes that are texts, booleans
    or None, the names of its tensors, and its submodules.
    """
    chosen = ((name, value) for name, value in vars(module).items() if value is None or isinstance(value, str | bool))
    tensors = ((name, value is None) for name, value in (*module._parameters.items(), *module._buffers.items()))
    return type(module), tuple(chosen), tuple(tensors), _parts(module.named_children())


def _parts(children: Iterable[tuple[str, nn.Module]]) -> object:
    return tuple(
        (name, frozenset(map(_kind, child)) if isinstance(child, nn.ModuleList) else _kind(child))
        for name, child in children
    )
