"""Checks that may take forever, each in a fork that is killed if it takes too much time or memory:
the side of the checking process.

Started by `killable_checks.py`. Standard input has lines of JSON: the specification of the checks,
then a CheckJob each. Standard output has a Verdict for each job, as soon as it is known. The
process and its forks end when standard input closes.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread, stack_size

import msgspec

from sglcore.engine.structured_output.killable_checks import STACK_BYTES, CheckJob, CheckLimits, Verdict

LOWEST_PRIORITY = 19
SOONEST = 0.01
"""Least seconds between two readings of the CPU time of checks."""
CPUCLOCK_SCHED = 2
"""Linux: the lowest bits of a clock's number that select the CPU time of a process."""

Work = Callable[[bytes], Verdict]
"""Does a job's work (JSON) and returns its verdict, without the number and the time. May raise
MemoryError only."""


@dataclass(slots=True)
class Check:
    """A running check: its job, and the forked process that computes its verdict."""

    job: CheckJob
    pid: int
    """The process id of the fork."""
    answers: int
    """The file descriptor from which its verdict is read."""
    begun: float
    """Time of its start, by `time.monotonic`."""
    is_young: bool = True
    """Whether it runs at normal priority."""
    is_late: bool = False
    """Whether it was killed because it did not get enough CPU time."""
    text: bytes = b""
    """The part of its verdict that was read so far."""

    @property
    def processor_seconds(self) -> float:
        """CPU seconds of the check so far, or wall-clock seconds where the system does not report
        those of another process."""
        try:
            return time.clock_gettime((~self.pid << 3) | CPUCLOCK_SCHED)
        except OSError:
            return time.monotonic() - self.begun


class Checker:
    """Runs checks in order of arrival, at most `limits.young` of them at normal priority.

    A check that takes longer than `limits.young_seconds` continues at the lowest priority, or is
    killed if `limits.slow` others already run there.
    """

    def __init__(self, work: Work, limits: CheckLimits, given: bytes) -> None:
        """`work` checks one job, in a fork; `given`: bytes of jobs that were already read from
        standard input."""
        self._work, self._limits = work, limits
        self._waiting: deque[CheckJob] = deque()
        self._checks: dict[int, Check] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._rest = given

    def run(self) -> None:
        """Run the checks that arrive on standard input, and write a Verdict for each to standard
        output as soon as it is known, until standard input ends; then kill the checks that still
        run."""
        self._queue_jobs()
        while True:
            while self._waiting and self._young < self._limits.young:
                self._start(self._waiting.popleft())
            for key, _ in self._selector.select(self._patience()):
                if key.fd != 0:
                    self._hear(self._checks[key.fd])
                elif not self._take_jobs():
                    self._end_all()
                    return
            self._look_at_clock()

    @property
    def _young(self) -> int:
        return sum(each.is_young for each in self._checks.values())

    def _take_jobs(self) -> bool:
        found = os.read(0, 1 << 20)
        self._rest += found
        self._queue_jobs()
        return bool(found)

    def _queue_jobs(self) -> None:
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            job = msgspec.json.decode(line, type=CheckJob)
            if len(self._waiting) < self._limits.most_waiting:
                self._waiting.append(job)
            else:
                _tell(Verdict(job.number, busy=f"{len(self._waiting)} others wait for their check"))

    def _start(self, job: CheckJob) -> None:
        answers, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _confine(self._limits)
                _do(self._work, job, write)
            finally:
                os._exit(0)
        os.close(write)
        self._checks[answers] = Check(job, pid, answers, time.monotonic())
        self._selector.register(answers, selectors.EVENT_READ)

    def _hear(self, check: Check) -> None:
        found = os.read(check.answers, 1 << 16)
        if found:
            check.text += found
            return
        self._selector.unregister(check.answers)
        os.close(check.answers)
        del self._checks[check.answers]
        _, status = os.waitpid(check.pid, 0)
        _tell(self._verdict(check, status))

    def _verdict(self, check: Check, status: int) -> Verdict:
        number, limits = check.job.number, self._limits
        if check.text:
            return msgspec.json.decode(check.text, type=Verdict)
        if check.is_late:
            seconds = time.monotonic() - check.begun
            return Verdict(number, busy=f"other checks took the time, and this one was not done in {seconds:.1f} s")
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended == signal.SIGPROF:
            found = f"takes longer than {limits.seconds:g} s of the processor"
        elif ended in (0, signal.SIGABRT, signal.SIGKILL):  # SIGKILL: by the system
            found = f"takes more than {limits.memory >> 20} MiB of memory"
        else:
            found = f"ends its process by {signal.Signals(ended).name}"
        return Verdict(number, ended=found)

    def _look_at_clock(self) -> None:
        limits = self._limits
        for check in list(self._checks.values()):
            if check.is_young and check.processor_seconds >= limits.young_seconds:
                check.is_young = False
                _put_last(check.pid)
                check.is_late = len(self._checks) - self._young > limits.slow
            if check.is_late or time.monotonic() >= check.begun + limits.most_seconds:
                check.is_late = True
                os.kill(check.pid, signal.SIGKILL)

    def _patience(self) -> float | None:
        """Return the seconds until the clock of a check must be read; None: no check runs."""
        limits, checks = self._limits, self._checks.values()
        left = [limits.young_seconds - each.processor_seconds for each in checks if each.is_young]
        left += [each.begun + limits.most_seconds - time.monotonic() for each in checks]
        return max(min(left), SOONEST) if left else None

    def _end_all(self) -> None:
        for check in self._checks.values():
            os.kill(check.pid, signal.SIGKILL)
            os.waitpid(check.pid, 0)


def first_line() -> tuple[bytes, bytes]:
    """Return the first line of standard input (the specification of the checks), and the bytes
    already read after it. Waits. Both are empty if standard input ends before the first newline.
    """
    given = bytearray()
    while b"\n" not in given:
        found = os.read(0, 1 << 20)
        if not found:
            return b"", b""
        given += found
    first, _, rest = bytes(given).partition(b"\n")
    return first, rest


def _put_last(pid: int) -> None:
    """Give all threads of a process the lowest priority: Linux has one for each thread, and a check
    works on a thread of its own."""
    try:
        threads = [int(each) for each in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        threads = [pid]
    for each in threads:
        try:
            os.setpriority(os.PRIO_PROCESS, each, LOWEST_PRIORITY)
        except ProcessLookupError:
            pass  # it has ended


def _confine(limits: CheckLimits) -> None:
    """Limit the CPU time of this forked process, and its memory where the system reports its
    address space; detach its standard streams."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    had = _address_space()
    if had is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        room = had + STACK_BYTES + limits.memory
        if hard == resource.RLIM_INFINITY or room < hard:
            resource.setrlimit(resource.RLIMIT_AS, (room, hard))


def _address_space() -> int | None:
    """Return the bytes of address space of this process; None if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return None


def _do(work: Work, job: CheckJob, answers: int) -> None:
    """Run the work of a job on a thread with STACK_BYTES and write its verdict to the descriptor
    `answers`; write nothing if memory runs out."""

    def answer() -> None:
        begin = time.process_time()
        try:
            found = work(bytes(job.work))
        except MemoryError:
            return
        verdict = msgspec.structs.replace(found, number=job.number, seconds=time.process_time() - begin)
        os.write(answers, msgspec.json.encode(verdict))

    stack_size(STACK_BYTES)
    thread = Thread(target=answer)
    thread.start()
    thread.join()


def _tell(verdict: Verdict) -> None:
    os.write(1, msgspec.json.encode(verdict) + b"\n")
