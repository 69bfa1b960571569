"""A grammar is followed through some of its first tokens before a request uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from sglcore.engine.structured_output.grammar_vocabulary import MOST_TRIED, Vocabulary, first_steps
from sglcore.sampling.grammar_spec import GrammarError

EOS = (2, 69)
VOCABULARY = Vocabulary(Tokenizer(models.BPE()), 70, EOS)


class Followed:
    """A grammar that allows some tokens first; it gives up at one of its steps, which are counted
    from its first mask, and has no error after the others."""

    def __init__(self, *allowed: int, gives_up: int | None = None) -> None:
        self.allowed, self.gives_up = allowed, gives_up
        self.tried: list[int] = []

    def start(self) -> Any:
        return Matcher(self)


class Matcher:
    def __init__(self, grammar: Followed) -> None:
        self.grammar, self.steps, self.error = grammar, 0, ""

    def _step(self) -> None:
        self.error = "too large" if self.steps == self.grammar.gives_up else ""
        self.steps += 1

    def accept(self, token_id: int) -> bool:
        assert self.steps == 1
        self.grammar.tried.append(token_id)
        self._step()
        return not self.error

    def rollback(self, count: int) -> None:
        raise AssertionError("nothing is taken back")

    def fill(self, words: NDArray[np.int32]) -> None:
        words[:] = 0
        for token in self.grammar.allowed:
            words.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        self._step()


@pytest.mark.parametrize(
    ("allowed", "tried"),
    [
        ((), []),
        (EOS, []),
        ((7,), [7]),
        ((0, 2, 68, 69), [0, 68]),
        (tuple(range(3, 3 + MOST_TRIED)), list(range(3, 3 + MOST_TRIED))),
    ],
)
def test_each_of_a_few_tokens_is_tried_and_no_end(allowed: tuple[int, ...], tried: list[int]) -> None:
    grammar = Followed(*allowed)
    assert 0.0 <= first_steps(grammar, VOCABULARY) < 5.0 and grammar.tried == tried


def test_of_many_tokens_some_are_tried_from_the_first_to_the_last() -> None:
    grammar = Followed(*range(70))
    first_steps(grammar, VOCABULARY)
    tried = grammar.tried
    assert len(tried) == MOST_TRIED and (tried[0], tried[-1]) == (0, 68) and tried == sorted(set(tried) - set(EOS))


@pytest.mark.parametrize("slow", [5, 6, 7])
def test_the_time_of_a_mask_is_that_of_the_slowest_one(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs only in masks: by 8 seconds in the first one of each matcher, then by 4 after
    one token and by 1 after the others."""
    clock = [0.0]

    class Timed(Matcher):
        def fill(self, words: NDArray[np.int32]) -> None:
            clock[0] += 8.0 if self.steps == 0 else 4.0 if self.grammar.tried[-1] == slow else 1.0
            super().fill(words)

    grammar = Followed(5, 6, 7)
    grammar.start = lambda: Timed(grammar)
    monkeypatch.setattr("time.thread_time", lambda: clock[0])
    assert first_steps(grammar, VOCABULARY) == 4.0 and grammar.tried == [5, 6, 7]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_grammar_that_gives_up_at_one_of_its_first_steps_is_refused_with_the_reason(step: int) -> None:
    with pytest.raises(GrammarError, match="cannot be enforced: too large; wanted a smaller or simpler one"):
        first_steps(Followed(5, 6, gives_up=step), VOCABULARY)
