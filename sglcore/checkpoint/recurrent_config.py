"""Configuration of layers with a recurrent state for each request, read from `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.core.errors import ConfigError

LINEAR, FULL, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
NAMES = MappingProxyType(
    {"mamba": LINEAR, "conv": LINEAR, "attention": FULL, "M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
)
"""Names or letters for the kinds of layers in some files."""


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Layers with the gated delta rule: numbers of key and value heads, elements of one head
    (`key_dim`, `value_dim`), and `taps`, the tokens that their convolution reads, the current one
    included. `gate`: the activation of the norm's gate, "silu" or "sigmoid"."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    gate: str = "silu"

    @property
    def keys(self) -> int:
        """Elements of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all value heads."""
        return self.value_heads * self.value_dim


def delta_net_config(config: ModelConfig) -> DeltaNetConfig:
    """Return the configuration; defaults are those of Qwen3-Next. Raises `ConfigError` if the value
    heads are no multiple of the key heads."""
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
            f"{config.file} gives {found.value_heads} value heads for {found.key_heads} key heads",
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
    """Tokens that the convolution reads, the current one included."""
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
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.width


def mamba2_config(config: ModelConfig) -> Mamba2Config:
    """Return the configuration; defaults are those of Granite 4. Raises `ConfigError` for heads
    that can not be grouped."""
    words = config.words
    heads, groups = words.get("mamba_n_heads", 128), words.get("mamba_n_groups", 1)
    size, (dt_min, dt_max) = words.get("mamba_d_head", "auto"), words.get("time_step_limit") or (0.0, float("inf"))
    if heads % groups:
        raise ConfigError(f"{config.file} gives {heads} heads in {groups} groups", wanted="a multiple")
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
    """Return a number, also from transformers' form of numbers that JSON lacks: {"__float__":
    "Infinity"}."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


def layer_kinds(config: ModelConfig, known: Sequence[str] = (LINEAR, FULL)) -> tuple[str, ...]:
    """Return the kind of each layer, from `layer_types` with the names of `NAMES` translated;
    without it, full attention in each `full_attention_interval`-th layer and linear attention in
    the others. Raises `ConfigError` for a kind that is not `known`, or a wrong number of kinds."""
    words, layers = config.words, config.num_hidden_layers
    kinds = [NAMES.get(kind, kind) for kind in words.get("layer_types", ())] or [
        LINEAR if (layer + 1) % words.get("full_attention_interval", 4) else FULL for layer in range(layers)
    ]
    unknown = sorted(set(kinds) - set(known))
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"{config.file} has {len(kinds)} layer_types, {', '.join(unknown) or 'all known'}",
            wanted=f"{layers}, each {' or '.join(known)}",
        )
    return tuple(kinds)
