"""The vocabulary for which grammars are compiled, and the interface of a compiled grammar."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from sglcore.sampling.grammar_spec import GrammarError
from sglcore.schedule.request import Matcher

MOST_TRIED = 8
"""Maximum number of allowed first tokens that `first_steps` tries."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens for which masks are made: the tokenizer, the `size` of the model's vocabulary (ids
    beyond the tokenizer's are never allowed), and the ids of the tokens that end an output."""

    tokenizer: Tokenizer
    size: int
    eos_ids: tuple[int, ...]


class CompiledGrammar(Protocol):
    """A compiled constraint of a request; its `start` makes a `Matcher` for each sample. It is a
    backend's grammar, or a wrapper such as `ThinkingGrammar`."""

    def start(self) -> Matcher:
        """Return a new matcher at the beginning of the grammar, independent of all others."""
        ...


def first_steps(compiled: CompiledGrammar, vocabulary: Vocabulary) -> float:
    """Try up to MOST_TRIED first tokens of a grammar, each with the mask after it, as requests
    will. Returns the largest CPU seconds of such a mask (0.0 if only an end token may come first).
    Raises GrammarError with the compiler's reason if it fails at one."""
    words = np.zeros(-(-vocabulary.size // 32), dtype=np.int32)
    matcher = compiled.start()
    matcher.fill(words)
    _refuse(matcher)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    allowed = allowed[~np.isin(allowed, vocabulary.eos_ids)]
    slowest = 0.0
    for place in sorted({round(step) for step in np.linspace(0, len(allowed) - 1, MOST_TRIED)}) if len(allowed) else ():
        matcher = compiled.start()
        matcher.fill(words)
        matcher.accept(int(allowed[place]))
        _refuse(matcher)
        begin = time.thread_time()
        matcher.fill(words)
        slowest = max(slowest, time.thread_time() - begin)
        _refuse(matcher)
    return slowest


def _refuse(matcher: Matcher) -> None:
    if matcher.error:
        raise GrammarError(f"the grammar cannot be enforced: {matcher.error}", wanted="a smaller or simpler one")
