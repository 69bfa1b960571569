"""Checks of grammars before they are compiled in the engine: a separate process compiles them
first, which can be killed if a grammar takes too much time or memory. A compiler in the engine's
process cannot be interrupted."""

from __future__ import annotations

import msgspec

from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.killable_checks import CheckLimits, ConfinedChecks, Verdict
from sglcore.sampling.grammar_spec import GrammarBusy, GrammarError

MODULE = "sglcore.engine.structured_output.grammar_check_process"
SMALLER = ("a smaller one", "take out repetitions with large counts")
"""`wanted` and `remedy` of the error for a grammar that takes too much time or memory."""


class GrammarLimits(CheckLimits, frozen=True):
    """The limits of one check of a grammar: those of `CheckLimits`, and the CPU seconds of one
    mask."""

    mask_seconds: float = 0.2
    """Maximum CPU seconds for a mask after the first one: every step of the device waits for it."""


class CheckSpec(msgspec.Struct, frozen=True):
    """What the process that checks grammars is started with, the first line of its standard input
    as JSON: the library, the tokenizer, the `size` of the model's vocabulary, the ids of the tokens
    that end an output, and the limits."""

    backend: str
    tokenizer: str
    """The content of tokenizer.json."""
    size: int
    eos_ids: tuple[int, ...]
    limits: GrammarLimits


class GrammarChecks(ConfinedChecks):
    """The checks of grammars for one vocabulary, by the library `backend`; `submit` takes a
    Grammar."""

    def __init__(self, backend: str, vocabulary: Vocabulary, limits: GrammarLimits | None = None) -> None:
        def spec() -> CheckSpec:
            text = vocabulary.tokenizer.to_str()
            return CheckSpec(backend, text, vocabulary.size, vocabulary.eos_ids, limits or GrammarLimits())

        super().__init__(MODULE, "grammars", spec)


def failure_of(verdict: Verdict) -> GrammarError | None:
    """Return the error that the caller of a grammar gets for a check's verdict: GrammarBusy if it
    was refused for now, GrammarError if the grammar is invalid or takes too much; None if the
    grammar is valid."""
    if verdict.busy:
        return GrammarBusy(verdict.busy)
    if verdict.ended:
        return GrammarError(f"compiling the grammar {verdict.ended}", wanted=SMALLER[0], remedy=SMALLER[1])
    if verdict.error is None:
        return None
    found, wanted, remedy = verdict.error
    return GrammarError(found, wanted=wanted, remedy=remedy)
