"""Layers that keep a state for each request: projections, a convolution and a recurrence. Each is
one kernel for all requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sglcore.checkpoint.recurrent_config import DeltaNetConfig, Mamba2Config
from sglcore.layers.build_scope import Scope
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.states import PoolRows, StateTensor
from sglcore.runtime.state_layer import ReplayedLayer

Rows = Callable[[Tensor], Tensor]
"""A function of token rows."""


class CausalConv:
    """A depthwise convolution over a token and the `taps` - 1 tokens before it, with the
    checkpoint's `NAME.weight` [channels, 1, taps]; then SiLU, unless `silu` is False.

    With a `gap`, each of the `taps` tokens is `gap` tokens before the next: the weight is 0 for the
    tokens between them.
    """

    __slots__ = ("_conv", "_gap", "_silu", "bias", "tail", "weight")

    def __init__(
        self, build: Scope, name: str, size: int, taps: int, *, bias: bool = False, silu: bool = True, gap: int = 1
    ) -> None:
        taps = (taps - 1) * gap + 1
        self.weight = build.weights.make((taps, size))
        build.weights.targets[f"{build.prefix}{name}.weight"] = self.weight[::gap].t().unsqueeze(1)
        if gap > 1:
            build.weights.derived.append(self._clear_gaps)
        self.bias = build.parameter(f"{name}.bias", size) if bias else None
        self.tail = StateTensor((taps - 1, size), build.dtype)
        self._silu, self._gap = silu, gap
        given = build.rows(size), self.weight, self.bias, silu, build.rows(taps - 1, size)
        self._conv = build.kernel(KernelTable.causal_conv, *given, build.indices(), None, None)

    def _clear_gaps(self) -> None:
        taps = torch.arange(self.weight.shape[0], device=self.weight.device)
        self.weight[taps % self._gap != 0] = 0

    def __call__(self, x: Tensor, tails: Tensor, rows: PoolRows) -> Tensor:
        """Convolve `x` [T, size] to [T, size]; updates `tails` [slots, taps - 1, size], the last
        inputs of each request, in the slots of `rows`, in place. `rows`: slots, starts, lengths and
        targets of the requests' runs of tokens, as `KernelTable.causal_conv` takes them."""
        return self._conv(x, self.weight, self.bias, self._silu, tails, *rows)


class GatedDeltaNet(ReplayedLayer):
    """A convolution over queries, keys and values, then the gated delta rule, and a norm with a
    gate after it (Yang et al. 2024)."""

    def __init__(self, build: Scope, layer_id: int, net: DeltaNetConfig, projection: Rows, output: Rows) -> None:
        """`projection` returns queries, keys and values, the norm's gate, b and a, concatenated; b
        and a have one element per value head. `output` maps [T, value_heads * value_dim] to [T, H].
        `layer_id` counts the layers with states.
        """
        heads, float32 = net.value_heads, torch.float32
        width = 2 * net.keys + net.values
        self.projection, self.output = projection, output
        self.conv = CausalConv(build, "conv1d", width, net.taps)
        self.a_log = build.parameter("A_log", heads, dtype=float32)
        self.dt_bias = build.parameter("dt_bias", heads, dtype=float32)
        self.norm = build.parameter("norm.weight", net.value_dim).view(1, net.value_dim)
        self._sizes, self._eps = [width, net.values, heads, heads], build.config.rms_norm_eps
        matrices = StateTensor((heads, net.key_dim, net.value_dim), float32)
        taken = StateTensor((sum(self._sizes),), build.dtype)
        super().__init__(layer_id, {"conv": self.conv.tail, "recurrent": matrices}, taken)
        by_head, state = build.rows(heads), torch.empty(1, *matrices.shape, dtype=float32, device="meta")
        given = build.rows(width), by_head, by_head, self.a_log, self.dt_bias, state, build.indices(), None, None
        self._rule = build.kernel(KernelTable.gated_delta_rule, *given)
        values = build.rows(net.values)
        self._norm = build.kernel(KernelTable.gated_rms_norm, values, values, self.norm, self._eps, False)
        self._norm_alone = None
        if net.gate == "sigmoid":
            by_value = build.rows(heads, net.value_dim)
            self._norm_alone = build.kernel(KernelTable.rms_norm, by_value, self.norm[0], self._eps)

    def take(self, hidden: Tensor) -> Tensor:
        """[T, H] to the projection's outputs [T, n]."""
        return self.projection(hidden)

    def advance(self, taken: Tensor, rows: PoolRows, states: Mapping[str, Tensor]) -> Tensor:
        """Map `taken` [T, n] to values [T, heads * value_dim] and update `states`, "conv" and
        "recurrent", in the slots of `rows`, in place. Runs inside graphs: no host reads."""
        qkv, _, b, a = taken.split(self._sizes, dim=1)
        qkv = self.conv(qkv, states["conv"], rows)
        return self._rule(qkv, a, b, self.a_log, self.dt_bias, states["recurrent"], *rows)

    def finish(self, mixed: Tensor, taken: Tensor) -> Tensor:
        """Return [T, H]: values `mixed` [T, heads * value_dim], normed and then gated by a part of
        `taken`, then the output projection."""
        gate = taken.split(self._sizes, dim=1)[1]
        if self._norm_alone is None:
            return self.output(self._norm(mixed, gate, self.norm, self._eps, False))
        normed = self._norm_alone(mixed.unflatten(1, (-1, self.norm.shape[1])), self.norm[0], self._eps)
        return self.output((normed.flatten(1) * torch.sigmoid(gate.float())).to(mixed.dtype))


