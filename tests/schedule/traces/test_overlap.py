"""Submitted batches are isolated from later changes, and are kept alive exactly until they are
collected."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from sglcore.schedule.step_loop import Loop
from sglcore.schedule.steps_in_flight import (
    BatchRecord,
    InFlight,
    overlap_forward_isolation,
    record_batch_in_overlap,
)
from sglcore.worker.model_worker import Ticket
from sglcore.worker.schedule_batch import CaptureHiddenMode, ScheduleBatch
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import FakeWorker, Violation


class Collectable:
    """A ticket payload that a weak reference can watch."""


class KeepingWorker(FakeWorker):
    """Keeps only weak references to its inputs."""

    def submit(self, batch: ScheduleBatch) -> Ticket:
        super().submit(batch)
        self.seen.clear()
        self.batch_arrays = weakref.ref(batch.seq_lens)
        payload = Collectable()
        self.payload = weakref.ref(payload)
        return Ticket(batch.step, payload)


def planned(drive: Drive) -> ScheduleBatch:
    """The next batch; None is an error."""
    batch = drive.scheduler.next_batch()
    assert batch is not None
    return batch


def test_the_forward_sees_a_copy_of_every_array() -> None:
    drive = Drive()
    drive.add("a", 3, None)
    batch = planned(drive)
    with overlap_forward_isolation(batch) as view:
        for name in ("slots", "seq_lens", "input_ids", "new_pages", "page_counts", "prefix_lens"):
            assert not np.shares_memory(getattr(view, name), getattr(batch, name))
    assert view.sampling is not batch.sampling


def test_one_shots_move_to_the_forward_and_come_back_if_it_fails() -> None:
    drive = Drive()
    drive.add("a", 3, None)
    batch = planned(drive)
    batch.capture_hidden_mode.put(CaptureHiddenMode.FULL)
    with pytest.raises(RuntimeError), overlap_forward_isolation(batch) as view:
        assert view.capture_hidden_mode.is_set and not batch.capture_hidden_mode.is_set
        raise RuntimeError
    assert batch.capture_hidden_mode.take() is CaptureHiddenMode.FULL
    with overlap_forward_isolation(batch) as view:
        view.capture_hidden_mode.put(CaptureHiddenMode.LAST)
    assert not batch.capture_hidden_mode.is_set


@pytest.mark.parametrize("overlap", [True, False])
def test_batch_and_ticket_live_until_the_collect_and_not_longer(overlap: bool) -> None:
    drive = Drive()
    worker = KeepingWorker(drive.limits)
    loop = Loop(drive.scheduler, worker, overlap=overlap)
    drive.add("a", 3, 3)
    gc.disable()
    try:
        loop.step()
        watched = (worker.batch_arrays, worker.payload)
        assert all(ref() is not None for ref in watched) is overlap
        loop.step()
        assert all(ref() is None for ref in watched)
    finally:
        gc.enable()


def test_steps_close_in_order_and_once() -> None:
    in_flight = InFlight()
    first, second = (BatchRecord(step, [], np.zeros(0, dtype=np.int32)) for step in (1, 2))
    in_flight.open(first)
    in_flight.open(second)
    with pytest.raises(ValueError, match="not the oldest"):
        in_flight.close(second)
    in_flight.close(first)
    in_flight.close(second)
    with pytest.raises(ValueError, match="not the oldest"):
        in_flight.close(second)


def test_a_step_is_recorded_once_and_only_as_the_newest() -> None:
    drive = Drive()
    drive.add("a", 3, None)
    view = planned(drive).copy_for_forward()
    record_batch_in_overlap(drive.scheduler.in_flight, view, Ticket(view.step))
    with pytest.raises(ValueError, match="once"):
        record_batch_in_overlap(drive.scheduler.in_flight, view, Ticket(view.step))


class LiveLoop(Loop):
    """Submits the scheduler's own batch instead of a copy."""

    def _submit(self) -> BatchRecord | None:
        batch = self.scheduler.next_batch()
        if batch is None:
            return None
        return record_batch_in_overlap(self.scheduler.in_flight, batch, self.worker.submit(batch))


def test_submitting_the_live_batch_is_noticed() -> None:
    drive = Drive()
    drive.loop = LiveLoop(drive.scheduler, drive.worker)
    drive.add("a", 3, 8)
    with pytest.raises(Violation, match="changed while the device still read it"):
        drive.run()
