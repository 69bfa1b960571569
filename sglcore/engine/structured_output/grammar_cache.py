"""Grammars of requests: compiled in the background, cached, and started as one matcher for each
sample.

It knows the libraries that compile by name only (`llguidance`, `xgrammar`). Each has one file in
this folder.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread, stack_size
from typing import NamedTuple, Protocol

import numpy as np

from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row
from sglcore.engine.structured_output.grammar_check import GrammarChecks, failure_of
from sglcore.engine.structured_output.grammar_size import refuse_large
from sglcore.engine.structured_output.grammar_vocabulary import CompiledGrammar, Vocabulary
from sglcore.engine.structured_output.killable_checks import STACK_BYTES, OnVerdict, Verdict
from sglcore.engine.structured_output.repetition_penalty import RepetitionRules
from sglcore.engine.structured_output.thinking import ThinkingGrammar
from sglcore.engine.structured_output.token_rules import RuledTokens
from sglcore.sampling.grammar_spec import Grammar, GrammarBusy, GrammarError, Repetition, Thinking, TokenRules
from sglcore.schedule.request import Ints, LogitChange, Matcher

BACKENDS = ("llguidance", "xgrammar")
KEPT_GRAMMARS = 256
WAIT_SECONDS = 60.0
"""Seconds that a request waits for the check and the compiler; one grammar takes a few."""
COMPILE_THREADS = 2
"""Threads that compile grammars that took less than QUICK_SECONDS of CPU time to check; all others
share one more thread."""
QUICK_SECONDS = 0.5


Wanted = tuple[Grammar | None, Thinking | None, TokenRules | None, Repetition | None]
Job = tuple[Wanted, "Future[Compiled]"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiled constraints of a request: the grammar (None: any text), and the DRY penalty,
    which then includes the grammar (None: no penalty). At least one is not None."""

    grammar: CompiledGrammar | None
    repetition: RepetitionRules | None = None

    def start(self, prompt: Ints) -> Started:
        """Return the constraints for one sample after the prompt, int32 token ids."""
        if self.repetition is not None:
            found = self.repetition.start(prompt)
            return Started(found, found)
        assert self.grammar is not None
        return Started(self.grammar.start())


class Started(NamedTuple):
    """The constraints of one sample. `change`: the same object as `matcher`, if it also adds to
    logits; else None."""

    matcher: Matcher
    change: LogitChange | None = None


class GrammarBackend(Protocol):
    """A library that compiles grammars for the tokens of one vocabulary: `Llguidance` or
    `Xgrammar`."""

    @property
    def name(self) -> str:
        """The value of `grammar_backend` that selects it."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary whose tokens its masks cover."""
        ...

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar; waits.

        Any thread may call it. Raises GrammarError if the grammar is invalid or cannot be enforced.
        """
        ...


class Compiling:
    """Grammar constraints that are being compiled. A caller waits at most `seconds` from now; if
    they are not ready by then, the request is refused with GrammarBusy."""

    def __init__(self, future: Future[Compiled], seconds: float) -> None:
        self._future = future
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    @property
    def is_done(self) -> bool:
        """Whether `start` and `start_after` return or raise at once: the grammar is compiled or has
        failed, or its time is up."""
        return self._future.done() or time.monotonic() >= self._until

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until `is_done`, at most `seconds` (None: the rest of its time); return `is_done`,
        which with None is always True."""
        left = max(self._until - time.monotonic(), 0.0)
        try:
            self._future.exception(left if seconds is None else min(seconds, left))
        except TimeoutError:
            pass
        return self.is_done

    def start(self) -> Matcher:
        """Return a matcher for one sample of an empty prompt. Waits until it is done. Raises
        GrammarError for an invalid grammar, and GrammarBusy if it is not done in time."""
        return self.start_after(np.zeros(0, np.int32)).matcher

    def start_after(self, prompt: Ints) -> Started:
        """Return the constraints for one sample after the prompt, int32 token ids. Waits until it
        is done. Raises GrammarError for an invalid grammar, and GrammarBusy if it is not done in
        time."""
        if not self._future.done() and self.wait() and not self._future.done():
            raise GrammarBusy(f"the grammar waited {self._seconds:g} s for other grammars to compile")
        if (failure := self._future.exception()) is not None:
            # All callers share one exception: its traceback must not keep the frames, and so the
            # requests, of them all.
            raise failure.with_traceback(None)
        return self._future.result().start(prompt)


