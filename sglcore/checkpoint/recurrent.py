"""What a configuration says of layers that keep a state of each request, read from `config.json` as
it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.config import ModelConfig
from sglcore.device.errors import ConfigError

LINEAR, FULL, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
NAMES = MappingProxyType(
    {"mamba": LINEAR, "conv": LINEAR, "attention": FULL, "M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
)
"""What some files call the kinds of layers, or write as a letter for each."""


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Layers with the gated delta rule: heads and the sizes of their keys and values, and how many
    tokens, with their own, their convolution reaches over."""

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
    """Those of Qwen3-Next where the file says nothing. Raises `ConfigError` for heads that can not
    be grouped."""
    words = config.words
    found = DeltaNetConfig(
        words.get("linear_num_key_heads", 16),
        words.get("linear_num_value_heads", 32),
        words.get("linear_key_head_dim", 128),
        words.get("linear_value_head_dim", 128),
        words.get("linear_conv_kernel_dim", 4),
    )
    if found.value_heads % found.key_heads:
        raise ConfigError(
            f"{config.path / 'config.json'} gives {found.value_heads} value heads for {found.key_heads} key heads",
            wanted="a multiple",
        )
    return found


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Layers of Mamba 2. `mamba2_config` makes it."""

    heads: int
    """Heads."""
    head_dim: int
    """Elements of a head."""
    groups: int
    """Groups of heads that share the inputs and outputs of their states."""
    width: int
    """Elements of a state for each element of a head."""
    taps: int
    """Tokens over which the convolution reaches, with its own."""
    conv_bias: bool
    """The convolution has a bias."""
    proj_bias: bool
    """The projections have biases."""
    dt_min: float
    """The lower bound of a time step."""
    dt_max: float
    """The upper bound of a time step."""

    @property
    def inner(self) -> int:
        """Of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.groups * self.width


def mamba2_config(config: ModelConfig) -> Mamba2Config:
    """Those of Granite 4 where nothing is said. Raises `ConfigError` for heads that can not be
    grouped."""
    words = config.words
    heads, groups = words.get("mamba_n_heads", 128), words.get("mamba_n_groups", 1)
    size, (dt_min, dt_max) = words.get("mamba_d_head", "auto"), words.get("time_step_limit") or (0.0, float("inf"))
    if heads % groups:
        raise ConfigError(f"{config.path / 'config.json'} gives {heads} heads in {groups} groups", wanted="a multiple")
    return Mamba2Config(
        heads=heads,
        head_dim=words.get("mamba_expand", 2) * config.hidden_size // heads if size == "auto" else size,
        groups=groups,
        width=words.get("mamba_d_state", 256),
        taps=words.get("mamba_d_conv", 4),
        conv_bias=words.get("mamba_conv_bias", True),
        proj_bias=words.get("mamba_proj_bias", False),
        dt_min=_number(dt_min),
        dt_max=_number(dt_max),
    )


def _number(value: Any) -> float:
    """A number, or what transformers writes where JSON has none: {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


def layer_kinds(config: ModelConfig, known: Sequence[str] = (LINEAR, FULL)) -> tuple[str, ...]:
    """The kind of each layer: its own, or every so many layers full attention. Raises `ConfigError`
    for a kind that is not `known`."""
    words, layers = config.words, config.num_hidden_layers
    kinds = [NAMES.get(kind, kind) for kind in words.get("layer_types", ())] or [
        LINEAR if (layer + 1) % words.get("full_attention_interval", 4) else FULL for layer in range(layers)
    ]
    unknown = sorted(set(kinds) - set(known))
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"{config.path / 'config.json'} has {len(kinds)} layer_types, {', '.join(unknown) or 'all known'}",
            wanted=f"{layers}, each {' or '.join(known)}",
        )
    return tuple(kinds)
