"""Broken devices that fail only when several tokens of a request are in one decode step. A defect
is a function from a class of the runtime to a subclass; its docstring is the text of its
`Mutant`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.conformance.mutant import Mutant, become, in_runtime, words_of
from sglcore.runtime.attention.contract import AttentionPlan
from sglcore.runtime.forward_batch import ForwardBatch


def by_slot(batch: ForwardBatch) -> ForwardBatch:
    """Return a copy of the batch with every row as long as the longest row of its request slot; on
    the host, as the longest of all."""
    slots, lengths = batch.req_pool_indices, batch.seq_lens
    is_same = slots[:, None] == slots[None, :]
    longest = (lengths[None, :] * is_same).amax(1).to(lengths.dtype)
    host = None if batch.seq_lens_cpu is None else np.full_like(batch.seq_lens_cpu, batch.seq_lens_cpu.max())
    return replace(batch, seq_lens=longest, seq_lens_cpu=host)


def sees_ahead(base: Any) -> type:
    """A row of a request sees the tokens that are verified after it."""

    class SeesAhead(base):
        __slots__ = ()

        def plan(self, batch: ForwardBatch) -> AttentionPlan:
            return super().plan(by_slot(batch) if batch.extend_seq_lens is None else batch)

        def attend(self, q: Tensor, layer: Any, batch: ForwardBatch, plan: Any) -> Tensor:
            return super().attend(q, layer, by_slot(batch) if batch.extend_seq_lens is None else batch, plan)

    return SeesAhead


def row_by_row(base: Any) -> type:
    """A token reads only entries from before its step, not those of earlier tokens in it."""

    class RowByRow(base):
        __slots__ = ()

        def plan(self, batch: ForwardBatch) -> AttentionPlan:
            return super().plan(replace(batch, width=None))

        def refresh(self, plan: Any, batch: ForwardBatch) -> Any:
            return super().refresh(plan, replace(batch, width=None))

    return RowByRow


def keeps_wrong_ones(base: Any) -> type:
    """One draft token more than was accepted is kept."""

    class KeepsWrongOnes(base):
        def _accept(self, staged: Any, rows: Any, sampled: Any) -> Tensor:
            runs = super()._accept(staged, rows, sampled)
            runs[0] = (runs[0] + 1).clamp(max=sampled.token_ids.shape[0] // rows.slots.shape[0] - 1)
            return runs

    return KeepsWrongOnes


def stands_still(base: Any) -> type:
    """After an accepted draft token, the next step begins one KV slot too early."""

    class StandsStill(base):
        def _accept(self, staged: Any, rows: Any, sampled: Any) -> Tensor:
            runs = super()._accept(staged, rows, sampled)
            self._lengths[rows.slots] -= (runs[0] > 0).to(torch.int32)
            return runs

    return StandsStill


def takes_in_all(base: Any) -> type:
    """A request's state includes all draft tokens, accepted or rejected."""

    class TakesInAll(base):
        def take_in(self, slots: Tensor, counts: Tensor, width: int) -> None:
            super().take_in(slots, torch.full_like(counts, width), width)

    return TakesInAll


def goes_on_at_once(base: Any) -> type:
    """The state includes the verified tokens before it is known which are accepted."""

    class GoesOnAtOnce(base):
        def runs(self, slots: Tensor, width: int) -> Any:
            runs = super().runs(slots, width)
            return runs._replace(targets=runs.slots)

    return GoesOnAtOnce


def _of_states(defect: Any) -> Mutant:
    def change(pools: Any) -> Any:
        if pools.states is not None:
            become(pools.states, defect)
        return pools

    return in_runtime(*words_of(defect), pools=change)


def _mutant(step: str, defect: Any) -> Mutant:
    return in_runtime(*words_of(defect), **{step: lambda built: become(built, defect)})


SEES_AHEAD = _mutant("attention", sees_ahead)
ROW_BY_ROW = _mutant("attention", row_by_row)
KEEPS_WRONG_ONES = _mutant("worker", keeps_wrong_ones)
STANDS_STILL = _mutant("worker", stands_still)
TAKES_IN_ALL = _of_states(takes_in_all)
GOES_ON_AT_ONCE = _of_states(goes_on_at_once)
