"""Defects planted in verification: each changes a text, a number of steps, or memory that it may
not touch."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker, VerifiedRows
from tests.laws.speculation.test_speculative_laws import engines, folder, plain, run
from tests.laws.speculation.texts import Ran, check_same

__all__ = ["engines", "folder", "plain"]


class AcceptsOneMore(SpeculativeWorker):
    def _accept(self, staged: Any, rows: Any, sampled: Any) -> Tensor:
        runs = super()._accept(staged, rows, sampled)
        runs[0] = (runs[0] + 1).clamp(max=sampled.token_ids.shape[0] // rows.slots.shape[0] - 1)
        return runs


class ForgetsToAdvance(SpeculativeWorker):
    def _accept(self, staged: Any, rows: Any, sampled: Any) -> Tensor:
        runs = super()._accept(staged, rows, sampled)
        self._lengths[rows.slots] -= 1
        return runs


class RootOfTheLastRow(SpeculativeWorker):
    def _accept(self, staged: Any, rows: Any, sampled: Any) -> Tensor:
        runs = super()._accept(staged, rows, sampled)
        self._table.publish(rows.slots, sampled.token_ids.view(rows.slots.shape[0], -1)[:, -1].contiguous())
        return runs


class PositionsOfTheRoot(SpeculativeWorker):
    def _place(self, staged: ForwardBatch, rows: VerifiedRows, nodes: Tensor | None) -> None:
        super()._place(staged, rows, nodes)
        positions = staged.positions.view(rows.slots.shape[0], -1)
        positions[:, 1:] = positions[:, :1]


class LengthsOfTheRoot(SpeculativeWorker):
    def _place(self, staged: ForwardBatch, rows: VerifiedRows, nodes: Tensor | None) -> None:
        super()._place(staged, rows, nodes)
        lengths = staged.seq_lens.view(rows.slots.shape[0], -1)
        lengths[:, 1:] = lengths[:, :1]


class LimitsOfTheStepBefore(SpeculativeWorker):
    def _arrays(self, batch: Any, inputs: Any, *given: Any) -> Any:
        if self._rows is not None and self._rows.composition == batch.composition:
            batch.cell_limits = self._rows.cell_limits
        return super()._arrays(batch, inputs, *given)


class ProposalsOfTheNextSlot(SpeculativeWorker):
    def _propose(self, rows: DraftRows) -> None:
        super()._propose(rows)
        if len(rows.slots) > 1:
            self._proposals[rows.slots] = self._proposals[rows.slots].roll(1, 0)


TEXTS = (
    AcceptsOneMore,
    ForgetsToAdvance,
    RootOfTheLastRow,
    PositionsOfTheRoot,
    LengthsOfTheRoot,
    LimitsOfTheStepBefore,
)


@pytest.mark.needs("device")
@pytest.mark.parametrize("mutant", TEXTS, ids=lambda mutant: mutant.__name__)
def test_a_defect_changes_a_text(engines: Any, plain: Ran, mutant: type[SpeculativeWorker]) -> None:
    engine = engines("guessing", plain, graph="off", overlap=False)
    engine.worker.__class__ = mutant
    with pytest.raises((AssertionError, ValueError)):
        check_same(run(engine), plain)


@pytest.mark.needs("device")
def test_proposals_of_another_request_cost_steps_and_no_text(engines: Any, plain: Ran) -> None:
    right = run(engines("oracle", plain, graph="off", overlap=False))
    engine = engines("oracle", plain, graph="off", overlap=False)
    engine.worker.__class__ = ProposalsOfTheNextSlot
    found = run(engine)
    check_same(found, plain)
    assert found.decodes > right.decodes
