"""The MLP of a decoder layer, and activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import mlx.core as mx

from sglcore_mlx.layers.scope import Scope

GATE_AND_UP = ("gate_proj", "up_proj")


def silu_and_mul(gate_up: mx.array) -> mx.array:
    """Return silu(gate) * up, [..., I], of concatenated gate and up, [..., 2 I]."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size], gate_up[..., size:]
    return gate * mx.sigmoid(gate) * up


def gelu(x: mx.array) -> mx.array:
    """Return the exact GELU (Hendrycks and Gimpel 2016), elementwise, in x's shape and dtype."""
    return x * (1 + mx.erf(x * math.sqrt(0.5))) * 0.5


def gelu_tanh_and_mul(gate_up: mx.array) -> mx.array:
    """Return gelu(gate) * up, [..., I], of concatenated gate and up, [..., 2 I], with GELU's tanh
    approximation; 0.5 * (1 + tanh(z)) is computed in float32 as sigmoid(2 z)."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size], gate_up[..., size:]
    wide = gate.astype(mx.float32)
    turned = mx.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide))
    return (wide * turned).astype(gate.dtype) * up


def gelu_and_mul(gate_up: mx.array) -> mx.array:
    """Return gelu(gate) * up, [..., I], of concatenated gate and up, [..., 2 I], with the exact
    GELU."""
    size = gate_up.shape[-1] // 2
    return gelu(gate_up[..., :size]) * gate_up[..., size:]


def relu2(x: mx.array) -> mx.array:
    """Return max(x, 0)^2, elementwise."""
    return mx.square(mx.maximum(x, 0))


ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = MappingProxyType(
    {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul, "gelu": gelu_and_mul}
)


class GatedMlp:
    """A callable MLP, down(activation(gate(x)) * up(x)), with the activation that the configuration
    names: silu, gelu or gelu_pytorch_tanh. Making one raises KeyError for another."""

    __slots__ = ("_activate", "down_proj", "gate_up_proj")

    def __init__(self, build: Scope, intermediate_size: int, bias: bool = False, fused: str = "") -> None:
        """`fused`: the checkpoint's name of one weight with gate's rows, then up's; if it is empty
        or the checkpoint lacks it, as one written by mlx_lm may, `gate_proj` and `up_proj` are two
        weights."""
        hidden_size = build.config.hidden_size
        self._activate = ACTIVATIONS[build.config.hidden_act]
        is_fused = fused and build.weights.has(f"{build.prefix}{fused}.weight")
        names = [(fused, 2 * intermediate_size)] if is_fused else [(name, intermediate_size) for name in GATE_AND_UP]
        self.gate_up_proj = build.fused(names, hidden_size, bias)
        self.down_proj = build.linear("down_proj", intermediate_size, hidden_size, bias)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Map hidden states [T, H] to [T, H]."""
        return self.down_proj(self._activate(self.gate_up_proj(hidden)))
