"""DRY: make tokens less likely that would continue a repetition, in addition to other constraints.

The host finds the repetitions in the request's own tokens, so the result does not depend on other
requests in the batch, and is the same after a preemption and with draft tokens. A new token is
compared once with each earlier token.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from sglcore.engine.structured_output.grammar_vocabulary import CompiledGrammar, Vocabulary
from sglcore.sampling.grammar_spec import Repetition
from sglcore.schedule.request import Floats, Ints, Matcher

LONGEST_MATCH = 256
"""Maximum length of a repetition, in tokens; longer ones count as this long."""
KEPT_STEPS = 16
"""Number of last tokens whose matches are kept, so that rejected draft tokens can be taken back.
After a longer rollback, matches are computed again."""
LEAST_ROOM = 256
MOST = 1e30
"""Initial free room for output tokens (LEAST_ROOM), and the largest penalty (MOST)."""


class Matches(NamedTuple):
    """Where the end of the text occurred before: `places` int64[M], ascending, the positions after
    each occurrence, and `lengths` int32[M], the number of equal tokens before each."""

    places: np.ndarray
    lengths: Ints


NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.float32))
NONE = Matches(np.zeros(0, np.int64), np.zeros(0, np.int32))


class RepetitionRules:
    """The DRY penalty of a request, shared by the matchers of its samples, in addition to the
    compiled constraint `inner` (None: none)."""

    def __init__(self, asked: Repetition, vocabulary: Vocabulary, inner: CompiledGrammar | None) -> None:
        self.asked, self._inner = asked, inner
        self._tokenizer = vocabulary.tokenizer
        self._before = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._skipped = len(self._decoded([]))
        self._texts: dict[int, str] = {}
        self.longest = max(map(len, asked.breakers), default=0)

    def start(self, prompt: Ints) -> RepetitionMatcher:
        """Return a matcher for one sample after the prompt, int32 token ids."""
        return RepetitionMatcher(self, prompt, None if self._inner is None else self._inner.start())

    def breaks(self, tokens: Ints) -> bool:
        """Return whether the text of the last of `tokens` completes a breaker: a text, such as a
        newline, at which a repetition ends."""
        text, place = "", len(tokens)
        own = self._text(int(tokens[-1])) if place else ""
        while place and len(text) - len(own) < self.longest:
            place -= 1
            text = self._text(int(tokens[place])) + text
        begin = len(text) - len(own)
        return any(text.find(word, max(begin - len(word) + 1, 0)) >= 0 for word in self.asked.breakers)

    def is_breaker(self, token: int) -> bool:
        """Return whether the text of one token contains a breaker."""
        return any(word in self._text(token) for word in self.asked.breakers)

    def _text(self, token: int) -> str:
        """Return a token's text as it reads after another token, so that a leading space is
        kept."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = self._decoded([token])[self._skipped :]
        return found

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode([*self._before, *tokens], skip_special_tokens=False)


class RepetitionMatcher:
    """The state of one sample: its `Matcher`, and its `LogitChange`."""

    __slots__ = ("_count", "_found", "_inner", "_rules", "_tokens")

    def __init__(self, rules: RepetitionRules, prompt: Ints, inner: Matcher | None) -> None:
        self._rules, self._inner = rules, inner
        self._count = len(prompt)
        self._tokens = np.zeros(self._count + LEAST_ROOM, np.int32)
        self._tokens[: self._count] = prompt
        self._found: deque[Matches] = deque(maxlen=KEPT_STEPS)

    @property
    def error(self) -> str:
        """The error of the inner matcher; empty if it has none, or if there is no inner matcher."""
        return "" if self._inner is None else self._inner.error

    def accept(self, token_id: int) -> bool:
        """Implements `Matcher.accept`: advance by a token; False if the inner matcher does not
        allow it."""
        if self._inner is not None and not self._inner.accept(token_id):
            return False
        known = self._matches()
        if self._count == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[self._count] = token_id
        self._count += 1
        self._found.append(self._next(known))
        return True

    def rollback(self, count: int) -> None:
        """Implements `Matcher.rollback`: take back the last `count` accepted tokens."""
        self._count -= count
        for _ in range(min(count, len(self._found))):
            self._found.pop()
        if self._inner is not None:
            self._inner.rollback(count)

    def fill(self, words: Ints) -> None:
        """Implements `Matcher.fill` by the inner matcher; without one, all bits of `words` are
        set."""
        if self._inner is None:
            words[:] = -1
        else:
            self._inner.fill(words)

    def change(self) -> tuple[Ints, Floats]:
        """Implements `LogitChange.change`: return the token ids int32[N] that would continue a
        repetition, and the negative penalty of each, float32[N]. Tokens that contain a breaker are
        left out."""
        asked, tokens, found = self._rules.asked, self._tokens[: self._count], self._matches()
        start = self._count - asked.last_n if asked.last_n > 0 else 0
        lengths = np.minimum(found.lengths, found.places - start)
        is_long = lengths >= asked.allowed_length
        if not is_long.any():
            return NOTHING
        ids, owner = np.unique(tokens[found.places[is_long]], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, owner, lengths[is_long])
        kept = np.array([not self._rules.is_breaker(int(token)) for token in ids], bool)
        with np.errstate(over="ignore"):
            lost = asked.multiplier * np.float64(asked.base) ** (longest[kept] - asked.allowed_length)
        return ids[kept], -np.minimum(lost, MOST).astype(np.float32)

    def _matches(self) -> Matches:
        if not self._found:
            self._found.append(self._anew())
        return self._found[-1]

    def _next(self, known: Matches) -> Matches:
        """Return the matches after the newest token, from `known`, those before it: one token
        longer where the text also continued with this token, new ones of length 1; none after a
        breaker."""
        tokens = self._tokens[: self._count]
        if self._rules.breaks(tokens):
            return NONE
        places = np.flatnonzero(tokens[:-1] == tokens[-1])
        where = np.searchsorted(known.places, places)
        lengths = np.zeros(len(places), np.int32)
        within = where < len(known.places)
        is_longer = within.copy()
        is_longer[within] = known.places[where[within]] == places[within]
        lengths[is_longer] = known.lengths[where[is_longer]]
        return Matches(places + 1, np.minimum(lengths + 1, LONGEST_MATCH).astype(np.int32))

    def _anew(self) -> Matches:
        """Return where the end of the text occurred before, computed from all tokens and not from
        the matches of the token before: each match is extended back from the end of the text. None
        after a breaker."""
        tokens, last = self._tokens[: self._count], self._count - 1
        if last < 1 or self._rules.breaks(tokens):
            return NONE
        places = going = np.flatnonzero(tokens[:last] == tokens[last])
        lengths = np.ones(self._count, np.int32)
        for back in range(1, LONGEST_MATCH):
            going = going[going >= back]
            if not len(going) or self._rules.breaks(tokens[: last - back + 1]):
                break
            going = going[tokens[going - back] == tokens[last - back]]
            lengths[going] += 1
        return Matches(places + 1, lengths[places])
