"""What a configuration says of layers that keep a state of each request, read from `config.json` as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglcore.checkpoint.config import ModelConfig
from sglcore.device.errors import ConfigError

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Layers with the gated delta rule: heads and the sizes of their keys and values, and how many tokens, with their own,
    their convolution reaches over."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Of all heads."""
        return self.value_heads * self.value_dim


def delta_net_config(config: ModelConfig) -> DeltaNetConfig:
    """Those of Qwen3-Next where the file says nothing. Raises `ConfigError` for heads that can not be grouped."""
    raw = config.raw
    found = DeltaNetConfig(
        raw.get("linear_num_key_heads", 16),
        raw.get("linear_num_value_heads", 32),
        raw.get("linear_key_head_dim", 128),
        raw.get("linear_value_head_dim", 128),
        raw.get("linear_conv_kernel_dim", 4),
    )
    if found.value_heads % found.key_heads:
        raise ConfigError(
            f"{config.path / 'config.json'} gives {found.value_heads} value heads for {found.key_heads} key heads",
            wanted="a multiple",
        )
    return found


def layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """The kind of each layer: its own, or every so many layers full attention. Raises `ConfigError` for others."""
    raw, layers = config.raw, config.num_hidden_layers
    kinds = _given(raw) or [
        LINEAR if (layer + 1) % raw.get("full_attention_interval", 4) else FULL for layer in range(layers)
    ]
    unknown = sorted(set(kinds) - {LINEAR, FULL})
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"{config.path / 'config.json'} has {len(kinds)} layer_types, {', '.join(unknown) or 'all known'}",
            wanted=f"{layers}, each {LINEAR} or {FULL}",
        )
    return tuple(kinds)


def _given(raw: Mapping[str, Any]) -> list[str]:
    return list(raw.get("layer_types") or ())