class Checks(Protocol):
    """What `Grammars` uses to compile a grammar in another process first: `GrammarChecks`, or a
    substitute in tests."""

    def submit(self, grammar: Grammar, told: OnVerdict, /) -> None:
        """Start a check of `grammar`; does not wait. `told` is called once with the verdict, on
        another thread, and not after `close`. Raises OSError if the checking process cannot
        start."""
        ...

    def close(self) -> None:
        """Kill the checking process; later checks are dropped. Idempotent; does not wait."""
        ...


class Grammars:
    """Compiles grammars on threads of its own, after `checks` have accepted them. The last `kept`
    results are cached, failures too, except refusals with GrammarBusy."""

    def __init__(
        self,
        backend: GrammarBackend,
        checks: Checks | None = None,
        *,
        kept: int = KEPT_GRAMMARS,
        seconds: float = WAIT_SECONDS,
    ) -> None:
        """`seconds`: how long a request waits for its grammar. Without `checks`, every grammar is
        compiled at once in this process, and a slow one delays the others."""
        self.backend = backend
        self._checks, self._kept, self._seconds = checks, kept, seconds
        self._known: OrderedDict[Wanted, Future[Compiled]] = OrderedDict()
        self._lock = Lock()
        self._quick, self._slow = Lane(COMPILE_THREADS, self._work), Lane(1, self._work)

    def compile(
        self,
        grammar: Grammar | None,
        thinking: Thinking | None = None,
        rules: TokenRules | None = None,
        repetition: Repetition | None = None,
    ) -> Compiling:
        """Start to compile the constraints of a request (grammar None: any text), or join the
        compilation if the same were requested before.

        With `thinking`, the grammar applies after the reasoning; token rules and the DRY penalty
        are combined with it if given. At least one argument is not None. Does not wait. Any thread
        may call it.
        """
        wanted = (grammar, thinking, rules, repetition)
        with self._lock:
            future = self._known.get(wanted)
            is_new = future is None
            if future is None:
                future = self._known[wanted] = Future()
            self._known.move_to_end(wanted)
            while len(self._known) > self._kept:
                self._known.popitem(last=False)
        if is_new:
            self._begin(wanted, future)
        return Compiling(future, self._seconds)

    def close(self) -> None:
        """Kill the checking process, and end the threads after the queued grammars. Idempotent;
        does not wait."""
        if self._checks is not None:
            self._checks.close()
        self._quick.close()
        self._slow.close()

    def _begin(self, wanted: Wanted, future: Future[Compiled]) -> None:
        grammar = wanted[0]
        if grammar is None or self._checks is None:
            self._quick.put((wanted, future))
            return
        try:
            refuse_large(grammar)
            self._checks.submit(grammar, lambda verdict: self._after_check(wanted, future, verdict))
        except GrammarError as error:
            future.set_exception(error)
        except OSError as error:
            self._fail(wanted, future, GrammarBusy(f"the process that checks grammars cannot start: {error}"))

    def _after_check(self, wanted: Wanted, future: Future[Compiled], verdict: Verdict) -> None:
        failure = failure_of(verdict)
        if failure is not None:
            self._fail(wanted, future, failure)
        else:
            lane = self._quick if verdict.seconds < QUICK_SECONDS else self._slow
            lane.put((wanted, future))

    def _fail(self, wanted: Wanted, future: Future[Compiled], error: GrammarError) -> None:
        if isinstance(error, GrammarBusy):
            with self._lock:
                self._known.pop(wanted, None)
        future.set_exception(error)

    def _work(self, job: Job) -> None:
        wanted, future = job
        try:
            future.set_result(self._compiled(*wanted))
        except GrammarError as error:
            future.set_exception(error)
        except BaseException as error:
            kind = "request" if wanted[0] is None else wanted[0].kind
            text = f"{self.backend.name} failed on this {kind}: {type(error).__name__}: {error}"
            future.set_exception(GrammarError(text, wanted="a grammar that it can read"))

    def _compiled(
        self,
        grammar: Grammar | None,
        thinking: Thinking | None,
        rules: TokenRules | None,
        repetition: Repetition | None,
    ) -> Compiled:
        found = None if grammar is None else self.backend.compile(grammar)
        if thinking is not None:
            found = ThinkingGrammar(thinking, self.backend.vocabulary, found)
        if rules is not None:
            found = RuledTokens(rules, self.backend.vocabulary, found, has_end=grammar is not None)
        if repetition is None:
            return Compiled(found)
        return Compiled(found, RepetitionRules(repetition, self.backend.vocabulary, found))


