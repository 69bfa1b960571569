"""The loop that serves every device: submit the next step, then collect the one before it."""

from __future__ import annotations

from sglcore.device.worker import ModelWorker
from sglcore.schedule.overlap import BatchRecord, overlap_forward_isolation, record_batch_in_overlap
from sglcore.schedule.request import Update
from sglcore.schedule.scheduler import Scheduler


class Loop:
    """One scheduler on one worker; not thread-safe. With overlap, one step is planned while one is in flight."""

    def __init__(self, scheduler: Scheduler, worker: ModelWorker, *, overlap: bool = True) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.overlap = overlap and worker.limits.can_overlap
        self._running: BatchRecord | None = None
        self._unsent: list[Update] = []

    @property
    def has_work(self) -> bool:
        """A call of `step` has something to do."""
        return bool(self._unsent) or self.scheduler.has_work

    def step(self) -> list[Update]:
        """Submit a step and collect one; returns the news. Waits for the device.

        If the worker raises, everything in flight is collected or dropped, the requests of the failed steps finish with
        "error", and the exception goes on to the caller; their news come with the next call, which may go on working.
        """
        if self._unsent:
            return self._take_unsent()
        queued = self._submit()
        if not self.overlap:
            return self._collect(queued)
        running, self._running = self._running, queued
        return self._collect(running)

    def drain(self) -> list[Update]:
        """Collect what is in flight and submit nothing; returns the news. Waits for the device."""
        running, self._running = self._running, None
        return self._take_unsent() + self._collect(running)

    def _submit(self) -> BatchRecord | None:
        try:
            batch = self.scheduler.next_batch()
            if batch is None:
                self._refuse_standstill()
                return None
            with overlap_forward_isolation(batch) as view:
                ticket = self.worker.submit(view)
            return record_batch_in_overlap(self.scheduler.in_flight, view, ticket)
        except BaseException as error:
            self._abandon(error)
            raise

    def _collect(self, record: BatchRecord | None) -> list[Update]:
        if record is None:
            return []
        assert record.ticket is not None
        try:
            result = self.worker.collect(record.ticket)
            return self.scheduler.finish(record, result)
        except BaseException as error:
            self._unsent += self.scheduler.drop(record, error)
            self._abandon(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        """Collect, or else drop, all that is in flight."""
        self._running = None
        for record in list(self.scheduler.in_flight):
            self._unsent += self._collect_or_drop(record, error)

    def _collect_or_drop(self, record: BatchRecord, error: BaseException) -> list[Update]:
        if record.ticket is None:
            return self.scheduler.drop(record, error)
        try:
            return self.scheduler.finish(record, self.worker.collect(record.ticket))
        except Exception as second:
            return self.scheduler.drop(record, second)

    def _refuse_standstill(self) -> None:
        if self.scheduler.has_work and not len(self.scheduler.in_flight):
            raise RuntimeError(f"nothing can run and nothing is in flight: {self.scheduler.stats()}")

    def _take_unsent(self) -> list[Update]:
        unsent, self._unsent = self._unsent, []
        return unsent
