"""Layers with a recurrent state of each request: projections over all tokens, a convolution and a
recurrence per request."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from sglcore.checkpoint.recurrent_config import DeltaNetConfig, Mamba2Config
from sglcore_mlx.forward_batch import ForwardBatch, States
from sglcore_mlx.layers.norm import GatedNorm
from sglcore_mlx.layers.recurrence import gated_delta_rule, selective_scan
from sglcore_mlx.layers.scope import Scope
from sglcore_mlx.models.contract import StateShape

Rows = Callable[[mx.array], mx.array]
"""A function of rows [T, ...]."""
L2_EPS = 1e-6
"""Epsilon of the L2 norm of queries and keys."""


class CausalConv:
    """A callable depthwise causal convolution over `taps` tokens of `size` channels, followed by
    silu if `silu`. Its weight is `NAME.weight` of the checkpoint, [channels, 1, taps] or in MLX's
    layout, [channels, taps, 1]. `tail`: the shape of its state, the last taps - 1 inputs."""

    __slots__ = ("_bias", "_silu", "_weight", "tail")

    def __init__(self, build: Scope, name: str, size: int, taps: int, *, bias: bool = False, silu: bool = True) -> None:
        given = build.weights.shape_of(f"{build.prefix}{name}.weight")
        shape = (taps, 1) if given == (size, taps, 1) else (1, taps)
        weight = build.weights.take(f"{build.prefix}{name}.weight", size, *shape, dtype=mx.float32)
        self._weight = build.weights.keep(weight.reshape(size, taps).T)
        self._bias = build.parameter(f"{name}.bias", size, offset=0.0) if bias else None
        self.tail = StateShape((taps - 1, size), build.dtype)
        self._silu = silu

    def __call__(self, x: mx.array, tails: mx.array, lens: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Convolve x [N, L, size], the tokens that follow the inputs `tails` [N, taps - 1, size];
        return the results, in the shape of x, and the tails after all tokens, or after the first
        `lens` int32[N], in the shape of `tails`."""
        joined, length = mx.concatenate([tails, x], axis=1), x.shape[1]
        out = mx.zeros(x.shape[2:]) if self._bias is None else self._bias
        for tap in range(self._weight.shape[0]):
            out = out + joined[:, tap : tap + length] * self._weight[tap]
        out = out.astype(x.dtype)
        if lens is None:
            after = joined[:, length:]
        else:
            places = lens[:, None] + mx.arange(tails.shape[1], dtype=mx.int32)
            after = mx.take_along_axis(joined, places[:, :, None], axis=1)
        return out * mx.sigmoid(out) if self._silu else out, after