class Lane:
    """A queue of jobs and the threads that take them in order, at most `most` threads. A thread is
    started with each job until there are that many."""

    def __init__(self, most: int, work: Callable[[Job], None]) -> None:
        """`most`: maximum number of threads. Each calls `work` for one job after the other; `work`
        must not raise."""
        self._most, self._work = most, work
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._lock = Lock()

    def put(self, job: Job) -> None:
        """Queue a job; does not wait."""
        self._jobs.put(job)
        with self._lock:
            if len(self._threads) >= self._most:
                return
            # The interpreter does not wait for daemon threads when it ends; a compiler cannot be
            # interrupted.
            thread = Thread(target=self._run, name="grammar", daemon=True)
            usual = stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                stack_size(usual)
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads after the queued jobs. Idempotent; does not wait."""
        with self._lock:
            for _ in self._threads:
                self._jobs.put(None)
            self._threads.clear()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._work(job)


def open_grammars(name: str, vocabulary: Vocabulary) -> tuple[Grammars | None, Row]:
    """Return the grammar compiler of an engine, and the ledger's row. `name`: a value of the
    setting `grammar_backend`.

    None: structured output is off, and the row says why. Raises ConfigError if a backend requested
    by name is not available.
    """
    remedy = "SGLCORE_GRAMMAR_BACKEND=llguidance, xgrammar or off"
    if name == "off":
        return None, Row("grammar", name, "off", "requested", remedy)
    try:
        backend = open_backend(BACKENDS[0] if name == "auto" else name, vocabulary)
    except ConfigError as error:
        if name != "auto":
            raise
        return None, Row("grammar", name, "off", error.found, error.remedy)
    reason = "requested" if name != "auto" else "the same text on every device, and it needs no tensor library"
    return Grammars(backend, GrammarChecks(backend.name, vocabulary)), Row(
        "grammar", name, backend.name, reason, remedy
    )


def open_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """Return the backend "llguidance" or "xgrammar" for a vocabulary. Raises ConfigError if it is
    not installed, or if the vocabulary has no end-of-sequence token."""
    if not vocabulary.eos_ids:
        raise ConfigError(
            "this checkpoint names no end-of-sequence token, so no output could end by its grammar",
            remedy="name eos_token_id in its generation_config.json",
        )
    try:
        if name == "llguidance":
            from sglcore.engine.structured_output.grammar_llguidance import Llguidance

            return Llguidance(vocabulary)
        from sglcore.engine.structured_output.grammar_xgrammar import Xgrammar

        return Xgrammar(vocabulary)
    except ImportError as error:
        raise ConfigError(
            f"the grammar backend {name} cannot be imported: {error}", remedy=f"pip install {error.name or name}"
        ) from None
