"""The worker that the kit drives: it records the path of every step, may keep the steps, and serves
one scheduler after another."""

from __future__ import annotations

from sglcore.worker.model_worker import BatchResult, Limits, ModelWorker, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore.worker.swap_counts import SwapCounts

STRIDE = 1 << 20
"""Composition numbers for one scheduler. A worker takes equal numbers for equal rows, so each
scheduler gets a range of its own."""


class RecordingWorker:
    """A `ModelWorker` that passes every call on to `worker`. `paths`: what ran ("eager", or a
    graph's kind and bucket). `swaps`: the sum of the steps' counts of entries in host memory.
    `steps`: batch and result of each step since `keep` was set, in the order of `collect`. Set
    `keep` while no step is in flight."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker
        self.paths: set[str] = set()
        self.swaps = SwapCounts()
        self.keep = False
        self.steps: list[tuple[ScheduleBatch, BatchResult]] = []
        self._sent: dict[int, ScheduleBatch] = {}
        self._scheduler = 0

    @property
    def limits(self) -> Limits:
        """Limits of the wrapped worker, unchanged."""
        return self.worker.limits

    def next_scheduler(self) -> None:
        """Start a range of composition numbers for another scheduler; nothing may be in flight."""
        self._scheduler += 1

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Start a step on the wrapped worker; does not wait. Changes `batch.composition` in place,
        to the range of the present scheduler."""
        batch.composition += self._scheduler * STRIDE
        if self.keep:
            self._sent[batch.step] = kept = batch.copy_for_forward()
            batch.take_back(kept)  # one-shot values belong to the worker's forward
        return self.worker.submit(batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step and return its results; record its path and, with `keep`, the step."""
        result = self.worker.collect(ticket)
        self.paths.add(result.path)
        self.swaps += result.swaps or SwapCounts()
        if self.keep:
            self.steps.append((self._sent.pop(ticket.step), result))
        return result

    def close(self) -> None:
        """Close the wrapped worker."""
        self.worker.close()
