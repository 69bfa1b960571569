"""Hyper-connections: a token has several streams; a block's input combines them, and its result is
distributed over them (Xie et al. 2025)."""

from __future__ import annotations

from typing import TypeAlias

import mlx.core as mx

from sglcore_mlx.layers.scope import Scope

Mix: TypeAlias = tuple[mx.array, mx.array]
"""Float32 factors of a block's result for each stream [T, n], and of stream j before the block for
stream k after it, [T, n, n]."""


class HyperConnection:
    """Implements `layer_kinds.HyperConnection`, with parameters and sums in float32."""

    __slots__ = ("_base", "_eps", "_iters", "_norm_eps", "_scale", "_streams", "_turned")

    def __init__(self, build: Scope, streams: int, iters: int, eps: float) -> None:
        outputs = (2 + streams) * streams
        self._turned = build.parameter("fn", outputs, streams * build.config.hidden_size, offset=0.0).T
        self._base = build.parameter("base", outputs, offset=0.0)
        self._scale = build.parameter("scale", 3, offset=0.0)
        self._streams, self._iters, self._eps, self._norm_eps = streams, iters, eps, build.config.rms_norm_eps

    def narrow(self, streams: mx.array) -> tuple[mx.array, Mix]:
        """Combine streams [T, n, H] to a block's input [T, H]; also returns the mix for `widen`."""
        count, eps, scale = self._streams, self._eps, self._scale
        factors = _factors(streams, self._turned, self._norm_eps)
        one, two, three = mx.split(factors, [count, 2 * count], axis=-1)
        of_one, of_two, of_three = mx.split(self._base, [count, 2 * count])
        before = mx.sigmoid(one * scale[0] + of_one) + eps
        after = 2 * mx.sigmoid(two * scale[1] + of_two)
        square = (three * scale[2] + of_three).reshape(-1, count, count)
        mixed = mx.softmax(square, axis=-1) + eps
        mixed = mixed / (mixed.sum(axis=-2, keepdims=True) + eps)
        for _ in range(self._iters - 1):
            mixed = mixed / (mixed.sum(axis=-1, keepdims=True) + eps)
            mixed = mixed / (mixed.sum(axis=-2, keepdims=True) + eps)
        return _combined(streams, before), (after, mixed)

    def widen(self, x: mx.array, streams: mx.array, mix: Mix) -> mx.array:
        """Distribute a block's result x [T, H] over the streams; returns [T, n, H]."""
        after, mixed = mix
        kept = mixed.swapaxes(1, 2) @ streams.astype(mx.float32)
        return (after[..., None] * x.astype(mx.float32)[:, None] + kept).astype(streams.dtype)


class HyperHead:
    """Implements `layer_kinds.HyperHead`."""

    __slots__ = ("_base", "_eps", "_norm_eps", "_scale", "_streams", "_turned")

    def __init__(self, build: Scope, streams: int, eps: float) -> None:
        self._turned = build.parameter("hc_fn", streams, streams * build.config.hidden_size, offset=0.0).T
        self._base = build.parameter("hc_base", streams, offset=0.0)
        self._scale = build.parameter("hc_scale", 1, offset=0.0)
        self._streams, self._eps, self._norm_eps = streams, eps, build.config.rms_norm_eps

    def begin(self, x: mx.array) -> mx.array:
        """Map [T, H] to [T, n, H]: n copies."""
        return mx.repeat(x[:, None], self._streams, axis=1)

    def end(self, streams: mx.array) -> mx.array:
        """Combine streams [T, n, H] to [T, H]."""
        factors = _factors(streams, self._turned, self._norm_eps)
        return _combined(streams, mx.sigmoid(factors * self._scale + self._base) + self._eps)


def _factors(streams: mx.array, turned: mx.array, eps: float) -> mx.array:
    """Return float32 [T, outputs]: the normed streams of each token, side by side, times `turned`
    [n * H, outputs]."""
    flat = streams.reshape(streams.shape[0], turned.shape[0]).astype(mx.float32)
    return mx.fast.rms_norm(flat, None, eps) @ turned


def _combined(streams: mx.array, factors: mx.array) -> mx.array:
    """Return the sum of streams [T, n, H] by factors float32 [T, n], in float32, then cast."""
    return (factors[..., None] * streams.astype(mx.float32)).sum(axis=1).astype(streams.dtype)
