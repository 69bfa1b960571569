"""Hyper-connections: each token has several streams. A block's input combines them, and its result
is distributed over them."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.layers.build_scope import Scope
from sglcore.runtime.kernels.table import KernelTable

Mix = tuple[Tensor, Tensor]
"""`post` and `comb` of the kernel table, with which a block's result is distributed over the
streams."""


class HyperConnection:
    """Combines streams into a block's input, and distributes its result over the streams (Xie et
    al. 2025)."""

    __slots__ = ("_numbers", "_post", "_pre", "weights")

    def __init__(self, build: Scope, streams: int, iters: int, eps: float) -> None:
        size, outputs = build.config.hidden_size, (2 + streams) * streams
        self.weights = (
            build.parameter("fn", outputs, streams * size, dtype=torch.float32),
            build.parameter("base", outputs, dtype=torch.float32),
            build.parameter("scale", 3, dtype=torch.float32),
        )
        self._numbers = build.config.rms_norm_eps, eps, iters
        h, x = build.rows(streams, size), build.rows(size)
        post, comb = build.rows(streams).float(), build.rows(streams, streams).float()
        self._pre = build.kernel(KernelTable.hc_pre, h, *self.weights, *self._numbers)
        self._post = build.kernel(KernelTable.hc_post, x, h, post, comb)

    def narrow(self, streams: Tensor) -> tuple[Tensor, Mix]:
        """Combine streams [T, n, H] to the input [T, H] of a block; also returns the `mix` for
        `widen`.
        """
        x, post, comb = self._pre(streams, *self.weights, *self._numbers)
        return x, (post, comb)

    def widen(self, x: Tensor, streams: Tensor, mix: Mix) -> Tensor:
        """Distribute the block's result [T, H] over the streams; returns [T, n, H]. `streams` and
        `mix` are the argument and the result of `narrow`."""
        return self._post(x, streams, *mix)


class HyperHead:
    """Starts the streams as copies of the embedding, and combines them at the end."""

    __slots__ = ("_eps", "_head", "_streams", "weights")

    def __init__(self, build: Scope, streams: int, eps: float) -> None:
        size = build.config.hidden_size
        self.weights = (
            build.parameter("hc_fn", streams, streams * size, dtype=torch.float32),
            build.parameter("hc_base", streams, dtype=torch.float32),
            build.parameter("hc_scale", 1, dtype=torch.float32),
        )
        self._eps, self._streams = (build.config.rms_norm_eps, eps), streams
        self._head = build.kernel(KernelTable.hc_head, build.rows(streams, size), *self.weights, *self._eps)

    def begin(self, x: Tensor) -> Tensor:
        """[T, H] to [T, n, H]: n copies."""
        return x.unsqueeze(1).repeat(1, self._streams, 1)

    def end(self, streams: Tensor) -> Tensor:
        """Combine streams [T, n, H] to one row for each token, [T, H]."""
        return self._head(streams, *self.weights, *self._eps)