class GatedDeltaNet:
    """Gated DeltaNet (Yang et al. 2024): a convolution of queries, keys and values, the gated delta
    rule, and a gated norm."""

    def __init__(self, build: Scope, layer_id: int, net: DeltaNetConfig, projection: Rows, output: Rows) -> None:
        """`projection` returns queries, keys and values, the norm's gate, b and a, concatenated;
        `output` maps the result to hidden states. `layer_id`: its number among the layers with
        states."""
        width, heads = 2 * net.keys + net.values, net.value_heads
        self.layer_id, self._net, self._chunk = layer_id, net, build.kernels.chunk
        self._projection, self._output = projection, output
        self._conv = CausalConv(build, "conv1d", width, net.taps)
        self._rate = _rate(build, heads)
        self._dt_bias = build.parameter("dt_bias", heads, offset=0.0)
        self._norm = GatedNorm(build.at("norm"), 1, net.value_dim, gate_first=False)
        self._edges = [width, width + net.values, width + net.values + heads]
        self.kept = (self._conv.tail, StateShape((heads, net.key_dim, net.value_dim), mx.float32))

    def __call__(self, hidden: mx.array, batch: ForwardBatch) -> mx.array:
        """Map hidden states [T, H] to [T, H]; each request continues from its states, which
        `batch.recur` reads and replaces."""
        qkv, gate, b, a = mx.split(self._projection(hidden), self._edges, axis=-1)
        return self._output(self._norm(batch.recur(self.layer_id, self.advance, qkv, b, a), gate))

    def advance(
        self, states: States, qkv: mx.array, b: mx.array, a: mx.array, lens: mx.array | None = None
    ) -> tuple[mx.array, States]:
        """Implements `Advance`."""
        net, (rows, length, _) = self._net, qkv.shape
        qkv, tails = self._conv(qkv, states[0], lens)
        q, k, v = mx.split(qkv.astype(mx.float32), [net.keys, 2 * net.keys], axis=-1)
        q, k = (self._unit(each.reshape(rows, length, net.key_heads, net.key_dim)) for each in (q, k))
        v = v.reshape(rows, length, net.value_heads, net.value_dim).swapaxes(1, 2)
        g = self._rate * _softplus(a.astype(mx.float32) + self._dt_bias)
        beta = mx.sigmoid(b).astype(mx.float32)
        if lens is not None:
            g, beta = (_within(each, lens) for each in (g, beta))
        out, matrices = gated_delta_rule(
            q * net.key_dim**-0.5, k, v, g.swapaxes(1, 2), beta.swapaxes(1, 2), states[1], self._chunk
        )
        return out.swapaxes(1, 2).astype(qkv.dtype).reshape(rows, length, net.values), [tails, matrices]

    def _unit(self, x: mx.array) -> mx.array:
        """Return the heads of x [N, L, key_heads, K], each normalised to length 1 and repeated for
        its value heads: [N, heads, L, K]."""
        x = x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + L2_EPS)
        return mx.repeat(x, self._net.value_heads // self._net.key_heads, axis=2).swapaxes(1, 2)


class Mamba2:
    """Mamba 2 (Dao and Gu 2024): a convolution, the selective scan, and a norm with the gate before
    it."""

    def __init__(
        self,
        build: Scope,
        layer_id: int,
        space: Mamba2Config,
        projection: Rows,
        output: Rows,
        make_norm: Callable[..., GatedNorm] = GatedNorm,
    ) -> None:
        """`projection` returns the gate, the convolution's input, and the time steps, concatenated;
        `output` maps the result to hidden states. `layer_id`: its number among the layers with
        states. `make_norm` makes the norm, with the arguments of `GatedNorm`."""
        groups, each = space.groups, space.heads // space.groups
        self.layer_id, self._space, self._chunk = layer_id, space, build.kernels.chunk
        self._projection, self._output = projection, output
        self._conv = CausalConv(build, "conv1d", space.channels, space.taps, bias=space.conv_bias)
        self._rate = _rate(build, space.heads)
        self._d, self._dt_bias = (build.parameter(name, space.heads, offset=0.0) for name in ("D", "dt_bias"))
        self._norm = make_norm(build.at("norm"), groups, space.inner // groups, gate_first=True)
        self.kept = (self._conv.tail, StateShape((groups, each, space.head_dim, space.width), mx.float32))

    def __call__(self, hidden: mx.array, batch: ForwardBatch) -> mx.array:
        """Map hidden states [T, H] to [T, H]; each request continues from its states, which
        `batch.recur` reads and replaces."""
        space = self._space
        gate, xbc, dt = mx.split(self._projection(hidden), [space.inner, space.inner + space.channels], axis=-1)
        return self._output(self._norm(batch.recur(self.layer_id, self.advance, xbc, dt), gate))

    def advance(
        self, states: States, xbc: mx.array, dt: mx.array, lens: mx.array | None = None
    ) -> tuple[mx.array, States]:
        """Implements `Advance`."""
        space, (rows, length, _) = self._space, xbc.shape
        xbc, tails = self._conv(xbc, states[0], lens)
        shared = space.groups * space.width
        x, before, after = mx.split(xbc.astype(mx.float32), [space.inner, space.inner + shared], axis=-1)
        before, after = (each.reshape(rows, length, space.groups, 1, space.width) for each in (before, after))
        dt = mx.clip(_softplus(dt.astype(mx.float32) + self._dt_bias), space.dt_min, space.dt_max)
        dt = dt if lens is None else _within(dt, lens)
        x = x.reshape(rows, length, space.heads, space.head_dim)
        before, after = (each.transpose(0, 2, 3, 1, 4) for each in (before, after))
        inputs, g = self._by_group(x * dt[..., None]), self._by_group(dt * self._rate)
        out, matrices = selective_scan(inputs, g, before, after, states[1], self._chunk)
        out = out.transpose(0, 3, 1, 2, 4).reshape(x.shape) + self._d[:, None] * x
        return out.astype(xbc.dtype).reshape(rows, length, space.inner), [tails, matrices]

    def _by_group(self, x: mx.array) -> mx.array:
        """Return x [N, L, heads, ...] as [N, groups, heads / groups, L, ...]."""
        rows, length, heads, *rest = x.shape
        grouped = x.reshape(rows, length, self._space.groups, heads // self._space.groups, *rest)
        return grouped.transpose(0, 2, 3, 1, *range(4, grouped.ndim))


class ShortConv:
    """A convolution of gated inputs, followed by a second gate (Liquid AI's LFM2)."""

    def __init__(self, build: Scope, layer_id: int, taps: int, projection: Rows, output: Rows, bias: bool) -> None:
        """`projection` returns the gate before the convolution, the gate after it, and the input,
        concatenated; `output` maps the result to hidden states. `layer_id`: its number among the
        layers with states."""
        self.layer_id = layer_id
        self._projection, self._output = projection, output
        self._conv = CausalConv(build, "conv", build.config.hidden_size, taps, bias=bias, silu=False)
        self.kept = (self._conv.tail,)

    def __call__(self, hidden: mx.array, batch: ForwardBatch) -> mx.array:
        """Map hidden states [T, H] to [T, H]; each request continues from its state, which
        `batch.recur` reads and replaces."""
        before, after, x = mx.split(self._projection(hidden), 3, axis=-1)
        return self._output(after * batch.recur(self.layer_id, self.advance, before * x))

    def advance(self, states: States, x: mx.array, lens: mx.array | None = None) -> tuple[mx.array, States]:
        """Implements `Advance`."""
        mixed, tails = self._conv(x, states[0], lens)
        return mixed, [tails]


def _rate(build: Scope, heads: int) -> mx.array:
    """Take `A_log` of the checkpoint and return -exp(A_log), a kept weight float32 [heads]: the log
    decay of a time step of 1."""
    return build.weights.keep(-mx.exp(build.weights.take(f"{build.prefix}A_log", heads, dtype=mx.float32)))


def _within(x: mx.array, lens: mx.array) -> mx.array:
    """Return x [N, L, ...] with zeros from token `lens` int32[N] on. A token with a zero time step,
    or with a zero decay and a zero weight, changes no state."""
    inside = mx.arange(x.shape[1])[None] < lens[:, None]
    return x * inside.reshape(*inside.shape, *([1] * (x.ndim - 2)))


def _softplus(x: mx.array) -> mx.array:
    return mx.logaddexp(x, 0)
