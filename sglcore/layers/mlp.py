"""The feed-forward block of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglcore.layers.build_scope import Scope
from sglcore.layers.linear import Linear
from sglcore.runtime.kernels.table import KernelTable

Activate = Callable[[Tensor], Tensor]
"""[T, 2 I], gate and up concatenated, to [T, I]."""
GATE_AND_UP = ("gate_proj", "up_proj")


class GatedMlp:
    """down(activation(gate(x)) * up(x)), with the configuration's activation."""

    __slots__ = ("_activate", "_gated_linear", "down_proj", "gate_up_proj")

    def __init__(self, build: Scope, intermediate_size: int, bias: bool = False, fused: str = "") -> None:
        """`fused` names one weight of the checkpoint with the rows of gate, then those of up;
        empty: `gate_proj` and `up_proj`. `bias`: all projections have one.
        """
        hidden_size, is_silu = build.config.hidden_size, build.config.hidden_act == "silu"
        parts = ((fused, 2 * intermediate_size),) if fused else tuple((p, intermediate_size) for p in GATE_AND_UP)
        self.gate_up_proj = Linear(build, parts, hidden_size, bias)
        self.down_proj = Linear(build, (("down_proj", hidden_size),), intermediate_size, bias)
        self._activate = _activation(build, build.config.hidden_act, intermediate_size)
        given = build.rows(hidden_size), self.gate_up_proj.weight
        self._gated_linear = None if bias or not is_silu else build.kernel(KernelTable.gated_linear, *given)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        if self._gated_linear is not None:
            return self.down_proj(self._gated_linear(hidden, self.gate_up_proj.weight))
        return self.down_proj(self._activate(self.gate_up_proj(hidden)))


def _activation(build: Scope, name: str, size: int) -> Activate:
    if name != "gelu":
        entry = KernelTable.silu_and_mul if name == "silu" else KernelTable.gelu_tanh_and_mul
        return build.kernel(entry, build.rows(2 * size))
    gelu = build.kernel(KernelTable.gelu, build.rows(size))

    def gelu_and_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gelu(gate.contiguous()) * up

    return gelu_and_mul
