"""Checks that may take forever, in a process that can be killed: the side of the caller.

Each check runs in a fork of that process (`killable_checks_process.py`) with limits of time and
memory. What is checked is defined elsewhere: grammars in `grammar_check.py`, answers in
`answer_check.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import msgspec

STACK_BYTES = 256 << 20
"""Bytes of stack of a thread that compiles or checks: recursion from rule to rule would overflow
the usual stack and end the process. Only the used part takes memory."""


class CheckLimits(msgspec.Struct, frozen=True):
    """The limits of the checks in one process: time and memory of each check, and how many run or
    wait at the same time. A check that is "refused for now" gets a Verdict with `busy`."""

    seconds: float = 5.0
    """Maximum CPU seconds of one check."""
    memory: int = 1 << 30
    """Maximum bytes that one check may allocate, in addition to the bytes that its process had
    before the fork."""
    young: int = 4
    """Maximum number of checks that run at normal priority at the same time."""
    young_seconds: float = 0.5
    """CPU seconds after which a check moves to the lowest priority, so that a new check can start
    at normal priority.
    """
    slow: int = 8
    """Maximum number of checks that run at the lowest priority; one more is refused for now."""
    most_seconds: float = 30.0
    """Maximum wall-clock seconds of one check. A check that does not get enough CPU time within
    them is refused for now."""
    most_waiting: int = 256
    """Maximum number of checks that wait for their start; one more is refused for now."""


class CheckJob(msgspec.Struct, frozen=True):
    """One check, as it is sent to the process. `number` is repeated in its Verdict."""

    number: int
    work: msgspec.Raw
    """The input of the check, as JSON; the kind of check defines its record."""


class Verdict(msgspec.Struct, frozen=True):
    """The result of check `number`. `error`: the work is invalid; `ended`: a limit ended the check;
    `busy`: it was refused for now. Without these three, the check completed, and `said` has its
    findings."""

    number: int
    error: tuple[str, str, str] | None = None
    """Why the work is invalid: the texts found, wanted and remedy of an error. None: it is
    valid."""
    ended: str = ""
    """The limit that ended the check, for example "takes longer than 5 s of the processor"."""
    busy: str = ""
    """Why the check was refused for now or did not finish, though it may another time."""
    said: tuple[str, ...] = ()
    """The findings of a completed check; the kind of check defines them."""
    seconds: float = 0.0
    """CPU seconds of a completed check."""


OnVerdict = Callable[[Verdict], None]


class ConfinedChecks:
    """Checks of one kind, in one process. The process starts with the first check, and again if it
    has ended."""

    def __init__(self, module: str, what: str, spec: Callable[[], Any]) -> None:
        """`module`: the Python module that runs in the process; at each start it gets the record
        that `spec()` returns, called on a thread of its own. `what` names what is checked, in
        messages."""
        self._module, self._what, self._spec = module, what, spec
        self._lock = Lock()
        self._process: CheckProcess | None = None
        self._is_closed = False

    def open(self) -> None:
        """Start the process if there is none, without waiting until it is ready. Nothing happens
        after `close`. Raises OSError."""
        with self._lock:
            if self._process is None and not self._is_closed:
                self._process = self._started()

    def submit(self, work: Any, told: OnVerdict) -> None:
        """Start a check of `work`, a value that msgspec can encode; does not wait.

        `told` is called once with the verdict, on another thread, and not after `close`. Raises
        OSError if the process cannot start.
        """
        with self._lock:
            if self._is_closed:
                return
            if self._process is None or not self._process.submit(work, told):
                self._process = self._started()
                self._process.submit(work, told)

    def close(self) -> None:
        """Kill the process; later checks are dropped. Idempotent; does not wait."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.close()

    def _started(self) -> CheckProcess:
        return CheckProcess(self._module, self._what, self._spec)


class CheckProcess:
    """One running process for checks, as `ConfinedChecks` starts it, and the callbacks of the
    checks that were sent to it."""

    def __init__(self, module: str, what: str, spec: Callable[[], Any]) -> None:
        """Start the process with the Python module `module`, and two threads that write to it and
        read from it; does not wait until it is ready. Its first line is the record that `spec()`
        returns, called on the writing thread. `what` names what is checked, in messages. Raises
        OSError."""
        self._what = what
        self._told: dict[int, OnVerdict] = {}
        self._count = 0
        self._is_over = False
        self._lock = Lock()
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        # A group of its own: the terminal's Ctrl-C is ours to take, and its forks can be ended with
        # it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )
        Thread(target=self._write, args=(spec,), name=f"checks of {what}, out", daemon=True).start()
        Thread(target=self._read, name=f"checks of {what}, in", daemon=True).start()

    def submit(self, work: Any, told: OnVerdict) -> bool:
        """Send a check of `work`; returns False, without sending it, if this process has ended.
        `told` is called once with the verdict on the reading thread, also if the process ends
        before; not after `close`."""
        line = msgspec.Raw(msgspec.json.encode(work))
        with self._lock:
            if self._is_over:
                return False
            self._count += 1
            self._told[self._count] = told
            self._lines.put(msgspec.json.encode(CheckJob(self._count, line)))
            return True

    def close(self) -> None:
        """Kill the process. Callbacks of open checks are not called. Does not wait."""
        with self._lock:
            self._is_over = True
            self._told.clear()
        self._lines.put(None)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, spec: Callable[[], Any]) -> None:
        into = self._process.stdin
        assert into is not None
        try:
            into.write(msgspec.json.encode(spec()) + b"\n")
            into.flush()
            while (line := self._lines.get()) is not None:
                into.write(line + b"\n")
                into.flush()
        except OSError:
            pass  # it has ended, and the reader thread reports it
        finally:
            _close_quietly(into.close)

    def _read(self) -> None:
        found = self._process.stdout
        assert found is not None
        for line in found:
            verdict = msgspec.json.decode(line, type=Verdict)
            with self._lock:
                told = self._told.pop(verdict.number, None)
            if told is not None:
                told(verdict)
        found.close()
        code = self._process.wait()
        with self._lock:
            self._is_over = True
            left, self._told = self._told, {}
        self._lines.put(None)
        for number, told in left.items():
            told(Verdict(number, busy=f"the process that checks {self._what} ended with code {code}"))


def _close_quietly(close: Callable[[], None]) -> None:
    try:
        close()
    except OSError:
        pass  # the reader has ended, so buffered bytes cannot be written
