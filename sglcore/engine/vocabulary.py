"""What grammars are compiled for, and to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from sglcore.sampling.grammar import GrammarError
from sglcore.schedule.request import Matcher

MOST_TRIED = 8
"""First tokens that are tried of those that a grammar allows."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a mask is about: the tokenizer's tokens, `size` logits (ids beyond the tokenizer's are
    never allowed), and the ids that end an output."""

    tokenizer: Tokenizer
    size: int
    eos_ids: tuple[int, ...]


class CompiledGrammar(Protocol):
    """A grammar ready to be followed, by any number of samples."""

    def start(self) -> Matcher:
        """A matcher at the beginning, independent of all others."""
        ...


def first_steps(compiled: CompiledGrammar, vocabulary: Vocabulary) -> float:
    """Follow a grammar by some of its first tokens, as requests will; the most that a mask after
    one of them takes of the processor, in seconds. Raises GrammarError with the compiler's reason
    if it gives up there."""
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
        raise GrammarError(f"the grammar can not be enforced: {matcher.error}", wanted="a smaller or simpler one")
