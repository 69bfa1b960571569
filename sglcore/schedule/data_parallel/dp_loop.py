"""The loop over several shards (DP ranks): in each step all shards plan, agree and submit, also the
idle ones; then all results are collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from sglcore.schedule.data_parallel.dp_draft_length import AgreedLength
from sglcore.schedule.data_parallel.dp_plan import agree, vote_of
from sglcore.schedule.data_parallel.dp_ranks import Shards
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.steps_in_flight import BatchRecord, overlap_forward_isolation, record_batch_in_overlap
from sglcore.step.micro_batch_cut import THETA, CutTerms
from sglcore.worker.model_worker import BatchResult, ModelWorker, Ticket
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore.worker.step_plan import StepPlan


@dataclass(slots=True)
class Sent:
    """A shard's part of a step: its record, or only a ticket if the shard is idle. `number` is the
    step's number, common to all shards.
    """

    number: int
    scheduler: Scheduler
    record: BatchRecord | None
    idle: Ticket | None = None


class ShardLoop:
    """Several schedulers on one worker, in step with each other. Has the interface of `Loop`."""

    def __init__(self, scheduler: Shards, worker: ModelWorker, *, overlap: bool = True) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.overlap = overlap and worker.limits.can_overlap
        self._running: list[Sent] = []
        self._unsent: list[EngineOutput] = []
        self._idle_steps = count(1)
        self._length = AgreedLength(worker.limits)
        # Requests with a recurrent state or bidirectional attention are not split into
        # micro-batches. The ranks know the batch size from which a split pays.
        may_cut_requests = worker.limits.generates and not worker.limits.keeps_state
        self._cut = CutTerms(theta=THETA if may_cut_requests else 0.0)

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` has something to do."""
        return bool(self._unsent) or self.scheduler.has_work

    def step(self) -> list[EngineOutput]:
        """Submit a step of every shard and collect the one before it (without overlap, the same
        one) of each; returns the outputs of all shards. Waits for the device. If outputs are left
        from a failed call, it only returns them.

        If the worker raises, the requests of the failed steps end with "error", and the exception
        propagates; `drain` then returns the outputs."""
        if self._unsent:
            return self._take_unsent()
        if self.scheduler.awaits_tokens:
            return self._step_in_turn()
        queued = self._submit()
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
        running, self._running = self._running, []
        self._unsent += self._collect(running)
        self._running = self._submit()
        return self._take_unsent()

    def _submit(self) -> list[Sent]:
        """Submit the agreed step of every shard, without rows for an idle one; nothing if no shard
        has one. Raises RuntimeError if requests are left, none can run, and no step is in
        flight."""
        try:
            batches = [scheduler.next_batch() for scheduler in self.scheduler.each]
            if not any(batch is not None for batch in batches):
                self._refuse_standstill()
                return []
            number, proposals = self._length.begin(batches)
            votes = [vote_of(batch, self._cut, proposals.verified + 1) for batch in batches]
            plan = agree(votes, proposals=proposals)
            return [self._send(number, plan.of_shard(shard), batch) for shard, batch in enumerate(batches)]
        except BaseException as error:
            self._abandon(error)
            raise

    def _send(self, number: int, plan: StepPlan, batch: ScheduleBatch | None) -> Sent:
        scheduler = self.scheduler.each[plan.shard]
        if batch is None:
            idle = idle_batch(-next(self._idle_steps), plan)
            return Sent(number, scheduler, None, self.worker.submit(idle))
        with overlap_forward_isolation(batch) as view:
            view.step_plan = plan
            ticket = self.worker.submit(view)
        return Sent(number, scheduler, record_batch_in_overlap(scheduler.in_flight, view, ticket))

    def _collect(self, sent: list[Sent]) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        verified: list[BatchResult] = []
        try:
            for each in sent:
                if each.record is not None:
                    outputs += self._finish(each.scheduler, each.record, verified)
                elif each.idle is not None:
                    self.worker.collect(each.idle)
            if sent:
                self._length.end(sent[0].number, verified)
        except BaseException as error:
            self._unsent += outputs
            self._abandon(error)
            raise
        return outputs

    def _finish(self, scheduler: Scheduler, record: BatchRecord, verified: list[BatchResult]) -> list[EngineOutput]:
        """Collect a shard's part and return its outputs. `verified` receives the results of decode
        steps.
        """
        ticket, record.ticket = record.ticket, None
        assert ticket is not None and record.batch is not None
        result = self.worker.collect(ticket)
        if record.batch.forward_mode.is_decode:
            verified.append(result)
        return scheduler.finish(record, result)

    def _abandon(self, error: BaseException) -> None:
        """After an error, collect in every shard what is in flight, and drop each step that has no
        ticket or fails to collect. The outputs of both are kept for the next `step`."""
        self._running = []
        for scheduler, record in list(self._in_flight()):
            if record.ticket is None:
                self._unsent += scheduler.drop(record, error)
                continue
            try:
                self._unsent += self._finish(scheduler, record, [])
            except Exception as second:
                self._unsent += scheduler.drop(record, second)

    def _in_flight(self) -> Iterator[tuple[Scheduler, BatchRecord]]:
        for scheduler in self.scheduler.each:
            for record in scheduler.in_flight:
                yield scheduler, record

    def _refuse_standstill(self) -> None:
        if self.scheduler.has_work and not any(self._in_flight()):
            raise RuntimeError(f"nothing can run and nothing is in flight: {self.scheduler.stats()}")

    def _take_unsent(self) -> list[EngineOutput]:
        unsent, self._unsent = self._unsent, []
        return unsent


def idle_batch(step: int, plan: StepPlan) -> ScheduleBatch:
    """Return the batch of an idle shard, without rows: step number `step`, with this plan. It has
    only what every batch must have; the worker makes the other fields empty.
    """
    none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
    rows: dict[str, Any] = {
        name: none.copy() for name in ("slots", "seq_lens", "prefix_lens", "input_ids", "page_counts", "new_pages")
    }
    offsets: dict[str, Any] = {"token_offsets": start, "new_page_offsets": start.copy()}
    emits = np.zeros(0, np.bool_)
    return ScheduleBatch(step, ForwardMode.IDLE, **rows, **offsets, emits=emits, step_plan=plan)
