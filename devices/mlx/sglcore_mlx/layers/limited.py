"""Experts and blocks with clamped factors, their routers, and linear layers by groups
(DeepSeek-V4)."""

from __future__ import annotations

import mlx.core as mx

from sglcore.checkpoint.model_config import MoeConfig
from sglcore.checkpoint.moe_spec import RoutingSpec
from sglcore_mlx.layers.linear import Packed
from sglcore_mlx.layers.mlp import GATE_AND_UP
from sglcore_mlx.layers.moe import GatedExperts, SparseMoe
from sglcore_mlx.layers.scope import Scope


def limited_silu_and_mul(gate_up: mx.array, limit: float) -> mx.array:
    """Return silu(min(gate, limit)) * clip(up, -limit, limit), [..., I], of concatenated gate and
    up, [..., 2 I]."""
    size = gate_up.shape[-1] // 2
    gate, up = mx.minimum(gate_up[..., :size], limit), mx.clip(gate_up[..., size:], -limit, limit)
    return gate * mx.sigmoid(gate) * up


class LimitedMlp:
    """Implements `layer_kinds.Build.limited_mlp`."""

    __slots__ = ("_limit", "down_proj", "gate_up_proj")

    def __init__(self, build: Scope, size: int, limit: float) -> None:
        hidden = build.config.hidden_size
        self.gate_up_proj = build.fused([(name, size) for name in GATE_AND_UP], hidden)
        self.down_proj = build.linear("down_proj", size, hidden)
        self._limit = limit

    def __call__(self, hidden: mx.array) -> mx.array:
        """Map [T, H] to [T, H]."""
        return self.down_proj(limited_silu_and_mul(self.gate_up_proj(hidden), self._limit))


class LimitedExperts(GatedExperts):
    """`GatedExperts` with factors within a limit."""

    __slots__ = ("_limit",)

    def __init__(self, build: Scope, moe: MoeConfig, parts: tuple[str, ...], limit: float) -> None:
        super().__init__(build, moe, parts)
        self._limit = limit

    def __call__(self, x: mx.array, experts: mx.array, is_sorted: bool) -> mx.array:
        """Implements `ExpertLinear.__call__`: map x [..., 1, H] to [..., K, 1, H]."""
        inner = limited_silu_and_mul(self.gate_up_proj(x, experts, is_sorted), self._limit)
        return self.down_proj(inner, experts, is_sorted)


class SqrtSoftplusMoe:
    """An MoE block with the weights sqrt(softplus(logit)), divided by the sum of those selected,
    and scaled. It selects the largest with an additional bias, or those that a table has for the
    token's id."""

    __slots__ = ("_bias", "_gate", "_moe", "_sparse", "_table")

    def __init__(self, build: Scope, moe: MoeConfig, routing: RoutingSpec, experts: LimitedExperts) -> None:
        """`routing.score`: "table", or "sqrtsoftplus"."""
        self._gate, scope = build.wide(routing.gate, moe.num_experts), build.at(routing.gate)
        self._bias = self._table = None
        if routing.score == "table":
            self._table = _table(scope, build.config.vocab_size, moe.experts_per_token)
        else:
            self._bias = scope.parameter("e_score_correction_bias", moe.num_experts, offset=0.0)
        self._moe, self._sparse = moe, SparseMoe(self._no_route, experts)

    def __call__(self, hidden: mx.array, input_ids: mx.array | None = None) -> mx.array:
        """Map hidden [T, H] to [T, H]; the table is read at input_ids int [T]."""
        scores, k = mx.sqrt(mx.logaddexp(self._gate(hidden), 0)), self._moe.experts_per_token
        if self._bias is not None:
            experts = mx.argpartition(scores + self._bias, kth=-k, axis=-1)[:, -k:]
        else:
            assert self._table is not None and input_ids is not None
            experts = self._table[input_ids]
        weights = mx.take_along_axis(scores, experts, axis=-1)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20) * self._moe.scale
        return self._sparse.mixed(hidden, weights.astype(hidden.dtype), experts)

    def _no_route(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        raise AssertionError("the experts of this block are selected in __call__")


def _table(scope: Scope, rows: int, columns: int) -> mx.array:
    """Take the table of experts by token id, uint32 [rows, columns]; checkpoints have it in int64
    or int32."""
    name = f"{scope.prefix}tid2eid"
    return scope.weights.keep(scope.weights.take_integers(name, rows, columns).astype(mx.uint32))


class GroupedLinear:
    """Implements `layer_kinds.Build.grouped`: a linear layer for each group of inputs."""

    __slots__ = ("_groups", "_inputs", "_weight")

    def __init__(self, build: Scope, name: str, groups: int, inputs: int, outputs: int) -> None:
        form = build.form_of(name)
        self._groups, self._inputs = groups, inputs
        if form is None:
            weight = build.weights.keep(build.weights.take(f"{build.prefix}{name}.weight", groups * outputs, inputs))
            view = build.weights.view(weight.reshape(groups, outputs, inputs).swapaxes(1, 2))
            self._weight: mx.array | Packed = view
            return
        packed = build.packed([(name, (groups * outputs,))], inputs, form)
        given = (packed.weight, packed.scales, packed.biases)
        parts = [None if each is None else build.weights.view(each.reshape(groups, outputs, -1)) for each in given]
        assert parts[0] is not None and parts[1] is not None
        self._weight = Packed(parts[0], parts[1], parts[2], form)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [T, groups * inputs] to [T, groups * outputs]."""
        grouped = x.reshape(x.shape[0], self._groups, self._inputs).swapaxes(0, 1)
        made = self._weight.product(grouped) if isinstance(self._weight, Packed) else grouped @ self._weight
        return made.swapaxes(0, 1).reshape(x.shape[0], -1)
