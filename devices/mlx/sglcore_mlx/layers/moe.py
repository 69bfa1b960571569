"""MoE blocks: a router selects experts for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import mlx.core as mx

from sglcore.checkpoint.model_config import MoeConfig
from sglcore_mlx.layers.linear import Packed
from sglcore_mlx.layers.mlp import relu2, silu_and_mul
from sglcore_mlx.layers.quantization import Form
from sglcore_mlx.layers.scope import Scope

MXFP4 = Form(32, 4, "mxfp4")
MIN_SORTED = 64
"""From this number of selections (tokens times experts per token), rows are sorted by expert, so
that each expert is read once."""

MAX_SORTED = 32768
SORTED_MULTIPLE = 64
"""`sorted_indices` is set only if there are at most MAX_SORTED rows or a multiple of 64, and for
packed weights only if a row's elements are a multiple of 64. For other sizes Metal's kernels for
sorted rows give wrong results up to MLX 0.32.2; remove this when no such version is supported."""


Routing: TypeAlias = Callable[[mx.array], tuple[mx.array, mx.array]]
"""Maps rows [T, H] to the weights of K selected experts, [T, K], and the experts uint32 [T, K]."""


class ExpertLinear(Protocol):
    """A callable linear layer y = x W^T with the weight of each row's expert."""

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Map x [..., 1, in] and experts uint32 [..., K] to [..., K, 1, out]; x's dimensions before
        the last two broadcast against those of `experts`. `is_sorted`: experts are in ascending
        order, and MLX's faster kernel for that may be used."""
        ...


class PlainExperts:
    """An `ExpertLinear` with a plain weight [experts, out, in], given as `turned`, a transposed
    view [experts, in, out]. `is_wide`: compute the product in float32, with a temporary copy of the
    whole weight at each call."""

    __slots__ = ("_is_wide", "_turned")

    def __init__(self, turned: mx.array, is_wide: bool) -> None:
        self._turned = turned
        self._is_wide = is_wide and turned.dtype != mx.float32

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Implements `ExpertLinear.__call__`: one product for each row's expert, in x's dtype."""
        if not self._is_wide:
            return mx.gather_mm(x, self._turned, rhs_indices=experts, sorted_indices=is_sorted)
        wide, turned = x.astype(mx.float32), self._turned.astype(mx.float32)
        return mx.gather_mm(wide, turned, rhs_indices=experts, sorted_indices=is_sorted).astype(x.dtype)


class QuantisedExperts:
    """An `ExpertLinear` with a packed weight [experts, out, in]."""

    __slots__ = ("_packed",)

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Implements `ExpertLinear.__call__`: one product for each row's expert. `is_sorted` is
        ignored for rows that are no multiple of 64 elements."""
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
    """An `ExpertLinear` of gate and up projections with separate weights, because they are packed
    differently."""

    __slots__ = ("_gate", "_up")

    def __init__(self, gate: ExpertLinear, up: ExpertLinear) -> None:
        self._gate = gate
        self._up = up

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Implements `ExpertLinear.__call__`: the results of gate and up, concatenated."""
        return mx.concatenate([part(x, experts, is_sorted) for part in (self._gate, self._up)], axis=-1)


class GatedExperts:
    """down(silu(gate(x)) * up(x)) with each row's expert, callable as `ExpertLinear`. The
    checkpoint may have one tensor for each expert N and projection, `experts.N.NAME` with the names
    in `parts`, or tensors of all experts of a layer: `switch_mlp.gate_proj`,
    `experts.gate_up_proj`, or the two that `parts` names."""

    __slots__ = ("down_proj", "gate_up_proj")

    def __init__(self, build: Scope, moe: MoeConfig, parts: Sequence[str]) -> None:
        """`parts`: the checkpoint's names of the projections, either gate, up and down, or two:
        gate and up concatenated, and down."""
        if build.weights.has(f"{build.prefix}switch_mlp.gate_proj.weight"):
            self.gate_up_proj, self.down_proj = _stacked(build.at("switch_mlp"), moe)
        elif len(parts) == 2:
            self.gate_up_proj, self.down_proj = _both_stacked(build, moe, parts)
        elif build.weights.has(f"{build.prefix}experts.gate_up_proj"):
            self.gate_up_proj, self.down_proj = _whole(build.at("experts"), moe)
        else:
            self.gate_up_proj, self.down_proj = _separate(build.at("experts"), moe, parts)

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Implements `ExpertLinear.__call__`: map x [..., 1, H] to [..., K, 1, H]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x, experts, is_sorted)), experts, is_sorted)


class ClampedExperts:
    """Experts with biases and a clamped gate (gpt-oss), callable as `ExpertLinear`; gate and up
    rows alternate. Weights that the checkpoint stores as MXFP4 stay packed."""

    __slots__ = ("_alpha", "_b2", "_b13", "_limit", "_w2", "_w13")

    def __init__(self, build: Scope, moe: MoeConfig, alpha: float, limit: float) -> None:
        each, hidden, size, count = (
            build.at("experts"),
            build.config.hidden_size,
            moe.intermediate_size,
            moe.num_experts,
        )
        self._w13 = _turned(each, "gate_up_proj", count, hidden, 2 * size)
        self._b13 = each.parameter("gate_up_proj_bias", count, 2 * size)
        self._w2 = _turned(each, "down_proj", count, size, hidden)
        self._b2 = each.parameter("down_proj_bias", count, hidden)
        self._alpha, self._limit = alpha, limit

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Implements `ExpertLinear.__call__`: map x [..., 1, H] to [..., K, 1, H]."""
        both = self._w13(x, experts, is_sorted) + self._b13[experts][..., None, :]
        gate = mx.minimum(both[..., ::2], self._limit)
        up = mx.clip(both[..., 1::2], -self._limit, self._limit)
        inner = (up + 1) * (gate * mx.sigmoid(gate * self._alpha))
        return self._w2(inner, experts, is_sorted) + self._b2[experts][..., None, :]


