"""The gated feed-forward block that clamps its factors to a limit."""

from __future__ import annotations

from torch import Tensor

from sglcore.layers.build_scope import Scope
from sglcore.layers.linear import Linear
from sglcore.layers.mlp import GATE_AND_UP
from sglcore.runtime.kernels.table import KernelTable


class LimitedMlp:
    """down(silu(min(gate(x), limit)) * clamp(up(x), -limit, limit)), with a weight that stacks gate
    and up.
    """

    __slots__ = ("_activate", "_limit", "down_proj", "gate_up_proj")

    def __init__(self, build: Scope, size: int, limit: float) -> None:
        hidden = build.config.hidden_size
        self.gate_up_proj = Linear(build, tuple((part, size) for part in GATE_AND_UP), hidden)
        self.down_proj = Linear(build, (("down_proj", hidden),), size)
        self._activate, self._limit = build.kernel(KernelTable.limited_silu_and_mul, build.rows(2 * size), limit), limit

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        return self.down_proj(self._activate(self.gate_up_proj(hidden), self._limit))
