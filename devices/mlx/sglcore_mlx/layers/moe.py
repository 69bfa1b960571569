"""The sparse feed-forward block: a gate chooses experts for each token."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from sglcore.checkpoint.config import MoeConfig
from sglcore_mlx.layers.linear import Packed
from sglcore_mlx.layers.mlp import silu_and_mul
from sglcore_mlx.layers.scope import Scope

MIN_SORTED = 64
"""Choices (tokens times experts of each) from which rows are sorted by expert, so that each is read once."""

MAX_SORTED = 32768
SORTED_MULTIPLE = 64
"""MLX is told that rows are sorted if there are at most so many or a multiple of 64, and for packed weights only if a row's
elements are a multiple of 64. Metal's kernels for sorted rows give wrong numbers for others up to MLX 0.32.2; this can go
when no such version is supported."""


class ExpertLinear(Protocol):
    """y = x W^T with the weight of each row's expert."""

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """[..., 1, in] and experts uint32 [..., K] to [..., K, 1, out], where x's dimensions before the last two
        broadcast against those of `experts`; `is_sorted` says that experts never decrease, which MLX may be told."""
        ...


class PlainExperts:
    """A weight [experts, out, in], as a view [experts, in, out]; `is_wide` has the product made in float32, of a copy
    that lives no longer than the product."""

    __slots__ = ("_is_wide", "_turned")

    def __init__(self, turned: mx.array, is_wide: bool) -> None:
        self._turned = turned
        self._is_wide = is_wide and turned.dtype != mx.float32

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """See `ExpertLinear`."""
        if not self._is_wide:
            return mx.gather_mm(x, self._turned, rhs_indices=experts, sorted_indices=is_sorted)
        wide, turned = x.astype(mx.float32), self._turned.astype(mx.float32)
        return mx.gather_mm(wide, turned, rhs_indices=experts, sorted_indices=is_sorted).astype(x.dtype)


class QuantisedExperts:
    """A packed weight [experts, out, in]."""

    __slots__ = ("_packed",)

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """See `ExpertLinear`."""
        packed, form, is_whole = self._packed, self._packed.form, x.shape[-1] % SORTED_MULTIPLE == 0
        return mx.gather_qmm(
            x,
            packed.weight,
            packed.scales,
            packed.biases,
            rhs_indices=experts,
            group_size=form.group_size,
            bits=form.bits,
            mode=form.mode,
            sorted_indices=is_sorted and is_whole,
        )


class ExpertsSideBySide:
    """Gate and up where their weights can not be one array, because they are packed differently."""

    __slots__ = ("_gate", "_up")

    def __init__(self, gate: ExpertLinear, up: ExpertLinear) -> None:
        self._gate = gate
        self._up = up

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """See `ExpertLinear`."""
        return mx.concatenate([part(x, experts, is_sorted) for part in (self._gate, self._up)], axis=-1)


class SparseMoe:
    """Gate and experts, from either form of checkpoint: `experts.N.gate_proj`, or all of a layer as
    `switch_mlp.gate_proj`."""

    __slots__ = ("_normalize", "_top_k", "down_proj", "gate", "gate_up_proj")

    def __init__(self, build: Scope, moe: MoeConfig) -> None:
        self.gate = build.linear("gate", build.config.hidden_size, moe.num_experts)
        is_stacked = build.weights.has(f"{build.prefix}switch_mlp.gate_proj.weight")
        make = _stacked if is_stacked else _separate
        self.gate_up_proj, self.down_proj = make(build.at("switch_mlp" if is_stacked else "experts"), moe)
        self._top_k = moe.experts_per_token
        self._normalize = moe.normalize

    def __call__(self, hidden: mx.array) -> mx.array:
        """[T, H] to [T, H]: the weighted sum of the chosen experts' outputs."""
        weights, experts = top_k_routing(self.gate(hidden), self._top_k, self._normalize)
        if experts.size < MIN_SORTED:
            rows = self._mix(hidden[:, None, None, :], experts, is_sorted=False)
        else:
            rows = self._mix_sorted(hidden, experts)
        return (rows.squeeze(-2) * weights[..., None]).sum(axis=-2)

    def _mix(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        inner = silu_and_mul(self.gate_up_proj(x, experts, is_sorted))
        return self.down_proj(inner, experts, is_sorted)

    def _mix_sorted(self, hidden: mx.array, experts: mx.array) -> mx.array:
        flat = experts.flatten()
        order = mx.argsort(flat)
        # A dimension that is inserted after the gather leads Metal's sorted kernel to wrong rows, in MLX 0.31 and 0.32.0.
        rows = hidden[:, None, :][order // self._top_k]
        is_told = flat.size <= MAX_SORTED or flat.size % SORTED_MULTIPLE == 0
        mixed = self._mix(rows, flat[order], is_told)
        return mixed[mx.argsort(order)].reshape(*experts.shape, 1, -1)


def top_k_routing(logits: mx.array, k: int, normalize: bool) -> tuple[mx.array, mx.array]:
    """Logits [T, experts] to the weights of the k chosen, [T, k] in the logits' dtype, and the experts uint32 [T, k]:
    softmax over all experts in float32, then the k largest, in no order."""
    probabilities = mx.softmax(logits.astype(mx.float32), axis=-1)
    experts = mx.argpartition(probabilities, kth=-k, axis=-1)[:, -k:]
    weights = mx.take_along_axis(probabilities, experts, axis=-1)
    if normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights.astype(logits.dtype), experts


def _stacked(build: Scope, moe: MoeConfig) -> tuple[ExpertLinear, ExpertLinear]:
    """Experts of a checkpoint that has each projection of a layer as one tensor [experts, out, in], plain or packed."""
    hidden, size = build.config.hidden_size, moe.intermediate_size
    names = ("gate_proj", "up_proj")
    if build.form_of(names[0]) == build.form_of(names[1]):
        gate_up = _stacked_linear(build, names, moe.num_experts, hidden, size)
    else:
        gate_up = ExpertsSideBySide(*(_stacked_linear(build, (name,), moe.num_experts, hidden, size) for name in names))
    return gate_up, _stacked_linear(build, ("down_proj",), moe.num_experts, size, hidden)


def _stacked_linear(build: Scope, names: tuple[str, ...], experts: int, inputs: int, outputs: int) -> ExpertLinear:
    form = build.form_of(names[0])
    if form is not None:
        return QuantisedExperts(build.packed([(name, (experts, outputs)) for name in names], inputs, form))
    arrays = [build.weights.take(f"{build.prefix}{name}.weight", experts, outputs, inputs) for name in names]
    return _plain(build, arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=1))


def _separate(build: Scope, moe: MoeConfig) -> tuple[ExpertLinear, ExpertLinear]:
    """Experts of a checkpoint that has a tensor for each projection of each expert."""
    hidden, size = build.config.hidden_size, moe.intermediate_size

    def stack(names: tuple[str, ...], outputs: int, inputs: int) -> ExpertLinear:
        every = [f"{build.prefix}{expert}.{name}.weight" for expert in range(moe.num_experts) for name in names]
        rows = mx.concatenate([build.weights.take(name, outputs, inputs) for name in every])
        return _plain(build, rows.reshape(moe.num_experts, len(names) * outputs, inputs))

    return stack(("gate_proj", "up_proj"), size, hidden), stack(("down_proj",), hidden, size)


def _plain(build: Scope, weight: mx.array) -> ExpertLinear:
    return PlainExperts(
        build.weights.view(build.weights.keep(weight).swapaxes(-1, -2)), not build.kernels.narrow_experts
    )
