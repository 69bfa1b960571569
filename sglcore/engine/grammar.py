"""Grammars of requests: compiled in the background, kept, and started as one matcher for each sample.

It knows the libraries that compile by name only (`llguidance`, `xgrammar`); each is one file beside this one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread, stack_size
from typing import NamedTuple, Protocol

import numpy as np

from sglcore.device.errors import ConfigError
from sglcore.device.ledger import Row
from sglcore.engine.repetition import RepetitionRules
from sglcore.engine.thinking import ThinkingGrammar
from sglcore.engine.token_rules import RuledTokens
from sglcore.engine.vocabulary import CompiledGrammar, Vocabulary
from sglcore.sampling.grammar import Grammar, GrammarError, Repetition, Thinking, TokenRules
from sglcore.schedule.request import Ints, LogitChange, Matcher

BACKENDS = ("llguidance", "xgrammar")
KEPT_GRAMMARS = 256
COMPILE_SECONDS = 20.0
COMPILE_THREADS = 2
STACK_BYTES = 256 << 20
"""Compilers descend from rule to rule: a long chain of them would overrun the stack that threads have otherwise, and end
the process. Only what is used of it takes memory."""


Wanted = tuple[Grammar | None, Thinking | None, TokenRules | None, Repetition | None]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What binds an output (None: nothing), and what makes repetitions in it less likely, which is over it."""

    grammar: CompiledGrammar | None
    repetition: RepetitionRules | None = None

    def start(self, prompt: Ints) -> Started:
        """Both for one sample of a prompt."""
        if self.repetition is not None:
            found = self.repetition.start(prompt)
            return Started(found, found)
        assert self.grammar is not None
        return Started(self.grammar.start())


class Started(NamedTuple):
    """A matcher for one sample; `change`: the same again, if it adds to logits."""

    matcher: Matcher
    change: LogitChange | None = None


class GrammarBackend(Protocol):
    """A library that compiles grammars for one vocabulary."""

    @property
    def name(self) -> str:
        """As it is asked for."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """Whose masks it makes."""
        ...

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Waits, on any thread. Raises GrammarError if it can not be read or not be enforced as it stands."""
        ...


class Compiling:
    """A grammar on its way. Asked for `seconds` at most; what takes longer ends as an error, though its thread goes on."""

    def __init__(self, future: Future[Compiled], seconds: float) -> None:
        self._future = future
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    @property
    def is_done(self) -> bool:
        """`start` answers at once."""
        return self._future.done() or time.monotonic() >= self._until

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is done, or so long; whether it is done."""
        left = max(self._until - time.monotonic(), 0.0)
        try:
            self._future.exception(left if seconds is None else min(seconds, left))
        except TimeoutError:
            pass
        return self.is_done

    def start(self) -> Matcher:
        """A matcher for one sample of any prompt. Waits until it is done; raises GrammarError."""
        return self.start_after(np.zeros(0, np.int32)).matcher

    def start_after(self, prompt: Ints) -> Started:
        """What one sample of a prompt follows. Waits until it is done; raises GrammarError."""
        if not self._future.done() and self.wait() and not self._future.done():
            raise GrammarError(
                f"compiling the grammar took longer than {self._seconds:g} s",
                wanted="a smaller one",
                remedy="take out repetitions with large counts",
            )
        if (failure := self._future.exception()) is not None:
            # One exception serves all who ask: its traceback must not keep the frames, and so the requests, of them all.
            raise failure.with_traceback(None)
        return self._future.result().start(prompt)


class Grammars:
    """Compiles on threads of its own; the newest `kept` grammars are kept, those that failed as well."""

    def __init__(self, backend: GrammarBackend, *, kept: int = KEPT_GRAMMARS, seconds: float = COMPILE_SECONDS) -> None:
        self.backend = backend
        self._kept, self._seconds = kept, seconds
        self._known: OrderedDict[Wanted, Future[Compiled]] = OrderedDict()
        self._lock = Lock()
        self._jobs: SimpleQueue[tuple[Wanted, Future[Compiled]] | None] = SimpleQueue()
        self._threads: list[Thread] = []

    def compile(
        self,
        grammar: Grammar | None,
        thinking: Thinking | None = None,
        rules: TokenRules | None = None,
        repetition: Repetition | None = None,
    ) -> Compiling:
        """Start compiling a grammar (None: any text), behind reasoning if there is any, under the rules of tokens if there are,
        with DRY if that is asked, or join what was asked before; does not wait. Any thread may call it."""
        wanted = (grammar, thinking, rules, repetition)
        with self._lock:
            future = self._known.get(wanted)
            if future is None:
                future = self._known[wanted] = Future()
                self._queue(wanted, future)
            self._known.move_to_end(wanted)
            while len(self._known) > self._kept:
                self._known.popitem(last=False)
        return Compiling(future, self._seconds)

    def close(self) -> None:
        """Compile nothing more. Idempotent; does not wait."""
        with self._lock:
            for _ in self._threads:
                self._jobs.put(None)
            self._threads.clear()

    def _queue(self, wanted: Wanted, future: Future[Compiled]) -> None:
        self._jobs.put((wanted, future))
        if len(self._threads) < COMPILE_THREADS:
            # The interpreter does not wait for a daemon when it ends; a compiler can not be interrupted.
            thread = Thread(target=self._work, name="grammar", daemon=True)
            usual = stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                stack_size(usual)
            self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
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


def open_grammars(name: str, vocabulary: Vocabulary) -> tuple[Grammars | None, Row]:
    """The grammars of an engine by the backend asked for ("auto", "off", "llguidance" or "xgrammar"), and the decision.

    None: grammars are off, and the row says why. Raises ConfigError if a backend asked for by name can not be had.
    """
    remedy = "SGLCORE_GRAMMAR_BACKEND=llguidance, xgrammar or off"
    if name not in ("auto", "off", *BACKENDS):
        raise ConfigError(f"unknown grammar_backend {name!r}", wanted=f"auto, off or one of {', '.join(BACKENDS)}")
    if name == "off":
        return None, Row("grammar", name, "off", "asked for", remedy)
    try:
        backend = _open_backend(BACKENDS[0] if name == "auto" else name, vocabulary)
    except ConfigError as error:
        if name != "auto":
            raise
        return None, Row("grammar", name, "off", error.found, error.remedy)
    reason = "asked for" if name != "auto" else "the same text on every device, and it needs no tensor library"
    return Grammars(backend), Row("grammar", name, backend.name, reason, remedy)


def _open_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    if not vocabulary.eos_ids:
        raise ConfigError(
            "this checkpoint names no end-of-sequence token, so no output could end by its grammar",
            remedy="name eos_token_id in its generation_config.json",
        )
    try:
        if name == "llguidance":
            from sglcore.engine.grammar_llguidance import Llguidance

            return Llguidance(vocabulary)
        from sglcore.engine.grammar_xgrammar import Xgrammar

        return Xgrammar(vocabulary)
    except ImportError as error:
        raise ConfigError(
            f"the grammar backend {name} can not be imported: {error}", remedy=f"pip install {error.name or name}"
        ) from None
