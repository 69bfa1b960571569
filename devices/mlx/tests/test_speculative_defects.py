"""Tests with defects planted in the verification of draft tokens: each changes the output or the
number of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.speculating import Ran, check_same, run, stepper_of
from devices.mlx.tests.test_speculative import Engines, constrain, engines, folder, plain, wanted
from sglcore.schedule.batch_builder import BatchBuilder
from sglcore_mlx.inputs import WideInputs
from sglcore_mlx.sample_step import SampleStep
from sglcore_mlx.speculative import stepper as module
from sglcore_mlx.speculative.stepper import SpeculativeStepper
from sglcore_mlx.speculative.verify import Placed, Runs

__all__ = ["engines", "folder", "plain", "wanted"]

TOKENS = 4


class AcceptsOneMore(SpeculativeStepper):
    def _accept(self, sampled: Any, rows: Any, placed: Any) -> Runs:
        runs = super()._accept(sampled, rows, placed)
        return replace(runs, accepted=mx.minimum(runs.accepted + 1, TOKENS))


class ForgetsToAdvance(SpeculativeStepper):
    def _accept(self, sampled: Any, rows: Any, placed: Any) -> Runs:
        runs = super()._accept(sampled, rows, placed)
        self._drafts.lengths[rows.slots] = runs.lengths - 1
        return runs


class RootOfTheLastRow(SpeculativeStepper):
    def _accept(self, sampled: Any, rows: Any, placed: Any) -> Runs:
        runs = super()._accept(sampled, rows, placed)
        self._state.last[rows.slots] = sampled.token_ids.reshape(placed.ids.shape)[:, -1]
        return runs


class PositionsOfTheRoot(SpeculativeStepper):
    def _place(self, *given: Any) -> Placed:
        made = super()._place(*given)
        return Placed(made.ids, mx.broadcast_to(made.positions[:, :1], made.positions.shape), made.owners)


class PositionsShifted(SpeculativeStepper):
    def _place(self, *given: Any) -> Placed:
        made = super()._place(*given)
        return Placed(made.ids, mx.where(made.is_usable, made.positions + 1, 0), made.owners)


class SeesAhead(SpeculativeStepper):
    """A token attends to the tokens that are verified after it."""

    def _place(self, *given: Any) -> Placed:
        return Ahead(*(getattr(super(SeesAhead, self)._place(*given), name) for name in ("ids", "positions", "owners")))


class Ahead(Placed):
    __slots__ = ()

    @property
    def lengths(self) -> mx.array:
        most = self.positions.max(axis=1, keepdims=True)
        return mx.broadcast_to(most, self.positions.shape).reshape(-1) + 1

    def first(self, count: int) -> Placed:
        return Placed(self.ids[:count], self.positions[:count], self.owners[:count])


class WritesPastItsCells(SpeculativeStepper):
    """Tokens without a KV slot are verified too."""

    def _place(self, slots: mx.array, limits: mx.array, *given: Any) -> Placed:
        return super()._place(slots, limits + TOKENS, *given)

    def _accept(self, sampled: Any, rows: Any, placed: Any) -> Runs:
        return super()._accept(sampled, module.Rows(rows.slots, rows.limits + TOKENS, rows.most), placed)


DEFECTS = (
    AcceptsOneMore,
    ForgetsToAdvance,
    RootOfTheLastRow,
    PositionsOfTheRoot,
    PositionsShifted,
    SeesAhead,
)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_changes_a_text(engines: Engines, wanted: Ran, defect: type[SpeculativeStepper]) -> None:
    engine = engines("guessing", wanted)
    stepper_of(engine).__class__ = defect
    with pytest.raises((AssertionError, ValueError)):
        check_same(run(engine, overlap=False), wanted)


def test_tokens_without_cells_are_not_verified(engines: Engines, wanted: Ran) -> None:
    """With small pages in random order, the KV slots past a request's own belong to another
    request."""
    given: dict[str, Any] = {"pages": 36, "scramble": 4}
    check_same(run(engines("oracle", wanted), **given), wanted)
    engine = engines("oracle", wanted)
    stepper_of(engine).__class__ = WritesPastItsCells
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_same(run(engine, **given), wanted)


class ProposalsOfTheNextSlot(SpeculativeStepper):
    def _propose(self, slots: mx.array, *given: Any) -> None:
        super()._propose(slots, *given)
        table = self._drafts.proposals
        table[slots] = mx.concatenate([table[slots][-1:], table[slots][:-1]])


class HistoryWithoutTheRoot(SpeculativeStepper):
    def _propose(self, slots: mx.array, lengths: mx.array, roots: mx.array, most: int) -> None:
        super()._propose(slots, lengths, roots * 0, most)


@pytest.mark.parametrize("defect", [ProposalsOfTheNextSlot, HistoryWithoutTheRoot], ids=lambda each: each.__name__)
def test_wrong_proposals_cost_steps_and_no_text(
    engines: Engines, wanted: Ran, defect: type[SpeculativeStepper]
) -> None:
    right = run(engines("oracle", wanted), overlap=False)
    engine = engines("oracle", wanted)
    stepper_of(engine).__class__ = defect
    found = run(engine, overlap=False)
    check_same(found, wanted)
    assert found.decodes > right.decodes


class PenaltiesOfTheRoot(SampleStep):
    def _draw(self, logits: mx.array, positions: mx.array, arrived: Any, history: mx.array | None) -> Any:
        if history is None or logits.shape[0] % (TOKENS + 1):
            return super()._draw(logits, positions, arrived, history)
        columns = mx.arange(history.shape[1])[None]
        # The entries after the root are not tokens.
        hidden = mx.where(columns < _of_the_root(positions)[:, None], history, -1)
        return super()._draw(logits, positions, arrived, hidden)


class KeysOfTheRoot(SampleStep):
    def _draw(self, logits: mx.array, positions: mx.array, arrived: Any, history: mx.array | None) -> Any:
        is_wide = not logits.shape[0] % (TOKENS + 1)
        return super()._draw(logits, _of_the_root(positions) if is_wide else positions, arrived, history)


class KeysOffByOne(SampleStep):
    def _draw(self, logits: mx.array, positions: mx.array, arrived: Any, history: mx.array | None) -> Any:
        is_wide = not logits.shape[0] % (TOKENS + 1)
        return super()._draw(logits, positions + is_wide, arrived, history)


def _of_the_root(positions: mx.array) -> mx.array:
    rows = positions.reshape(-1, TOKENS + 1)
    return mx.broadcast_to(rows[:, :1], rows.shape).reshape(-1)


@pytest.mark.parametrize("defect", [PenaltiesOfTheRoot, KeysOfTheRoot, KeysOffByOne], ids=lambda each: each.__name__)
def test_a_defect_of_the_draw_changes_a_text(engines: Engines, wanted: Ran, defect: type[SampleStep]) -> None:
    engine = engines("guessing", wanted)
    stepper_of(engine)._sampling.__class__ = defect
    with pytest.raises(AssertionError):
        check_same(run(engine), wanted)


def _of_the_token_before(batch: Any) -> None:
    later = np.flatnonzero(batch.mask_nodes)
    batch.masks[later] = batch.masks[later - 1]


def _at_the_root(batch: Any) -> None:
    if batch.change_nodes is not None:
        batch.change_nodes = np.zeros_like(batch.change_nodes)


@pytest.mark.parametrize("defect", [_of_the_token_before, _at_the_root])
def test_masks_and_changes_of_another_token_change_a_text(
    engines: Engines, plain: Any, wanted: Ran, defect: Callable[[Any], None]
) -> None:
    class Builder(BatchBuilder):
        def _add_masks(self, batch: Any) -> None:
            super()._add_masks(batch)
            if batch.masks is not None and batch.mask_nodes is not None:
                defect(batch)

    bound = run(plain, prepare=constrain)
    engine = engines("guessing", bound)
    session = engine.session()
    session.scheduler._builder.__class__ = Builder
    with pytest.raises(AssertionError):
        check_same(run(engine, prepare=constrain, session=session), bound)


def test_padding_that_writes_to_a_living_cell_is_caught(
    engines: Engines, wanted: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = module.wide_inputs

    def wrong(batch_type: Any, batch: Any, *given: Any) -> WideInputs:
        made = right(batch_type, batch, *given)
        made.slots[batch.batch_size :], made.limits[batch.batch_size :] = batch.slots[0], batch.cell_limits[0]
        made.page_table[batch.batch_size :] = made.page_table[0]
        return made

    monkeypatch.setattr(module, "wide_inputs", wrong)
    monkeypatch.setattr(module.SpeculativeStepper, "_place", _with_other_ids)
    with pytest.raises(AssertionError):
        check_same(run(engines("guessing", wanted, graph="compiled"), stagger=2), wanted)


def _with_other_ids(self: Any, slots: mx.array, *given: Any) -> Placed:
    """Gives rows that repeat the first row's slot, as padding rows do, another token."""
    made = module.place(self._state.last, self._drafts, slots, *given)
    repeats = (mx.arange(slots.shape[0]) > 0) & (slots == slots[0])
    return Placed(mx.where(repeats[:, None], 7, made.ids), made.positions, made.owners)
