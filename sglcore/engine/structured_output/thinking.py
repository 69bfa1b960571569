"""Reasoning before the part of an output that a grammar constrains: free text up to an end mark,
which is forced when the token budget is used up.

It depends on no grammar library; any matcher, or none, may follow the mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from sglcore.engine.structured_output.grammar_vocabulary import CompiledGrammar, Vocabulary
from sglcore.sampling.grammar_spec import Thinking
from sglcore.schedule.request import Ints, Matcher


class Phase(IntEnum):
    """The phase of an output: BEFORE the reasoning, INSIDE it, CLOSING (in the end mark that is
    forced when the token budget is used up), or in the ANSWER."""

    BEFORE = 0
    INSIDE = 1
    CLOSING = 2
    ANSWER = 3


class Step(NamedTuple):
    """The state of a `ThinkingMatcher` after a token. `count`: tokens of the output so far in this
    phase, if it is INSIDE or CLOSING; `is_inner`: whether the inner matcher has accepted the token.
    """

    phase: Phase
    count: int = 0
    is_inner: bool = False


class ThinkingGrammar:
    """A `CompiledGrammar`: reasoning, then the compiled grammar `inner` (None: any text); shared by
    the matchers of all samples.

    The end mark may consist of several tokens. A token that ends the mark and adds text is allowed
    only if the text is white space: the inner matcher must get the answer from its beginning.
    """

    def __init__(self, thinking: Thinking, vocabulary: Vocabulary, inner: CompiledGrammar | None) -> None:
        """`inner` follows the reasoning (None: any text). If the end mark is not a single token,
        every token of the vocabulary is decoded, which takes a while."""
        self._inner = inner
        self.end = thinking.end
        self.tokenizer = vocabulary.tokenizer
        self.budget = thinking.budget
        self.closing: list[int] = self.tokenizer.encode(thinking.closing, add_special_tokens=False).ids
        self.begin = self.tokenizer.token_to_id(thinking.begin) if thinking.begin else None
        barred = () if thinking.may_stop else vocabulary.eos_ids
        self.free = _all_but(barred, vocabulary.size)
        self.beyond = self._tokens_beyond(vocabulary.size)

    def start(self) -> Matcher:
        """Return a new matcher at the beginning, independent of all others."""
        return ThinkingMatcher(self, None if self._inner is None else self._inner.start())

    def _tokens_beyond(self, size: int) -> dict[int, Ints]:
        """Return, by the number of characters of the end mark already written, the mask
        int32[ceil(V / 32)] without the tokens that complete the end mark and add more text. Empty
        if the end mark is a single token."""
        if self.tokenizer.token_to_id(self.end) is not None:
            return {}
        texts = [self.tokenizer.decode([token], skip_special_tokens=False) for token in range(size)]
        found: dict[int, Ints] = {}
        for length in range(1, len(self.end)):
            rest = self.end[length:]
            barred = [token for token, text in enumerate(texts) if text.startswith(rest) and text[len(rest) :].strip()]
            found[length] = _all_but(barred, size)
        return found


class ThinkingMatcher:
    """The `Matcher` of one sample: its reasoning, then the inner grammar."""

    __slots__ = ("_inner", "_rules", "_steps", "_tokens")

    def __init__(self, rules: ThinkingGrammar, inner: Matcher | None) -> None:
        self._rules, self._inner = rules, inner
        self._tokens: list[int] = []
        self._steps = [self._inside(0) if rules.begin is None else Step(Phase.BEFORE)]

    @property
    def error(self) -> str:
        """The error of the inner matcher; empty if it has none, or if there is no inner matcher."""
        return "" if self._inner is None else self._inner.error

    def accept(self, token_id: int) -> bool:
        """Implements `Matcher.accept`: advance by a token; False if it is not allowed in the
        present phase."""
        step = self._after(self._steps[-1], token_id)
        if step is None:
            return False
        self._tokens.append(token_id)
        self._steps.append(step)
        return True

    def rollback(self, count: int) -> None:
        """Implements `Matcher.rollback`: take back the last `count` accepted tokens, those of the
        inner matcher included."""
        kept = len(self._steps) - count
        taken = sum(step.is_inner for step in self._steps[kept:])
        del self._steps[kept:], self._tokens[kept - 1 :]
        if self._inner is not None:
            self._inner.rollback(taken)

    def fill(self, words: Ints) -> None:
        """Implements `Matcher.fill`: write the mask of the allowed next tokens in the present phase
        into `words` int32[ceil(V / 32)]."""
        rules, (phase, count, _) = self._rules, self._steps[-1]
        if phase is Phase.CLOSING:
            words[:] = 0
            _set(words, rules.closing[count])
        elif phase is Phase.INSIDE:
            words[:] = rules.free
            if (begun := self._begun()) in rules.beyond:
                words &= rules.beyond[begun]
        elif self._inner is None:
            words[:] = -1
        else:
            self._inner.fill(words)
        if phase is Phase.BEFORE and rules.begin is not None:
            _set(words, rules.begin)

    def _after(self, step: Step, token: int) -> Step | None:
        rules = self._rules
        if step.phase is Phase.CLOSING:
            if token != rules.closing[step.count]:
                return None
            more = step.count + 1
            return Step(Phase.CLOSING, more) if more < len(rules.closing) else Step(Phase.ANSWER)
        if step.phase is Phase.INSIDE:
            return Step(Phase.ANSWER) if rules.end in self._tail(token) else self._inside(step.count + 1)
        if step.phase is Phase.BEFORE and token == rules.begin:
            return self._inside(0)
        is_taken = self._inner is None or self._inner.accept(token)
        return Step(Phase.ANSWER, 0, is_inner=True) if is_taken else None

    def _inside(self, count: int) -> Step:
        is_over = self._rules.budget is not None and count >= self._rules.budget
        return Step(Phase.CLOSING) if is_over else Step(Phase.INSIDE, count)

    def _tail(self, *more: int) -> str:
        """Return the text of the last tokens followed by the tokens `more`, long enough to contain
        the end mark."""
        tokens = (*self._tokens[-len(self._rules.end) :], *more)
        return self._rules.tokenizer.decode(tokens, skip_special_tokens=False)

    def _begun(self) -> int:
        """Return the number of characters of the end mark with which the text ends; 0 if the end
        mark is a single token."""
        if not self._rules.beyond:
            return 0
        tail, end = self._tail(), self._rules.end
        return next((length for length in range(len(end) - 1, 0, -1) if tail.endswith(end[:length])), 0)


def _all_but(barred: Sequence[int], size: int) -> Ints:
    """Return a mask int32[ceil(size / 32)] that allows every token id except `barred`."""
    words = np.full(-(-size // 32), -1, dtype=np.int32)
    for token in barred:
        words.view(np.uint32)[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    return words


def _set(words: Ints, token: int) -> None:
    words.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
