"""The loop for every device: submit the next step, then collect the step before it."""

from __future__ import annotations

from time import perf_counter

from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.steps_in_flight import BatchRecord, overlap_forward_isolation, record_batch_in_overlap
from sglcore.worker.model_worker import ModelWorker


class Loop:
    """One scheduler on one worker; not thread-safe.

    With overlap, one step is planned while another is in flight, unless the next step needs its
    tokens. After a prompt slice without results, the following step is submitted at once.
    """

    def __init__(self, scheduler: Scheduler, worker: ModelWorker, *, overlap: bool = True) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.overlap = overlap and worker.limits.can_overlap
        self._running: list[BatchRecord] = []
        self._unsent: list[EngineOutput] = []

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` has something to do."""
        return bool(self._unsent) or self.scheduler.has_work

    def step(self) -> list[EngineOutput]:
        """Submit a step and collect the one before it (without overlap, the same one); returns the
        outputs. Waits for the device. If outputs are left from a failed call, it only returns them.

        If the worker raises, everything in flight is collected or dropped, the requests of the
        failed steps end with "error", and the exception propagates. `drain` then returns the
        outputs: take them before you end another request by name. Later calls continue with the
        other requests.
        """
        if self._unsent:
            return self._take_unsent()
        if self.scheduler.awaits_tokens:
            return self._step_in_turn()
        queued = self._submit_step()
        if not self.overlap:
            return self._collect(queued)
        running, self._running = self._running, queued
        return self._collect(running)

    def drain(self) -> list[EngineOutput]:
        """Collect what is in flight and submit nothing; returns the outputs. Waits for
        the device.
        """
        running, self._running = self._running, []
        return self._take_unsent() + self._collect(running)

    def _step_in_turn(self) -> list[EngineOutput]:
        """Collect, then submit the step that needs the result. If the submit raises, the outputs
        wait for `drain`.
        """
        running, self._running = self._running, []
        self._unsent += self._collect(running)
        self._running = self._submit_step()
        return self._take_unsent()

    def _submit_step(self) -> list[BatchRecord]:
        """Submit a step. If it is a prompt slice without results, submit the next step too, so that
        the device has it queued when the slice ends. Returns the records of the submitted steps; []
        if nothing can run.
        """
        first = self._submit()
        if first is None:
            return []
        behind = self._submit() if self.overlap and first.is_partial and not self.scheduler.awaits_tokens else None
        return [first] if behind is None else [first, behind]

    def _submit(self) -> BatchRecord | None:
        try:
            batch = self.scheduler.next_batch()
            if batch is None:
                self._refuse_standstill()
                return None
            start = perf_counter()
            with overlap_forward_isolation(batch) as view:
                ticket = self.worker.submit(view)
            record = record_batch_in_overlap(self.scheduler.in_flight, view, ticket)
            record.seconds = perf_counter() - start
            return record
        except BaseException as error:
            self._abandon(error)
            raise

    def _collect(self, records: list[BatchRecord]) -> list[EngineOutput]:
        outputs = list[EngineOutput]()
        try:
            for record in records:
                outputs += self._finish(record)
            return outputs
        except BaseException as error:
            self._unsent += outputs
            self._abandon(error)
            raise

    def _finish(self, record: BatchRecord) -> list[EngineOutput]:
        ticket, record.ticket = record.ticket, None
        assert ticket is not None
        start = perf_counter()
        result = self.worker.collect(ticket)
        if record.seconds is not None:
            record.ended = perf_counter()
            record.seconds += record.ended - start
        return self.scheduler.finish(record, result)

    def _abandon(self, error: BaseException) -> None:
        """After an error, collect what is in flight, and drop each step that has no ticket or fails
        to collect. The outputs of both are kept for the next `step`.
        """
        self._running = []
        for record in list(self.scheduler.in_flight):
            if record.ticket is None:
                self._unsent += self.scheduler.drop(record, error)
                continue
            try:
                self._unsent += self._finish(record)
            except Exception as second:
                self._unsent += self.scheduler.drop(record, second)

    def _refuse_standstill(self) -> None:
        scheduler = self.scheduler
        if scheduler.has_work and not len(scheduler.in_flight) and not scheduler.running.arrivals.holds_up:
            raise RuntimeError(f"nothing can run and nothing is in flight: {scheduler.stats()}")

    def _take_unsent(self) -> list[EngineOutput]:
        unsent, self._unsent = self._unsent, []
        return unsent
