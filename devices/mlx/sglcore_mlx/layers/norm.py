"""Normalisation layers."""

from __future__ import annotations

import mlx.core as mx

from sglcore_mlx.layers.scope import Scope


class RMSNorm:
    """RMS norm with a weight [size] (Zhang and Sennrich 2019)."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, build: Scope, size: int, eps: float, offset: float | None = None) -> None:
        """`offset`: added to the weight, which is then kept in float32; None: the weight as it
        is."""
        self._weight = build.parameter("weight", size, offset=offset)
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise the last dimension of x [..., size]; return x's shape and dtype. With a float32
        weight it is computed in float32, as `mx.fast.rms_norm` does."""
        return mx.fast.rms_norm(x, self._weight, self._eps).astype(x.dtype)

    def add(self, x: mx.array, residual: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return the norm of residual + x, and the sum, both in x's shape. Without a residual the
        sum is x."""
        total = x if residual is None else residual + x
        return self(total), total


class HeadNorm:
    """RMS norm of each query head and each key head, in one call: one weight [head_dim] for all
    query heads, one for all key heads."""

    __slots__ = ("_eps", "_heads", "_weight")

    def __init__(self, build: Scope, offset: float | None = None) -> None:
        """`offset`: added to the weights, which are then kept in float32; None: the weights as they
        are."""
        config, weights = build.config, build.weights
        self._heads = config.num_attention_heads
        dtype = None if offset is None else mx.float32
        q, k = (weights.take(f"{build.prefix}{x}_norm.weight", config.head_dim, dtype=dtype) for x in "qk")
        weight = mx.stack([q] * config.num_attention_heads + [k] * config.num_key_value_heads)
        self._weight = weights.keep(weight + offset if offset and not weights.has_offsets else weight)
        self._eps = config.rms_norm_eps

    def __call__(self, heads: mx.array) -> mx.array:
        """Return the normalised heads [T, heads + kv_heads, D], of the same shape: queries first,
        then keys."""
        return self._normed(heads, self._weight)

    def keys(self, keys: mx.array) -> mx.array:
        """Return keys [T, kv_heads, D], normalised."""
        return self._normed(keys, self._weight[self._heads :])

    def _normed(self, heads: mx.array, weight: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(heads.astype(weight.dtype), None, self._eps) * weight
        return normed.astype(heads.dtype)


class WholeNorm:
    """One RMS norm over all query heads together, and one over all key heads, with separate
    weights."""

    __slots__ = ("_heads", "_k", "_q")

    def __init__(self, build: Scope, offset: float | None = None) -> None:
        """`offset`: added to the weights, which are then kept in float32; None: the weights as they
        are."""
        config = build.config
        self._heads = config.num_attention_heads
        self._q, self._k = (
            RMSNorm(build.at(name), count * config.head_dim, config.rms_norm_eps, offset)
            for name, count in (("q_norm", config.num_attention_heads), ("k_norm", config.num_key_value_heads))
        )

    def __call__(self, heads: mx.array) -> mx.array:
        """Return the normalised heads [T, heads + kv_heads, D], of the same shape: queries first,
        then keys."""
        both = mx.split(heads, [self._heads], axis=1)
        parts = [
            norm(part.reshape(part.shape[0], part.shape[1] * part.shape[2])).reshape(part.shape)
            for norm, part in zip((self._q, self._k), both, strict=True)
        ]
        return mx.concatenate(parts, axis=1)

    def keys(self, keys: mx.array) -> mx.array:
        """Return keys [T, kv_heads, D], normalised."""
        return self._k(keys.reshape(keys.shape[0], -1)).reshape(keys.shape)


class GatedNorm:
    """RMS norm of each group; silu(gate) is applied before it (Mamba 2) or after it (Gated Delta
    Networks)."""

    __slots__ = ("_eps", "_gate_first", "_weight")

    def __init__(self, build: Scope, groups: int, size: int, *, gate_first: bool) -> None:
        """Take the weight [groups * size]; the input width can be a multiple of it. `gate_first`:
        apply the gate before the norm."""
        self._weight = build.parameter("weight", groups * size).reshape(groups, size)
        self._eps = build.config.rms_norm_eps
        self._gate_first = gate_first

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        """Map x and gate [T, width] to [T, width], in x's dtype."""
        (groups, size), (tokens, width) = self._weight.shape, x.shape
        wide = gate.astype(mx.float32)
        opened = wide * mx.sigmoid(wide)
        wide = x.astype(mx.float32) * opened if self._gate_first else x.astype(mx.float32)
        grouped = wide.reshape(tokens, width // (groups * size), groups, size)
        normed = self._rms(grouped).astype(x.dtype)
        out = (self._weight * normed).reshape(tokens, width)
        return out if self._gate_first else (out * opened).astype(x.dtype)

    def _rms(self, grouped: mx.array) -> mx.array:
        """Return float32 [..., groups, size] divided by the root mean square of each group."""
        return mx.fast.rms_norm(grouped, None, self._eps)


class LayerNorm:
    """Layer norm with a weight and an optional bias, [size] (Ba et al. 2016)."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, build: Scope, size: int, eps: float, bias: bool = True) -> None:
        self._weight = build.parameter("weight", size)
        self._bias = build.parameter("bias", size) if bias else None
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise the last dimension of [T, size]."""
        return mx.fast.layer_norm(x, self._weight, self._bias, self._eps)