def _turned(build: Scope, name: str, experts: int, inputs: int, outputs: int) -> ExpertLinear:
    """Return the weight `name` as an `ExpertLinear` from `inputs` to `outputs` elements; the
    checkpoint has it as plain [experts, in, out], or as MXFP4 `name_blocks` and `name_scales`,
    which stay packed."""
    if not build.weights.has(f"{build.prefix}{name}_blocks"):
        weight = build.weights.keep(build.weights.take(f"{build.prefix}{name}", experts, inputs, outputs))
        return PlainExperts(weight, not build.kernels.narrow_experts)
    blocks = build.weights.take_raw(f"{build.prefix}{name}_blocks", "U8", experts, outputs, inputs // 32, 16)
    scales = build.weights.take_raw(f"{build.prefix}{name}_scales", "U8", experts, outputs, inputs // 32)
    words = blocks.reshape(experts, outputs, inputs // 2).view(mx.uint32)
    build.weights.note_form(str(MXFP4))
    return QuantisedExperts(Packed(build.weights.keep(words), build.weights.keep(scales), None, MXFP4))


class SparseMoe:
    """An MoE block, callable from hidden states to hidden states: a router and its experts."""

    __slots__ = ("_mix", "_route")

    def __init__(self, route: Routing, mix: ExpertLinear) -> None:
        """`mix` runs the experts."""
        self._route = route
        self._mix = mix

    def __call__(self, hidden: mx.array) -> mx.array:
        """Map [T, H] to [T, H]: the weighted sum of the selected experts' outputs."""
        return self.mixed(hidden, *self._route(hidden))

    def mixed(self, hidden: mx.array, weights: mx.array, experts: mx.array) -> mx.array:
        """Return the weighted sum [T, H] of the experts' outputs for hidden [T, H], with given
        weights [T, K] and experts uint32 [T, K]: `__call__` without the router."""
        if experts.size < MIN_SORTED:
            rows = self._mix(hidden[:, None, None, :], experts, False)
        else:
            rows = self._mix_sorted(hidden, experts)
        return (rows.squeeze(-2) * weights[..., None]).sum(axis=-2)

    def _mix_sorted(self, hidden: mx.array, experts: mx.array) -> mx.array:
        flat = experts.flatten()
        order = mx.argsort(flat)
        # Insert the dimension before the gather: inserted afterwards, Metal's sorted kernel reads
        # wrong rows in MLX 0.31 and 0.32.0.
        rows = hidden[:, None, :][order // experts.shape[1]]
        is_told = flat.size <= MAX_SORTED or flat.size % SORTED_MULTIPLE == 0
        mixed = self._mix(rows, flat[order], is_told)
        return mixed[mx.argsort(order)].reshape(*experts.shape, 1, -1)


class Relu2Experts:
    """down(max(up(x), 0)^2) with each row's expert, callable as `ExpertLinear`; inputs and outputs
    have `width` elements. The checkpoint has `experts.N.up_proj` for each expert N, or one tensor
    per layer, `switch_mlp.fc1`."""

    __slots__ = ("_down", "_up")

    def __init__(self, build: Scope, moe: MoeConfig, width: int) -> None:
        size, count, whole, each = moe.intermediate_size, moe.num_experts, build.at("switch_mlp"), build.at("experts")
        if build.weights.has(f"{whole.prefix}fc1.weight"):
            self._up = _stacked_linear(whole, ("fc1",), count, width, size)
            self._down = _stacked_linear(whole, ("fc2",), count, size, width)
        else:
            self._up = _stack(each, moe, ("up_proj",), size, width)
            self._down = _stack(each, moe, ("down_proj",), width, size)

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Implements `ExpertLinear.__call__`: map x [..., 1, width] to [..., K, 1, width]."""
        return self._down(relu2(self._up(x, experts, is_sorted)), experts, is_sorted)


class LatentMoe:
    """An MoE block, callable from hidden states to hidden states: a router on the hidden states,
    and experts that work in a narrower space of `latent` elements, between two linear layers."""

    __slots__ = ("_experts", "_fc1", "_fc2", "_route")

    def __init__(self, build: Scope, moe: MoeConfig, latent: int, route: Routing) -> None:
        hidden, bias = build.config.hidden_size, build.config.mlp_bias
        self._fc1 = build.linear("fc1_latent_proj", hidden, latent, bias)
        self._fc2 = build.linear("fc2_latent_proj", latent, hidden, bias)
        self._route = route
        self._experts = SparseMoe(self._route, Relu2Experts(build, moe, latent))

    def __call__(self, hidden: mx.array) -> mx.array:
        """Map hidden states [T, H] to [T, H]: the weighted sum of the selected experts' outputs,
        projected back."""
        return self._fc2(self._experts.mixed(self._fc1(hidden), *self._route(hidden)))


class SoftmaxRouting:
    """The `Routing` that selects the experts with the largest softmax probabilities."""

    __slots__ = ("_normalize", "_top_k", "gate")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig, bias: bool = False) -> None:
        self.gate = build.linear(gate, build.config.hidden_size, moe.num_experts, bias)
        self._top_k, self._normalize = moe.experts_per_token, moe.normalize

    def __call__(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """Implements `Routing`: return weights [T, K] in the logits' dtype and experts uint32 [T,
        K], unordered."""
        return top_k_routing(self.gate(hidden), self._top_k, self._normalize)


class GroupLimitedRouting:
    """The `Routing` that selects the experts with the largest softmax probabilities of float32
    logits, among the groups with the largest probabilities (DeepSeek-V2, section 2.2.2)."""

    __slots__ = ("_gate", "_moe")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig) -> None:
        self._gate, self._moe = build.wide(gate, moe.num_experts), moe

    def __call__(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """Implements `Routing`: the weights are the probabilities of the selected experts,
        scaled."""
        moe, k = self._moe, self._moe.experts_per_token
        scores = mx.softmax(self._gate(hidden), axis=-1)
        chosen = scores
        if moe.top_groups < moe.num_groups:
            grouped = scores.reshape(hidden.shape[0], moe.num_groups, moe.num_experts // moe.num_groups)
            best = grouped.max(axis=-1)
            lowest = mx.topk(best, moe.top_groups, axis=-1).min(axis=-1, keepdims=True)
            chosen = mx.where((best >= lowest)[..., None], grouped, -mx.inf).reshape(scores.shape)
        experts = mx.argpartition(chosen, kth=-k, axis=-1)[:, -k:]
        weights = mx.take_along_axis(chosen, experts, axis=-1)
        return (weights * moe.scale).astype(hidden.dtype), experts


class SigmoidRouting:
    """The `Routing` that selects the experts with the largest biased sigmoids of float32 logits,
    within the best groups (DeepSeek-V3, section 2.1.2)."""

    __slots__ = ("_bias", "_gate", "_moe")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig) -> None:
        self._gate = build.wide(gate, moe.num_experts)
        self._bias = build.at(gate).parameter("e_score_correction_bias", moe.num_experts, offset=0.0)
        self._moe = moe

    def __call__(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """Implements `Routing`: return weights [T, K] in hidden's dtype and experts uint32 [T, K],
        unordered. The weights are the unbiased sigmoids of the selected experts, divided by their
        sum if the configuration says so, and scaled."""
        moe, k = self._moe, self._moe.experts_per_token
        scores = mx.sigmoid(self._gate(hidden))
        biased = scores + self._bias
        if moe.top_groups < moe.num_groups:
            size = moe.num_experts // moe.num_groups
            biased = _best_groups(biased.reshape(hidden.shape[0], moe.num_groups, size), moe.top_groups)
        experts = mx.argpartition(biased, kth=-k, axis=-1)[:, -k:]
        weights = mx.take_along_axis(scores, experts, axis=-1)
        if moe.normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return (weights * moe.scale).astype(hidden.dtype), experts


def _best_groups(grouped: mx.array, count: int) -> mx.array:
    """Return scores [T, groups, E / groups] as [T, E], with -inf for all but the `count` best
    groups, by the sum of a group's two best scores. Groups of equal rank may all stay."""
    sums = mx.topk(grouped, 2, axis=-1).sum(axis=-1)
    lowest = mx.topk(sums, count, axis=-1).min(axis=-1, keepdims=True)
    kept = mx.where((sums >= lowest)[..., None], grouped, -mx.inf)
    return kept.reshape(grouped.shape[0], grouped.shape[1] * grouped.shape[2])


def top_k_routing(logits: mx.array, k: int, normalize: bool) -> tuple[mx.array, mx.array]:
    """Return the weights of the k selected experts, [T, k] in the dtype of logits [T, E], and the
    experts uint32 [T, k]: softmax over all experts in float32, then the k largest, unordered.
    `normalize`: divide the weights by their sum."""
    probabilities = mx.softmax(logits.astype(mx.float32), axis=-1)
    experts = mx.argpartition(probabilities, kth=-k, axis=-1)[:, -k:]
    weights = mx.take_along_axis(probabilities, experts, axis=-1)
    if normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights.astype(logits.dtype), experts


def _stacked(build: Scope, moe: MoeConfig) -> tuple[ExpertLinear, ExpertLinear]:
    """Return the layers (gate and up together, down) of experts with one tensor [experts, out, in]
    for each projection of a layer, plain or packed."""
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


def _both_stacked(build: Scope, moe: MoeConfig, parts: Sequence[str]) -> tuple[ExpertLinear, ExpertLinear]:
    """Return the layers (gate and up together, down) of experts with two tensors [experts, out, in]
    per layer, `parts`: gate and up concatenated, and down."""
    hidden, size, (both, down) = build.config.hidden_size, moe.intermediate_size, parts
    gate_up = _stacked_linear(build, (both,), moe.num_experts, hidden, 2 * size)
    return gate_up, _stacked_linear(build, (down,), moe.num_experts, size, hidden)


def _whole(build: Scope, moe: MoeConfig) -> tuple[ExpertLinear, ExpertLinear]:
    """Return the layers (gate and up together, down) of experts with two plain tensors per layer,
    `gate_up_proj` and `down_proj`, named without `.weight`."""
    hidden, size, count = build.config.hidden_size, moe.intermediate_size, moe.num_experts
    shapes = (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size))
    gate_up, down = (build.weights.take(f"{build.prefix}{name}", count, *shape) for name, *shape in shapes)
    return _plain(build, gate_up), _plain(build, down)


def _separate(build: Scope, moe: MoeConfig, parts: Sequence[str]) -> tuple[ExpertLinear, ExpertLinear]:
    """Return the layers (gate and up together, down) of experts with one tensor for each projection
    of each expert; `parts`: the names of gate, up and down."""
    hidden, size = build.config.hidden_size, moe.intermediate_size
    return _stack(build, moe, parts[:2], size, hidden), _stack(build, moe, parts[2:], hidden, size)


def _stack(build: Scope, moe: MoeConfig, names: Sequence[str], outputs: int, inputs: int) -> ExpertLinear:
    every = [f"{build.prefix}{expert}.{name}.weight" for expert in range(moe.num_experts) for name in names]
    rows = mx.concatenate([build.weights.take(name, outputs, inputs) for name in every])
    return _plain(build, rows.reshape(moe.num_experts, len(names) * outputs, inputs))


def _plain(build: Scope, weight: mx.array) -> ExpertLinear:
    return PlainExperts(
        build.weights.view(build.weights.keep(weight).swapaxes(-1, -2)), not build.kernels.narrow_experts
    )
