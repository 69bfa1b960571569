"""Norms over elements that several ranks hold."""

from __future__ import annotations

import mlx.core as mx

from sglcore_mlx.layers.norm import GatedNorm, RMSNorm, WholeNorm
from sglcore_mlx.layers.scope import Scope
from sglcore_mlx.parallel.ranks import Ranks


class SharedNorm(RMSNorm):
    """RMS norm over a row that all ranks hold together, a part of the same size each; several ranks
    may hold the same part."""

    __slots__ = ("_ranks",)

    def __init__(self, build: Scope, size: int, eps: float, offset: float | None, ranks: Ranks) -> None:
        """`size`: elements of this rank's part."""
        super().__init__(build, size, eps, offset)
        self._ranks = ranks

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise this rank's part x [T, size] of rows; returns x's shape and dtype."""
        wide = x.astype(mx.float32)
        means = self._ranks.summed(mx.mean(wide * wide, axis=-1, keepdims=True)) / self._ranks.size
        return (wide * mx.rsqrt(means + self._eps) * self._weight).astype(x.dtype)


class SharedWholeNorm(WholeNorm):
    """`WholeNorm` over the heads of all ranks."""

    __slots__ = ()

    def __init__(self, build: Scope, offset: float | None = None, *, ranks: Ranks) -> None:
        """`build.config` has the heads of this rank."""
        config = build.config
        self._heads = config.num_attention_heads
        self._q, self._k = (
            SharedNorm(build.at(name), count * config.head_dim, config.rms_norm_eps, offset, ranks)
            for name, count in (("q_norm", config.num_attention_heads), ("k_norm", config.num_key_value_heads))
        )


class SharedGatedNorm(GatedNorm):
    """`GatedNorm` of one group that `sharing` consecutive ranks hold together."""

    __slots__ = ("_ranks", "_sharing")

    def __init__(self, build: Scope, groups: int, size: int, *, gate_first: bool, ranks: Ranks, sharing: int) -> None:
        """`groups` is 1; `size`: elements of this rank's part."""
        super().__init__(build, groups, size, gate_first=gate_first)
        self._ranks, self._sharing = ranks, sharing

    def _rms(self, grouped: mx.array) -> mx.array:
        tokens, first = grouped.shape[0], self._ranks.rank // self._sharing * self._sharing
        own = mx.mean(grouped * grouped, axis=-1).reshape(tokens, 1)
        every = self._ranks.joined(own)[:, first : first + self._sharing]
        means = mx.mean(every, axis=-1).reshape(tokens, 1, 1, 1)
        return grouped * mx.rsqrt(means + self._eps)
