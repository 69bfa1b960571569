"""Defects planted where proposals are verified: each changes a text, a number of steps, or what a device may touch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.worker import SpeculativeWorker, Verified
from sglcore.sampling.state import SampledTokens
from tests.laws.test_speculative_laws import Ran, check_same, engines, folder, plain, run

__all__ = ["engines", "folder", "plain"]


class AcceptsOneMore(SpeculativeWorker):
    def _accept(self, step: Verified, sampled: SampledTokens[Tensor]) -> tuple[Tensor, Tensor]:
        accepted, proposed = super()._accept(step, sampled)
        return (accepted + 1).clamp(max=step.usable.shape[1] - 1), proposed


class AcceptsPastTheFirstWrong(SpeculativeWorker):
    def _accept(self, step: Verified, sampled: SampledTokens[Tensor]) -> tuple[Tensor, Tensor]:
        _, proposed = super()._accept(step, sampled)
        drawn = sampled.token_ids.view(step.usable.shape)
        right = (drawn[:, :-1] == step.proposals) & step.usable[:, 1:]
        return right.sum(1, dtype=torch.int32), proposed


class ForgetsToAdvance(SpeculativeWorker):
    def _advance_verified(self, batch: Any, staged: Any, step: Verified, *given: Any) -> None:
        super()._advance_verified(batch, staged, replace(step, lengths=step.lengths - 1), *given)


class RootOfTheLastRow(SpeculativeWorker):
    def _advance_verified(
        self, batch: Any, staged: Any, step: Verified, sampled: Any, accepted: Tensor, hidden: Any
    ) -> None:
        super()._advance_verified(batch, staged, step, sampled, accepted, hidden)
        self._table.publish(step.slots, sampled.token_ids.view(step.usable.shape)[:, -1].contiguous())


class PositionsOfTheRoot(SpeculativeWorker):
    def _place(self, staged: ForwardBatch, limits: Tensor, width: int) -> Verified:
        step = super()._place(staged, limits, width)
        staged.positions.view(-1, width)[:, 1:] = staged.positions.view(-1, width)[:, :1]
        return step


class LengthsOfTheRoot(SpeculativeWorker):
    def _place(self, staged: ForwardBatch, limits: Tensor, width: int) -> Verified:
        step = super()._place(staged, limits, width)
        staged.seq_lens.view(-1, width)[:, 1:] = staged.seq_lens.view(-1, width)[:, :1]
        return step


class ProposalsOfTheNextSlot(SpeculativeWorker):
    def _propose(self, rows: DraftRows) -> None:
        super()._propose(rows)
        if len(rows.slots) > 1:
            self._proposals[rows.slots] = self._proposals[rows.slots].roll(1, 0)


TEXTS = (
    AcceptsOneMore,
    AcceptsPastTheFirstWrong,
    ForgetsToAdvance,
    RootOfTheLastRow,
    PositionsOfTheRoot,
    LengthsOfTheRoot,
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
