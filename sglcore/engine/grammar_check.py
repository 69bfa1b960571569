"""Grammars checked before they are compiled here: in a process of their own, in which one that takes too long or too much
memory can be ended. A compiler in this process could not be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

import msgspec

from sglcore.engine.vocabulary import Vocabulary
from sglcore.sampling.grammar import Grammar, GrammarBusy, GrammarError


class CheckLimits(msgspec.Struct, frozen=True):
    """What the checks of one engine may take."""

    seconds: float = 5.0
    """Of the processor, from a check's start on."""
    memory: int = 1 << 30
    """Bytes of a check, beside what its process had before."""
    young: int = 4
    """Checks that run at the usual priority."""
    young_seconds: float = 0.5
    """Of the processor: how long a check is young; then it goes on at the lowest priority, beside the next young ones."""
    slow: int = 8
    """Checks that run at the lowest priority; one more is refused for now."""
    most_seconds: float = 30.0
    """By the clock: a check that the others leave too little of the processor is refused for now."""
    most_waiting: int = 256
    """Checks that wait for their start; one more is refused for now."""
    mask_seconds: float = 0.2
    """Of the processor, for a mask after the first one: every step of the device waits for it."""


class CheckSpec(msgspec.Struct, frozen=True):
    """What a checking process checks with."""

    backend: str
    tokenizer: str
    """Its file."""
    size: int
    eos_ids: tuple[int, ...]
    limits: CheckLimits


class CheckJob(msgspec.Struct, frozen=True):
    """A grammar to check."""

    number: int
    grammar: Grammar


class Verdict(msgspec.Struct, frozen=True):
    """What came of a check: nothing is wrong with the grammar if `error` and `busy` say nothing."""

    number: int
    error: tuple[str, str, str] | None = None
    """What was found, wanted, and the remedy."""
    busy: str = ""
    """Why it was not checked to the end, though it may be another time."""
    seconds: float = 0.0
    """What it took of the processor."""

    @property
    def failure(self) -> GrammarError | None:
        """The error for who asked."""
        if self.busy:
            return GrammarBusy(self.busy)
        return None if self.error is None else GrammarError(self.error[0], wanted=self.error[1], remedy=self.error[2])


OnVerdict = Callable[[Verdict], None]


class GrammarChecks:
    """The checks of one vocabulary. The process starts with the first one, and again if it has ended."""

    def __init__(self, backend: str, vocabulary: Vocabulary, limits: CheckLimits | None = None) -> None:
        self._backend, self._vocabulary = backend, vocabulary
        self._limits = limits or CheckLimits()
        self._lock = Lock()
        self._process: CheckProcess | None = None
        self._is_closed = False

    def submit(self, grammar: Grammar, told: OnVerdict) -> None:
        """Begin a check; does not wait. `told` is called on another thread, once, and not at all after `close`."""
        with self._lock:
            if self._is_closed:
                return
            if self._process is None or not self._process.submit(grammar, told):
                self._process = CheckProcess(self._spec)
                self._process.submit(grammar, told)

    def close(self) -> None:
        """End the process. Idempotent; does not wait."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.close()

    def _spec(self) -> CheckSpec:
        given = self._vocabulary
        return CheckSpec(self._backend, given.tokenizer.to_str(), given.size, given.eos_ids, self._limits)


class CheckProcess:
    """One process, and what it was given."""

    def __init__(self, spec: Callable[[], CheckSpec]) -> None:
        """`spec` is asked on a thread of its own, for a vocabulary has many bytes."""
        self._told: dict[int, OnVerdict] = {}
        self._count = 0
        self._is_over = False
        self._lock = Lock()
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        # A group of its own: the terminal's Ctrl-C is ours to take, and its forks can be ended with it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglcore.engine.grammar_check_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )
        Thread(target=self._write, args=(spec,), name="grammar checks, out", daemon=True).start()
        Thread(target=self._read, name="grammar checks, in", daemon=True).start()

    def submit(self, grammar: Grammar, told: OnVerdict) -> bool:
        """Hand over a grammar; False if this process has ended."""
        with self._lock:
            if self._is_over:
                return False
            self._count += 1
            self._told[self._count] = told
            self._lines.put(msgspec.json.encode(CheckJob(self._count, grammar)))
            return True

    def close(self) -> None:
        """End it, and tell nobody anything."""
        with self._lock:
            self._is_over = True
            self._told.clear()
        self._lines.put(None)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, spec: Callable[[], CheckSpec]) -> None:
        into = self._process.stdin
        assert into is not None
        try:
            into.write(msgspec.json.encode(spec()) + b"\n")
            into.flush()
            while (line := self._lines.get()) is not None:
                into.write(line + b"\n")
                into.flush()
        except OSError:
            pass  # it has ended, and the thread that reads says so
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
            told(Verdict(number, busy=f"the process that checks grammars ended with code {code}"))


def _close_quietly(close: Callable[[], None]) -> None:
    try:
        close()
    except OSError:
        pass  # what it still held can not be written: nobody reads it