class Mamba2(ReplayedLayer):
    """A convolution and the selective scan, then a norm after the gate (Dao and Gu 2024)."""

    def __init__(self, build: Scope, layer_id: int, space: Mamba2Config, projection: Rows, output: Rows) -> None:
        """`projection` returns the gate, the convolution's input, and the time steps, concatenated:
        `inner`, `channels` and `heads` elements. `output` maps [T, inner] to [T, H]. `layer_id`
        counts the layers with states."""
        heads, float32 = space.heads, torch.float32
        self.projection, self.output = projection, output
        self.conv = CausalConv(build, "conv1d", space.channels, space.taps, bias=space.conv_bias)
        self.by_head = tuple(build.parameter(name, heads, dtype=float32) for name in ("A_log", "D", "dt_bias"))
        self.norm = build.parameter("norm.weight", space.inner).view(space.groups, space.inner // space.groups)
        self._sizes, self._eps = [space.inner, space.channels, heads], build.config.rms_norm_eps
        self._limits = space.dt_min, space.dt_max
        matrices = StateTensor((heads, space.head_dim, space.width), float32)
        taken = StateTensor((sum(self._sizes),), build.dtype)
        super().__init__(layer_id, {"conv": self.conv.tail, "recurrent": matrices}, taken)
        state = torch.empty(1, *matrices.shape, dtype=float32, device="meta")
        given = build.rows(space.channels), build.rows(heads), *self.by_head, *self._limits, state
        self._scan = build.kernel(KernelTable.selective_scan, *given, build.indices(), None, None)
        inner = build.rows(space.inner)
        self.norm_rows = build.kernel(KernelTable.gated_rms_norm, inner, inner, self.norm, self._eps, True)

    def take(self, hidden: Tensor) -> Tensor:
        """[T, H] to the projection's outputs [T, n]."""
        return self.projection(hidden)

    def advance(self, taken: Tensor, rows: PoolRows, states: Mapping[str, Tensor]) -> Tensor:
        """Map `taken` [T, n] to values [T, inner] and update `states`, "conv" and "recurrent", in
        the slots of `rows`, in place. Runs inside graphs: no host reads."""
        _, xbc, dt = taken.split(self._sizes, dim=1)
        xbc = self.conv(xbc, states["conv"], rows)
        a_log, d, dt_bias = self.by_head
        return self._scan(xbc, dt, a_log, d, dt_bias, *self._limits, states["recurrent"], *rows)

    def finish(self, mixed: Tensor, taken: Tensor) -> Tensor:
        """Return [T, H]: values `mixed` [T, inner], gated by a part of `taken` and then normed,
        then the output projection.
        """
        gate = taken.split(self._sizes, dim=1)[0]
        return self.output(self.norm_rows(mixed, gate, self.norm, self._eps, True))


class ShortConv(ReplayedLayer):
    """A short convolution between an input gate and an output gate (Liquid AI's LFM2)."""

    def __init__(self, build: Scope, layer_id: int, taps: int, projection: Rows, output: Rows, bias: bool) -> None:
        """`projection` returns the input gate, the output gate and the input, concatenated, H
        elements each; `output` maps [T, H] to [T, H]. `taps`: the tokens that the convolution
        reads. `layer_id` counts the layers with states.
        """
        self.projection, self.output = projection, output
        size = build.config.hidden_size
        self.conv = CausalConv(build, "conv", size, taps, bias=bias, silu=False)
        super().__init__(layer_id, {"conv": self.conv.tail}, StateTensor((3 * size,), build.dtype))

    def take(self, hidden: Tensor) -> Tensor:
        """[T, H] to the gates and the input [T, 3 H]."""
        return self.projection(hidden)

    def advance(self, taken: Tensor, rows: PoolRows, states: Mapping[str, Tensor]) -> Tensor:
        """Map `taken` [T, 3 H] to the convolution of the gated input [T, H] and update `states`,
        only "conv", in the slots of `rows`, in place. Runs inside graphs: no host reads."""
        before, _, x = taken.chunk(3, dim=1)
        return self.conv(before * x, states["conv"], rows)

    def finish(self, mixed: Tensor, taken: Tensor) -> Tensor:
        """Return [T, H]: the convolution [T, H] times the output gate, then the projection."""
        return self.output(taken.chunk(3, dim=1)[1] * mixed)
