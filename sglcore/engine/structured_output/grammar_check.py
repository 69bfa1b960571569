"""Checks of grammars before they are compiled here, in a separate process that can be killed if a
grammar takes too much time or memory. A compiler in this process can not be interrupted."""

from __future__ import annotations

import msgspec

from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.killable_checks import CheckLimits, ConfinedChecks, Verdict
from sglcore.sampling.grammar_spec import GrammarBusy, GrammarError

MODULE = "sglcore.engine.structured_output.grammar_check_process"
SMALLER = ("a smaller one", "take out repetitions with large counts")
"""What a grammar that takes too much should be instead, and the remedy."""


class GrammarLimits(CheckLimits, frozen=True):
    """What the checks of one engine may take."""

    mask_seconds: float = 0.2
    """CPU seconds for a mask after the first one: every step of the device waits for it."""


class CheckSpec(msgspec.Struct, frozen=True):
    """The specification of a checking process."""

    backend: str
    tokenizer: str
    """The tokenizer's file."""
    size: int
    eos_ids: tuple[int, ...]
    limits: GrammarLimits


class GrammarChecks(ConfinedChecks):
    """The checks of one vocabulary; they take a Grammar."""

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
