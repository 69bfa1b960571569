"""Grammars checked before they are compiled here: in a process of their own, in which one that
takes too long or too much memory can be ended. A compiler in this process could not be.
"""

from __future__ import annotations

import msgspec

from sglcore.engine.confined import CheckLimits, ConfinedChecks, Verdict
from sglcore.engine.vocabulary import Vocabulary
from sglcore.sampling.grammar import GrammarBusy, GrammarError

MODULE = "sglcore.engine.grammar_check_process"
SMALLER = ("a smaller one", "take out repetitions with large counts")
"""What is wanted of a grammar that takes too much, and the remedy."""


class GrammarLimits(CheckLimits, frozen=True):
    """What the checks of one engine may take."""

    mask_seconds: float = 0.2
    """Of the processor, for a mask after the first one: every step of the device waits for it."""


class CheckSpec(msgspec.Struct, frozen=True):
    """What a checking process checks with."""

    backend: str
    tokenizer: str
    """Its file."""
    size: int
    eos_ids: tuple[int, ...]
    limits: GrammarLimits


class GrammarChecks(ConfinedChecks):
    """The checks of one vocabulary. What they are given is a Grammar."""

    def __init__(self, backend: str, vocabulary: Vocabulary, limits: GrammarLimits | None = None) -> None:
        def spec() -> CheckSpec:
            text = vocabulary.tokenizer.to_str()
            return CheckSpec(backend, text, vocabulary.size, vocabulary.eos_ids, limits or GrammarLimits())

        super().__init__(MODULE, "grammars", spec)


def failure_of(verdict: Verdict) -> GrammarError | None:
    """Return the error for the caller; None if the grammar is valid."""
    if verdict.busy:
        return GrammarBusy(verdict.busy)
    if verdict.ended:
        return GrammarError(f"compiling the grammar {verdict.ended}", wanted=SMALLER[0], remedy=SMALLER[1])
    if verdict.error is None:
        return None
    found, wanted, remedy = verdict.error
    return GrammarError(found, wanted=wanted, remedy=remedy)
