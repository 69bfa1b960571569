"""Rotary position embedding, for queries and keys in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.checkpoint.rope_config import rotary_dim, rotary_frequencies

Rotate: TypeAlias = Callable[[mx.array, int], mx.array]
"""`rotate(heads [T, N, D], count)` applies the rotary embedding to the first `count` heads of a
step's tokens; returns [T, count, D]."""


class Rotary:
    """A model's rotary embedding for up to `max_positions`, on the first `rotary_dim` elements of
    each head; element i is paired with i + rotary_dim / 2. `at` returns the function that rotates
    heads.

    `is_fused`: use `mx.fast.rope`; otherwise the angles are computed once per step for all layers.
    Raises what `rotary_frequencies` raises.
    """

    __slots__ = ("_dtype", "_factor", "_frequencies", "_head_dim", "_is_fused", "_periods", "_size")

    def __init__(self, config: ModelConfig, max_positions: int, dtype: mx.Dtype, is_fused: bool) -> None:
        frequencies, factor = rotary_frequencies(config, max_positions)
        self._size, self._head_dim = rotary_dim(config), config.head_dim
        self._dtype = dtype
        self._is_fused = is_fused
        self._frequencies = mx.array(frequencies)
        self._periods = mx.array(np.float32(1.0) / frequencies)  # what mx.fast.rope calls freqs
        rest = self._head_dim - self._size
        self._factor = None if factor == 1.0 else mx.array([factor] * self._size + [1.0] * rest).astype(dtype)
        mx.eval(self._frequencies, self._periods, *(() if self._factor is None else (self._factor,)))

    def angles(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return cosines and sines float32 [N, rotary_dim / 2] of positions int32 [N], without the
        embedding's factor."""
        turned = positions.astype(mx.float32)[:, None] * self._frequencies
        return mx.cos(turned), mx.sin(turned)

    def at(self, positions: mx.array) -> Rotate:
        """Return the function `rotate(heads [T, N, D], count)` for tokens at positions int32 [T]:
        it returns the first `count` heads, rotated, [T, count, D]."""
        rotate = self._fused(positions) if self._is_fused else self._composed(positions)
        factor = self._factor
        return rotate if factor is None else lambda heads, count: rotate(heads * factor, count)

    def _fused(self, positions: mx.array) -> Rotate:
        def rotate(heads: mx.array, count: int) -> mx.array:
            tokens, every, size = heads.shape
            apart = heads.reshape(tokens, every, 1, size)  # all heads: the kernel would copy a part of them first
            turned = mx.fast.rope(
                apart, self._size, traditional=False, base=None, scale=1.0, offset=positions, freqs=self._periods
            )
            return turned.reshape(tokens, every, size)[:, :count]

        return rotate

    def _composed(self, positions: mx.array) -> Rotate:
        angles = positions.astype(mx.float32)[:, None] * self._frequencies
        cos = mx.cos(angles)[:, None, None, :].astype(self._dtype)
        sin = mx.sin(angles)
        signed = mx.stack([-sin, sin], axis=1)[:, None].astype(self._dtype)
        size, half = self._size, self._size // 2

        def rotate(heads: mx.array, count: int) -> mx.array:
            tokens, _, full = heads.shape
            halves = heads[:, :count, :size].reshape(tokens, count, 2, half)
            turned = (halves * cos + halves[:, :, ::-1] * signed).reshape(tokens, count, size)
            return turned if size == full else mx.concatenate([turned, heads[:, :count, size:]], axis=-1)

        return rotate
