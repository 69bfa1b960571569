"""Residual streams with gates: each token has several rows. A block's input is their gated mean,
and its result is added to each with a factor of its own (Qwen4-Exp)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sglcore.layers.build_scope import Scope
from sglcore.layers.linear import Linear


class StreamNorm:
    """Root mean square norm of each stream, with a weight of its own; loading adds 1 to the
    weight."""

    __slots__ = ("eps", "weight")

    def __init__(self, build: Scope, streams: int) -> None:
        size = build.config.hidden_size
        weight = build.parameter("weight", streams * size, dtype=torch.float32)
        build.weights.offsets.append((weight, 1.0))
        self.weight, self.eps = weight.view(streams, size), build.config.rms_norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, n, H] to the same shape; computes in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class GatedMixer:
    """Combines the streams of each token into one row: the mean of the normed streams, each element
    with a gate of its own. Also makes the streams from an embedding."""

    __slots__ = ("_streams", "down", "norm", "up")

    def __init__(self, build: Scope, streams: int, rank: int, *more: tuple[str, int]) -> None:
        """`rank`: elements between the two weights of the gates. `more`: (name, outputs) of linear
        layers over the normed streams that are computed with them."""
        size = streams * build.config.hidden_size
        self._streams = streams
        self.norm = StreamNorm(build.at("hc_norm"), streams)
        self.down = Linear(build, (("input_mix_weight_down", rank), *more), size)
        self.up = Linear(build, (("input_mix_weight_up", size),), rank)

    def begin(self, x: Tensor) -> Tensor:
        """[T, H] to [T, n, H]: n copies."""
        return x.unsqueeze(1).repeat(1, self._streams, 1)

    def end(self, streams: Tensor) -> Tensor:
        """Combine streams [T, n, H] to one row for each token, [T, H]."""
        normed = self.norm(streams)
        return self.combined(normed, self.down(normed.flatten(1)))

    def combined(self, normed: Tensor, mixed: Tensor) -> Tensor:
        """Return [T, H]: the gated mean of the normed streams [T, n, H]. `mixed` [T, rank] is the
        first product of the gates."""
        gates = torch.sigmoid(self.up(functional.silu(mixed / self._streams)))
        return (gates.view_as(normed) * normed).mean(1)


class GatedResidual:
    """A hyper-connection: combines streams into a block's input as `GatedMixer` does, and adds the
    block's result to each stream with a factor from 0 to 2."""

    __slots__ = ("_rank", "_streams", "mixer")

    def __init__(self, build: Scope, streams: int, rank: int) -> None:
        self._streams, self._rank = streams, rank
        self.mixer = GatedMixer(build, streams, rank, ("block_inject_weight", streams))

    def narrow(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Combine streams [T, n, H] to the input [T, H] of a block; also returns the factors
        [T, n] for `widen`."""
        normed = self.mixer.norm(streams)
        mixed, factors = self.mixer.down(normed.flatten(1)).split([self._rank, self._streams], dim=1)
        return self.mixer.combined(normed, mixed), 2 * torch.sigmoid(factors / self._streams)

    def widen(self, x: Tensor, streams: Tensor, mix: Tensor) -> Tensor:
        """Add the block's result `x` [T, H] to the streams [T, n, H], each times its factor of
        `mix` [T, n]."""
        return streams + x.unsqueeze(1) * mix.unsqueeze(2)
