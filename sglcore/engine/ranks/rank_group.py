"""A group of ranks as one worker: the scheduler cannot tell it from a single device.

Every rank of a shard receives the same encoded batch; the shard's first rank returns the results.
The leader, which is this process, never touches a device. If one rank ends, all end: every open
step raises WorkerLost at once, and only a new start helps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglcore.core.errors import SglcoreError, WorkerLost
from sglcore.engine.ranks.codec import decode, encode
from sglcore.engine.ranks.watch import Watch
from sglcore.engine.ranks.wire import Channel, Gone, Kind
from sglcore.engine.timed_read import is_readable
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch


@dataclass(slots=True, eq=False)
class _Shard:
    """The ranks of one data-parallel shard: the channels for their steps, by rank, the composition
    number of the batch whose sampling state was sent last, and how many steps were submitted, how
    many results were asked for and how many have come."""

    steps: tuple[Channel, ...]
    sent: int | None = None
    submitted: int = 0
    asked: int = 0
    ended: int = 0


class RankGroup:
    """A ModelWorker that consists of several processes. Not thread-safe: one loop owns it. With
    several shards, a step of one shard runs only when the steps of all other shards have been
    submitted too; they end it together, so one that waits in it for long after another has ended it
    is lost (`Patience.shard`)."""

    def __init__(
        self,
        watch: Watch,
        steps: Sequence[Channel],
        limits: Limits,
        shards: int = 1,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`steps`: the step channels of the ranks, by rank; `limits`: the limits that every rank
        has; `shards`: number of data-parallel shards, each with consecutive ranks. `at_end` is
        called once when `close` has ended all ranks."""
        self.limits = replace(limits, runs_ahead=True)
        self._watch, self._steps, self._at_end = watch, tuple(steps), at_end
        each = len(self._steps) // shards
        self._shards = [_Shard(self._steps[first : first + each]) for first in range(0, len(self._steps), each)]
        self._failure: SglcoreError | None = None
        self._has_failed, self._is_closing = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, by rank."""
        return tuple(member.process.pid for member in self._watch.members)

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Send a step to every rank of its shard (`batch.step_plan.shard`; without a plan, shard
        0); does not wait for the step. Sets `batch.sampling` to None if the shard already has it
        for this composition. Raises WorkerLost."""
        self.check()
        shard = self._shards[0 if batch.step_plan is None else batch.step_plan.shard]
        if batch.forward_mode not in (ForwardMode.EMBED, ForwardMode.IDLE):
            if batch.composition == shard.sent:
                batch.sampling = None  # the ranks keep the sampling of a composition while it lasts
            shard.sent = batch.composition
        self._tell(shard, Kind.STEP, encode(batch))
        shard.submitted += 1
        return Ticket(batch.step, shard)

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step's results; once per ticket, in the order of submission. Results of
        tickets that were never collected are skipped. Raises WorkerLost, and ValueError for a
        ticket that was collected before."""
        shard, ticket.payload = ticket.payload, None
        if not isinstance(shard, _Shard):
            raise ValueError(f"step {ticket.step} was collected before; a ticket is collected once")
        while True:
            self.check()
            self._ask(shard.ended + 1)
            result = self._result(shard)
            shard.ended += 1
            if result.step == ticket.step:
                return result

    def check(self) -> None:
        """Raise WorkerLost if a rank has ended, so that no further step can run. Does not wait."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Tell every rank to free its device and end; kill a rank that does not. Waits.
        Idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        if self._failure is None:
            self._drain()
        end_all(self._watch, self._steps)
        self._watcher.join(self._watch.patience.closing)
        close_all(self._watch, self._steps)
        self._at_end()

    def _drain(self) -> None:
        """Tell all ranks to end first, then wait for each: they leave their collectives
        together."""
        told: list[Channel] = []
        for channel in self._steps:
            try:
                channel.send(Kind.CLOSE)
            except Gone:
                continue
            told.append(channel)
        for channel in told:
            channel.wait_at_most(self._watch.patience.closing)
            try:
                while channel.receive().kind is not Kind.CLOSED:
                    pass
            except (Gone, TimeoutError):
                continue
        for member in self._watch.members:
            _wait(member.process, self._watch.patience.closing)

    def _tell(self, shard: _Shard, kind: Kind, body: bytes = b"") -> None:
        frame = shard.steps[0].packed(kind, body)
        try:
            for channel in shard.steps:
                channel.send_packed(frame)
        except Gone as error:
            raise self._lost(error) from None

    def _ask(self, number: int) -> None:
        """Ask every shard for the results of its first `number` steps, as far as it has them: its
        ranks do not wait until the results of other shards were read."""
        for shard in self._shards:
            while shard.asked < min(number, shard.submitted):
                self._tell(shard, Kind.COLLECT)
                shard.asked += 1

    def _result(self, shard: _Shard) -> BatchResult:
        if len(self._shards) > 1:
            self._await(shard)
        try:
            frame = shard.steps[0].receive()
        except Gone as error:
            raise self._lost(error) from None
        return decode(frame.body)

    def _await(self, shard: _Shard) -> None:
        """Wait until the next result of a shard arrives. Raises WorkerLost, and ends all ranks, if
        another shard has ended the same step and this one does not within `Patience.shard`."""
        limit = self._watch.patience.shard
        while not is_readable(shard.steps[0], limit):
            self.check()
            for place, other in enumerate(self._shards):
                if other.ended > shard.ended or (other is not shard and is_readable(other.steps[0])):
                    self._part(self._shards.index(shard), place, limit)

    def _part(self, waiting: int, ended: int, limit: float) -> None:
        self._failure = WorkerLost(
            f"shard {waiting} has waited in a step for {limit:.0f} s, and shard {ended} has ended it: their ranks "
            "did not run the same collectives"
        )
        end_all(self._watch, self._steps)
        raise self._failure

    def _lost(self, error: Gone) -> SglcoreError:
        """Return the error that ended the ranks; waits a moment for the watching thread to find the
        cause after a channel broke."""
        patience = self._watch.patience
        self._has_failed.wait(patience.settle * 2 + patience.round)
        return self._failure or WorkerLost(str(error))

    def _run(self) -> None:
        """Watch until the ranks close or fail.

        On a failure, report it to the caller that waits for a result, then end the processes.
        """
        while not self._is_closing.is_set():
            failure = self._watch.go_round()
            if failure is not None and not self._is_closing.is_set():
                if self._failure is not None:
                    return
                self._failure = failure if isinstance(failure, WorkerLost) else WorkerLost(str(failure))
                self._has_failed.set()
                end_all(self._watch, self._steps)
                return


def end_all(watch: Watch, steps: Sequence[Channel]) -> None:
    """Hang up the channels, kill processes that still run, and wait up to `patience.closing`
    seconds for the end of each, so that no process outlives the start that made it."""
    for channel in steps:
        channel.hang_up()
    for member in watch.members:
        if member.process.poll() is None:
            member.process.kill()
    for member in watch.members:
        member.control.hang_up()
        _wait(member.process, watch.patience.closing)


def close_all(watch: Watch, steps: Sequence[Channel]) -> None:
    """Free the channels of ended ranks. Called when no other thread waits on one. Idempotent."""
    watch.close()
    for channel in (*steps, *(member.control for member in watch.members)):
        channel.close()


def _wait(process: Any, seconds: float) -> None:
    try:
        process.wait(seconds)
    except Exception:  # any error means that it may live: it is killed next
        process.kill()
