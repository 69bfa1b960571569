"""Shadow mode: every Nth replay also runs eagerly on the same inputs, and the hidden states must be
equal within TOLERANCE; else ShadowMismatch is raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext
from sglcore.runtime.graphs.graph_backend import Step
from sglcore.runtime.memory.states import StatePool

TOLERANCE = MappingProxyType({torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2})
"""Allowed error of a row, relative to its largest magnitude, which counts as at least 1e-3: padding
changes only the order of sums.
"""


class ShadowMismatch(RuntimeError):
    """A replay and the eager forward of the same inputs differ."""


class Shadow:
    """Compares every Nth replay with an eager forward of the same inputs. `replays` and `compared`
    are counters. The constructor raises ValueError for an N below 1.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"shadow compares every Nth replay; N is {every}, it must be at least 1")
        self.every = every
        self.replays = 0
        self.compared = 0

    def is_due(self) -> bool:
        """Count one replay; return whether to compare it."""
        self.replays += 1
        return self.replays % self.every == 0

    def compare(self, path: str, replayed: Tensor, eager: Tensor) -> None:
        """Compare hidden states [T, H]; raise ShadowMismatch if a row differs by more than
        TOLERANCE allows.

        Waits for the device.
        """
        self.compared += 1
        error = _difference(replayed, eager).amax(dim=1)
        limit = TOLERANCE[eager.dtype] * eager.float().nan_to_num().abs().amax(dim=1).clamp(min=1e-3)
        differing = (~(error <= limit)).nonzero()
        if not len(differing):
            return
        row = int(differing[0, 0])
        raise ShadowMismatch(
            f"the replay of {path} differs from the eager forward of the same inputs, first in row {row} of "
            f"{len(error)}, by at most {float(error.nan_to_num(torch.inf).max()):.3g} (allowed there: "
            f"{float(limit[row]):.3g}); --graph off runs without graphs, shadow=0 stops comparing"
        )


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """Return |one - other| in float32; 0 where both are NaN or the same infinity."""
    one, other = one.float(), other.float()
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs())


@dataclass(frozen=True, slots=True)
class Held:
    """A copy of what a forward reads and overwrites, except KV slots: `write` restores it, so that
    a second forward reads the same inputs.

    `states` are those of `slots` int[B]; `rows` are other tensors, each with row indices and their
    values. For models with recurrent layers these rows include the kept state inputs of verified
    tokens.
    """

    pool: StatePool | None
    slots: Tensor
    states: list[Tensor]
    rows: list[tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def of(cls, context: ForwardContext, batch: ForwardBatch) -> Held:
        """Copy the states and rows that a forward of `batch` overwrites; its inputs are on the
        device.
        """
        pool, rows = context.state_pool, list(context.attn_backend.rows_of(batch))
        if pool is not None and batch.run_rows is not None:
            rows += pool.rows_of(batch.run_rows)
        return cls._read(pool, batch.req_pool_indices, [(tensor, places, tensor) for tensor, places in rows])

    @classmethod
    def _read(cls, pool: StatePool | None, slots: Tensor, rows: list[tuple[Tensor, Tensor, Tensor]]) -> Held:
        states = [] if pool is None else pool.read(slots)
        return cls(pool, slots, states, [(tensor, places, tensor[places]) for tensor, places, _ in rows])

    def now(self) -> Held:
        """Return a copy of the current values of the same slots and rows."""
        return self._read(self.pool, self.slots, self.rows)

    def write(self) -> None:
        """Write the copied values back to the slots and rows that they were read from."""
        if self.pool is not None:
            self.pool.write(self.slots, self.states)
        for tensor, places, values in self.rows:
            tensor[places] = values


def leaving_cells(context: ForwardContext, batch: ForwardBatch, forward: Step) -> Tensor:
    """Run `forward`, restore the keys and values that the batch's KV slots had before, and return
    its result.

    Otherwise the eager values, which differ in the last bits, would replace those of the replay.
    """
    kept = []
    for layer in context.layers:
        pool, cells = context.attn_backend.cells_of(layer, batch)
        if layer.stores and cells is not None:
            kept.append((pool, layer.layer_id, cells, *pool.read_cells(layer.layer_id, cells)))
    hidden = forward()
    for pool, layer_id, cells, keys, values in kept:
        pool.write_cells(layer_id, cells, keys, values)
    return hidden
