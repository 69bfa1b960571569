"""Allowed tokens and banned words, in addition to the other constraint of an output. With a
grammar, the tokens that end an output stay allowed: the grammar decides where they may occur."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sglcore.engine.structured_output.grammar_vocabulary import CompiledGrammar, Vocabulary
from sglcore.sampling.grammar_spec import GrammarError, TokenRules
from sglcore.schedule.request import Ints, Matcher

NOTHING_LEFT = "allowed_token_ids and bad_words leave no token to sample"


class RuledTokens:
    """A `CompiledGrammar` for the token rules of a request, combined with the compiled constraint
    `inner` (None: none). With `has_end`, `inner` decides where the output ends. Raises GrammarError
    if no token is allowed at the beginning."""

    def __init__(
        self, rules: TokenRules, vocabulary: Vocabulary, inner: CompiledGrammar | None, *, has_end: bool = False
    ) -> None:
        self._inner = inner
        ends = vocabulary.eos_ids if has_end else ()
        self.allowed = frozenset((*rules.allowed, *ends) if rules.allowed else ())
        self.mask = np.full(-(-vocabulary.size // 32), 0 if rules.allowed else -1, dtype=np.int32)
        for token in self.allowed:
            self.mask.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        spelled = (word for each in rules.bad_words for word in (each, " " + each))
        encoded = (vocabulary.tokenizer.encode(word, add_special_tokens=False).ids for word in spelled)
        self.barred = tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))
        first = self.start()
        first.fill(np.zeros_like(self.mask))
        if first.error:
            raise GrammarError(first.error, remedy="allow more of them")

    def start(self) -> Matcher:
        """Return a new matcher at the beginning, independent of all others."""
        return RuledMatcher(self, None if self._inner is None else self._inner.start())


class RuledMatcher:
    """The `Matcher` of one sample: the token rules and the inner matcher."""

    __slots__ = ("_error", "_inner", "_rules", "_tokens")

    def __init__(self, rules: RuledTokens, inner: Matcher | None) -> None:
        self._rules, self._inner, self._tokens = rules, inner, list[int]()
        self._error = ""

    @property
    def error(self) -> str:
        """Why no token is allowed, or the error of the inner matcher; empty if there is none."""
        return self._error or ("" if self._inner is None else self._inner.error)

    def accept(self, token_id: int) -> bool:
        """Implements `Matcher.accept`: advance by a token; False if the rules or the inner matcher
        forbid it."""
        rules = self._rules
        if (rules.allowed and token_id not in rules.allowed) or token_id in self._barred():
            return False
        if self._inner is not None and not self._inner.accept(token_id):
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        """Implements `Matcher.rollback`: take back the last `count` accepted tokens and any
        failure."""
        self._error = ""
        del self._tokens[len(self._tokens) - count :]
        if self._inner is not None:
            self._inner.rollback(count)

    def fill(self, words: Ints) -> None:
        """Implements `Matcher.fill`: write the mask of the tokens that the rules and the inner
        matcher allow into `words` int32[ceil(V / 32)]. If none is left, `error` is set."""
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
        """Yield the token ids that would complete a banned word now."""
        for *begin, last in self._rules.barred:
            if not begin or self._tokens[-len(begin) :] == begin:
                yield last
