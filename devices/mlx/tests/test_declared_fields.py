"""Tests that a field declared by one line in each of the two batch classes reaches a model, as it
does with torch, and is padded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from devices.mlx.tests import test_steps
from sglcore.step.batch_field import Axis, batch_field, batch_record, sentinel
from sglcore.step.emitting_rows import within
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx import inputs, stepper, worker_bring_up
from sglcore_mlx.forward_batch import ForwardBatch


@dataclass(slots=True)
class WiderSchedule(ScheduleBatch):
    """The host batch with two more fields."""

    marks: NDArray[np.int32] | None = None
    weights: NDArray[np.float32] | None = None


@batch_record(WiderSchedule)
class WiderBatch(ForwardBatch):
    """The device batch with the same fields."""

    marks: mx.array = batch_field(axis=Axis.REQUESTS, dtype="int32", padding=sentinel(-7), read="marks")
    weights: mx.array = batch_field(axis=Axis.TOKENS, dtype="float32", padding=sentinel(0.5), read="weights")


def widened(batch: ScheduleBatch) -> WiderSchedule:
    """Return the same step with marks 100 * slot + length, and weights position + 0.5 of each
    token."""
    positions = np.repeat(batch.prefix_lens, np.diff(batch.token_offsets)) + within(batch.token_offsets)
    wider = {"marks": 100 * batch.slots + batch.seq_lens, "weights": positions.astype(np.float32) + np.float32(0.5)}
    return WiderSchedule(**{item.name: getattr(batch, item.name) for item in fields(batch)}, **wider)


class Weighing:
    """A model that is correct only if every token has its own mark and weight."""

    def __init__(self, model: Any) -> None:
        self.config, self.dtype, self.layers, self.states = model.config, model.dtype, model.layers, model.states
        self.logits, self.sliced_layers, self.sliced = model.logits, 0, model.sliced
        self.advances, self.against_norm_inputs = model.advances, model.against_norm_inputs
        self.with_norm_inputs = model.with_norm_inputs
        self.num_bytes, self.quantization, self.classify = model.num_bytes, model.quantization, model.classify
        self._model = model

    def __call__(self, batch: ForwardBatch) -> mx.array:
        """Return the hidden states, multiplied by a factor that is 1 for correct fields."""
        assert isinstance(batch, WiderBatch)
        marks = batch.marks - 100 * batch.req_pool_indices - batch.seq_lens + 1
        if batch.extend_start_loc is not None:
            rows = (mx.arange(batch.num_tokens)[:, None] >= batch.extend_start_loc[None]).sum(axis=1) - 1
            marks = marks[rows]
        return self._model(batch) * (marks * (batch.weights - batch.positions + 0.5))[:, None]


@contextmanager
def wider(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make workers use steppers with the wider batch, and models that read it."""

    class WiderStepper(stepper.Stepper):
        def __init__(self, model: Any, *given: Any, **options: Any) -> None:
            super().__init__(Weighing(model), *given, **options, batch_type=WiderBatch)

        def launch(self, batch: ScheduleBatch) -> Any:
            return super().launch(widened(batch))

    with patch.context() as inside:
        inside.setattr(worker_bring_up, "Stepper", WiderStepper)
        yield


@pytest.mark.parametrize("graph", ["compiled", "off"])
def test_declared_fields_reach_the_model(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = test_steps.run({"temperature": 0.0}, graph="off")
    with wider(monkeypatch):
        found, paths = test_steps.run({"temperature": 0.0}, graph=graph)
    test_steps.assert_same(found, wanted)
    assert any(path.startswith("compiled:4") for path in paths) is (graph == "compiled")


def test_declared_fields_of_a_request_stand_beside_each_token_that_is_verified() -> None:
    from devices.mlx.tests.test_inputs import SIZES, batch_of
    from sglcore.worker.schedule_batch import ForwardMode
    from sglcore_mlx.pool import PageTable

    batch = widened(batch_of([1, 1], [6, 2], ForwardMode.DECODE))
    batch.cell_limits = np.array([9, 8], np.int32)
    made = inputs.wide_inputs(WiderBatch, batch, PageTable(SIZES), 3, 3, 2)
    assert made.fields["marks"].tolist() == [107, 107, 203, 203, -7, -7]
    assert (made.slots.tolist(), made.limits.tolist(), made.nodes) == ([*batch.slots.tolist(), 0], [9, 8, 0], None)
    assert made.page_table.shape == (3, 3) and not set(made.fields) & {"req_pool_indices", "seq_lens", "positions"}


def test_a_field_that_is_lost_on_the_way_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: decode steps have the weights of the step before."""
    wanted, _ = test_steps.run({"temperature": 0.0}, graph="off")
    monkeypatch.setattr(stepper, "decode_inputs", stale(inputs.decode_inputs))
    with wider(monkeypatch):
        found, _ = test_steps.run({"temperature": 0.0}, graph="off")
    with pytest.raises(AssertionError):
        test_steps.assert_same(found, wanted)


def stale(right: Any) -> Any:
    """Return `right` with the weights of one step earlier."""

    def wrong(*given: Any) -> Any:
        made = right(*given)
        made.fields["weights"] -= np.float32(1)
        return made

    return wrong


def test_padding_rows_hold_what_was_declared() -> None:
    from devices.mlx.tests.test_inputs import SIZES, batch_of
    from sglcore.worker.schedule_batch import ForwardMode
    from sglcore_mlx.pool import PageTable

    batch = widened(batch_of([1, 1], [6, 2], ForwardMode.DECODE))
    given = inputs.decode_inputs(WiderBatch, batch, PageTable(SIZES), 4, 3).fields
    assert (given["marks"].tolist(), given["weights"].tolist()) == ([107, 203, -7, -7], [6.5, 2.5, 0.5, 0.5])
    assert (given["marks"].dtype, given["weights"].dtype) == (np.int32, np.float32)
