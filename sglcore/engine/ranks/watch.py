"""Watches the ranks: finds the rank that failed first, and its error.

A rank reports its own error. Otherwise its channel closes (the process died, seen within
milliseconds) or is silent (the process is stopped, or disconnected). Heartbeats come from a thread
of their own, so they do not show that a step proceeds.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglcore.core.errors import ConfigError, SglcoreError, WorkerLost
from sglcore.engine.ranks.spec import HOST_GONE, RankProcess
from sglcore.engine.ranks.wire import Channel, Frame, Gone, Kind

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds. A rank is lost after `silence` without a message, or after `starting` until
    all ranks are ready.

    `shard`: how much longer than another shard one may take for the same step. `settle`: how
    long a failure that may follow from another rank's is kept, to find the cause. `round`: the
    longest wait for messages before clocks are checked. `closing`: how long a rank may take to end.
    """

    silence: float = 5.0
    starting: float = 60.0
    shard: float = 30.0
    settle: float = 0.3
    round: float = 0.1
    closing: float = 10.0


@dataclass(slots=True)
class Member:
    """One rank as `Watch` knows it: its process and control channel, and what its messages said
    last: the phase and step, its report that it is ready, or its failure."""

    rank: int
    """The number of the rank."""
    process: RankProcess
    """The process of the rank."""
    control: Channel
    """The channel on which the rank reports its state."""
    heard: float
    """Time of the rank's last message, by `time.monotonic`."""
    phase: str = "starting"
    """What the rank does now, for messages."""
    step: int = -1
    """The last step that the rank reported. -1: none."""
    ready: dict[str, Any] | None = None
    """The report of the rank when it was ready: limits, ledger, seconds. None: it is not ready
    yet."""
    report: tuple[str, bool, int, str] | None = None
    """The rank's report of its failure: the text, whether it follows from another rank's end, the
    exit code for the leader, the phase. None: it has not failed."""
    is_gone: bool = False
    """Whether the channel has closed."""
    host: str = ""
    """The address of the host of the process; empty: this machine."""

    @property
    def name(self) -> str:
        """The rank's number, process id and host, for messages."""
        return f"rank {self.rank} (process {self.process.pid}{self.host and f' on {self.host}'})"


@dataclass(slots=True)
class Watch:
    """Watches all ranks of one start. Not thread-safe: one thread at a time calls `go_round`.
    `progress` gets the progress of rank 0's start."""

    members: Sequence[Member]
    patience: Patience
    progress: Progress
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        for member in self.members:
            member.control.wait_at_most(self.patience.round * 10)
            self.selector.register(member.control, selectors.EVENT_READ, member)

    @property
    def is_ready(self) -> bool:
        """Whether every rank has reported that it is ready."""
        return all(member.ready is not None for member in self.members)

    def go_round(self) -> SglcoreError | None:
        """Process messages of ranks; waits for them, `patience.round` seconds at most. Returns the
        error that ended the ranks; None: all run."""
        for key, _ in self.selector.select(self.patience.round):
            self._hear(key.data)
        now = time.monotonic()
        limit = self.patience.silence if self.is_ready else self.patience.starting
        silent = [member for member in self.members if not member.is_gone and now - member.heard > limit]
        if silent:
            member = silent[0]
            return WorkerLost(f"{member.name} has sent nothing for {now - member.heard:.1f} s, last in {member.phase}")
        return self._cause() if any(member.is_gone or member.report for member in self.members) else None

    def close(self) -> None:
        """Stop listening to the channels, which stay open."""
        self.selector.close()

    def _hear(self, member: Member) -> None:
        try:
            frame = member.control.receive()
        except (Gone, TimeoutError):
            member.is_gone = True
            self.selector.unregister(member.control)
            return
        member.heard = time.monotonic()
        self._take(member, frame)

    def _take(self, member: Member, frame: Frame) -> None:
        values = msgspec.msgpack.decode(frame.body)
        if frame.kind is Kind.BEAT:
            member.step, member.phase = values
        elif frame.kind is Kind.PROGRESS:
            member.phase = values[0]
            if member.rank == 0:
                self.progress(*values)
        elif frame.kind is Kind.READY:
            member.ready, member.phase = values, "its steps"
        elif frame.kind is Kind.FAILED:
            member.report = tuple(values)

    def _cause(self) -> SglcoreError:
        """Return the error of the rank that failed first, or how it ended; not a consequence in
        another rank. Waits up to `patience.settle` seconds while only consequences are known."""
        end = time.monotonic() + self.patience.settle
        while (cause := self._first()) is None and time.monotonic() < end:
            for key, _ in self.selector.select(self.patience.settle / 10):
                self._hear(key.data)
        return cause or self._told(next(member for member in self.members if member.report or member.is_gone))

    def _first(self) -> SglcoreError | None:
        """Return the error of a rank that failed by itself and not because another ended; None:
        only consequences are known so far."""
        for member in self.members:
            if member.report is not None and not member.report[1]:
                return self._told(member)
            if member.is_gone and member.report is None:
                return self._told(member)
        return None

    def _told(self, member: Member) -> SglcoreError:
        if member.report is None:
            where = member.phase if member.step < 0 else f"{member.phase}, its last step {member.step}"
            return WorkerLost(f"{member.name} {_end(member.process)} in {where}")
        text, _, code, phase = member.report
        if code == ConfigError.exit_code:
            return ConfigError(text)
        return WorkerLost(f"rank {member.rank} failed in {phase}: {text}")


def _end(process: RankProcess) -> str:
    """Return how a process ended after its channel closed, for an error text.

    Waits up to 0.2 s, as the channel may close before the process ends.
    """
    end = time.monotonic() + 0.2
    while (code := process.poll()) is None and time.monotonic() < end:
        time.sleep(0.002)
    return "has closed its channel" if code is None else ended(code)


def ended(code: int) -> str:
    """Return a phrase with the meaning of an exit code, such as "ended by SIGKILL"."""
    if code == HOST_GONE:
        return "is gone with its host, which has ended or cannot be reached,"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
