"""Allowed tokens and banned words, in addition to the other constraint of an output. With a
grammar, the tokens that end an output stay allowed: the grammar decides where they may come."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sglcore.engine.structured_output.grammar_vocabulary import CompiledGrammar, Vocabulary
from sglcore.sampling.grammar_spec import GrammarError, TokenRules
from sglcore.schedule.request import Ints, Matcher

NOTHING_LEFT = "allowed_token_ids and bad_words leave no token to sample"


class RuledTokens:
    """The rules as masks and sequences, shared by all matchers. `inner`: the other constraint of
    the output (None: none); with `has_end` it decides where the output ends. Raises GrammarError if
    no token is allowed at the beginning."""

    def __init__(
        self, rules: TokenRules, vocabulary: Vocabulary, inner: CompiledGrammar | None, *, has_end: bool = False
    ) -> None:
        self._inner = inner
        self.allowed = frozenset(rules.allowed)
        self.mask = np.full(-(-vocabulary.size // 32), 0 if rules.allowed else -1, dtype=np.int32)
        for token in (*rules.allowed, *(vocabulary.eos_ids if has_end else ())):
            self.mask.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        spelled = (word for each in rules.bad_words for word in (each, " " + each))
        encoded = (vocabulary.tokenizer.encode(word, add_special_tokens=False).ids for word in spelled)
        self.barred = tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))
        first = self.start()
        first.fill(np.zeros_like(self.mask))
        if first.error:
            raise GrammarError(first.error, remedy="allow more of them")

    def start(self) -> Matcher:
        """As `CompiledGrammar.start`."""
        return RuledMatcher(self, None if self._inner is None else self._inner.start())


class RuledMatcher:
    """The state of one sample in the rules."""

    __slots__ = ("_error", "_inner", "_rules", "_tokens")

    def __init__(self, rules: RuledTokens, inner: Matcher | None) -> None:
        self._rules, self._inner, self._tokens = rules, inner, list[int]()
        self._error = ""

    @property
    def error(self) -> str:
        """As `Matcher.error`."""
        return self._error or ("" if self._inner is None else self._inner.error)

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        rules = self._rules
        if (rules.allowed and token_id not in rules.allowed) or token_id in self._barred():
            return False
        if self._inner is not None and not self._inner.accept(token_id):
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        """As `Matcher.rollback`."""
        self._error = ""
        del self._tokens[len(self._tokens) - count :]
        if self._inner is not None:
            self._inner.rollback(count)

    def fill(self, words: Ints) -> None:
        """As `Matcher.fill`."""
        if self._inner is None:
            words[:] = self._rules.mask
        else:
            self._inner.fill(words)
            words &= self._rules.mask
        for token in self._barred():
            words.view(np.uint32)[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        if not self.error and not words.any():
            self._error = NOTHING_LEFT

    def _barred(self) -> Iterator[int]:
        """Yield the last tokens of banned words that one more token would complete."""
        for *begin, last in self._rules.barred:
            if not begin or self._tokens[-len(begin) :] == begin:
                yield last
