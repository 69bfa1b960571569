"""The feed-forward block of a decoder layer."""

from __future__ import annotations

import math

import mlx.core as mx

from sglcore_mlx.layers.scope import Scope


def silu_and_mul(gate_up: mx.array) -> mx.array:
    """[..., 2 I], gate and up side by side, to silu(gate) * up, [..., I]."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size], gate_up[..., size:]
    return gate * mx.sigmoid(gate) * up


def gelu(x: mx.array) -> mx.array:
    """GELU (Hendrycks and Gimpel 2016), exact."""
    return x * (1 + mx.erf(x * math.sqrt(0.5))) * 0.5


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    __slots__ = ("down_proj", "gate_up_proj")

    def __init__(self, build: Scope, intermediate_size: int, bias: bool = False) -> None:
        hidden_size = build.config.hidden_size
        names = (("gate_proj", intermediate_size), ("up_proj", intermediate_size))
        self.gate_up_proj = build.fused(names, hidden_size, bias)
        self.down_proj = build.linear("down_proj", intermediate_size, hidden_size, bias)

    def __call__(self, hidden: mx.array) -> mx.array:
        """[T, H] to [T, H]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
