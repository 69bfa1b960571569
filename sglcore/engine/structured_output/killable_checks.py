"""Checks that may take forever, in a process that can be killed: the side of the calling process.

Each check runs in a fork of that process (`killable_checks_process.py`) with limits of time and
memory. The kinds of checks are elsewhere: grammars in `grammar_check.py`, answers in
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
the usual stack and end the process. Only the used part takes memory.
"""


class CheckLimits(msgspec.Struct, frozen=True):
    """What the checks of one process may take."""

    seconds: float = 5.0
    """CPU seconds of one check."""
    memory: int = 1 << 30
    """Bytes that one check may allocate, in addition to the bytes that its process had before the
    fork.
    """
    young: int = 4
    """Checks that run at normal priority at the same time."""
    young_seconds: float = 0.5
    """CPU seconds after which a check moves to the lowest priority, so that a new check can start
    at normal priority.
    """
    slow: int = 8
    """Checks that run at the lowest priority; one more is refused for now."""
    most_seconds: float = 30.0
    """Wall-clock seconds.

    A check that does not get enough CPU time within them is refused for now.
    """
    most_waiting: int = 256
    """Checks that wait for their start; one more is refused for now."""


class CheckJob(msgspec.Struct, frozen=True):
    """One check."""

    number: int
    work: msgspec.Raw
    """The object of the check, as JSON; the kind of check defines its record."""


class Verdict(msgspec.Struct, frozen=True):
    """The result of a check. Without `error`, `ended` and `busy` it completed."""

    number: int
    error: tuple[str, str, str] | None = None
    """Why the work cannot be done: found, wanted, remedy."""
    ended: str = ""
    """The limit that ended it, for example "takes longer than 5 s of the processor"."""
    busy: str = ""
    """Why it did not finish, though it may another time."""
    said: tuple[str, ...] = ()
    """Its findings."""
    seconds: float = 0.0
    """CPU seconds that it took."""


OnVerdict = Callable[[Verdict], None]


class ConfinedChecks:
    """The checks of one kind. The process starts with the first one, and again if it has ended."""

    def __init__(self, module: str, what: str, spec: Callable[[], Any]) -> None:
        """`module` runs in the process.

        Each start sends it `spec()` first, called on a thread of its own. `what` names the object
        of the checks in messages.
        """
        self._module, self._what, self._spec = module, what, spec
        self._lock = Lock()
        self._process: CheckProcess | None = None
        self._is_closed = False

    def open(self) -> None:
        """Start the process if there is none; waits for the system, not for the process. Raises
        OSError."""
        with self._lock:
            if self._process is None and not self._is_closed:
                self._process = self._started()

    def submit(self, work: Any, told: OnVerdict) -> None:
        """Start a check of `work`, which msgspec can encode; does not wait.

        `told` is called once, on another thread, and not after `close`. Raises OSError if the
        process cannot start.
        """
        with self._lock:
            if self._is_closed:
                return
            if self._process is None or not self._process.submit(work, told):
                self._process = self._started()
                self._process.submit(work, told)

    def close(self) -> None:
        """End the process. Idempotent; does not wait."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.close()

    def _started(self) -> CheckProcess:
        return CheckProcess(self._module, self._what, self._spec)


class CheckProcess:
    """One process, and the checks that it was sent."""

    def __init__(self, module: str, what: str, spec: Callable[[], Any]) -> None:
        """As in ConfinedChecks."""
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
        """Send a check; returns False if this process has ended."""
        line = msgspec.Raw(msgspec.json.encode(work))
        with self._lock:
            if self._is_over:
                return False
            self._count += 1
            self._told[self._count] = told
            self._lines.put(msgspec.json.encode(CheckJob(self._count, line)))
            return True

    def close(self) -> None:
        """Kill the process. Callbacks of open checks are not called."""
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
