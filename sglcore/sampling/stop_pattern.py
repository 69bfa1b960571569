"""Regular expressions that end a text. Each character is read once, for any pattern.

Supports Python's syntax without lookaround. A pattern becomes a position automaton (Glushkov,
1961). Sets of pattern characters are bit masks, so a text character costs one operation for each
position at which a match may have started.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from sglcore.sampling.pattern_syntax import Anchor, Atom, Choice, Joined, Node, PatternError, Repeat, read_pattern

MAX_PLACES = 128
"""Maximum number of characters of a pattern with its repetitions written out; the time of a step
grows with it.
"""
MAX_PARTS = 8192
"""Maximum number of parts of such a pattern, including empty ones."""
LONGEST_CUT = 1024
"""Maximum number of characters of a match that are held back and cut. Earlier characters of a
longer match have already been sent.
"""
KEPT_PATTERNS, KEPT_STEPS = 64, 1024


class Where(IntEnum):
    """What precedes a position in the text: nothing (BEGINNING), a newline (LINE, only for patterns
    with the flag MULTILINE), or another character (INSIDE).
    """

    BEGINNING = 0
    LINE = 1
    INSIDE = 2


class Ends(NamedTuple):
    """For a part of a pattern: the characters that may come first and last (bit masks), and whether
    it may be empty.
    """

    first: int
    last: int
    is_empty: bool


EMPTY, NEVER = Ends(0, 0, True), Ends(0, 0, False)


@dataclass(frozen=True, slots=True)
class Automaton:
    """A pattern under a given set of satisfied anchors. `follow[i]`: the pattern characters that
    may come after character i, as a bit mask; `ends`: those that may come first and last.
    """

    ends: Ends
    follow: list[int]


class StopPattern:
    """One pattern, shared by all texts that search for it. Raises PatternError for a text that is
    no regular expression, uses unsupported syntax, matches the empty text, or has more than
    MAX_PLACES characters with repetitions written out. In the sets of pattern characters that its
    methods take and return, bit i is the i-th character.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                flags = re.compile(text).flags
                root = read_pattern(text)
                self._places, *automata = _build(root)
                self._tests = {each: re.compile(each, flags) for each in set(self._places)}
        except (re.error, OverflowError) as error:
            raise PatternError(f"{text!r:.60} is not a regular expression: {error}") from None
        except RecursionError:
            raise PatternError(f"{text!r:.60} is nested too deeply") from None
        self._automata: Sequence[Automaton] = automata
        self.has_lines = bool(flags & re.MULTILINE)
        if any(each.ends.is_empty for each in self._automata):
            raise PatternError(f"{text!r:.60} matches the empty text, which would end every text")
        self._masks: dict[str, int] = {}
        self._steps: tuple[dict[int, int], ...] = tuple({} for _ in Where)

    def __len__(self) -> int:
        """Return the number of pattern characters with repetitions written out."""
        return len(self._places)

    def mask(self, character: str) -> int:
        """Return the set of pattern characters that match this text character."""
        found = self._masks.get(character)
        if found is None:
            fits = {each for each, test in self._tests.items() if test.fullmatch(character)}
            found = sum(1 << place for place, each in enumerate(self._places) if each in fits)
            _keep(self._masks, character, found)
        return found

    def first(self, where: Where) -> int:
        """Return the set of pattern characters with which a match may start. `where` is what
        precedes them in the text.
        """
        return self._automata[where].ends.first

    def last(self, where: Where) -> int:
        """Return the set of pattern characters with which a match may end. `where` is what precedes
        the text position after them.
        """
        return self._automata[where].ends.last

    def after(self, hits: int, where: Where) -> int:
        """Return the set of pattern characters that may come after any of the set `hits`. `where`
        is what precedes the text position after `hits`.
        """
        steps = self._steps[where]
        found = steps.get(hits)
        if found is None:
            follow, found = self._automata[where].follow, 0
            for place in _bits(hits):
                found |= follow[place]
            _keep(steps, hits, found)
        return found


class Match(NamedTuple):
    """Start (inclusive) and end (exclusive) of a match in a text, as numbers of characters. The
    start is at most LONGEST_CUT before the end: a longer match is cut.
    """

    start: int
    end: int


class PatternScan:
    """One growing text and one pattern. Finds the match that ends first; if several end there, the
    one that starts first.
    """

    def __init__(self, pattern: StopPattern) -> None:
        self.pattern = pattern
        self._begun: list[tuple[int, int]] = []
        """Positions at which a match may have started, ascending. Each has the pattern characters
        that may come next and that no earlier position waits for.
        """
        self._length, self._where = 0, Where.BEGINNING

    def feed(self, new: str, *, may_end: bool = True) -> Match | None:
        """Read new text up to the end of the first match and return it; None if there is none. The
        match's positions count from the start of the whole text. With `may_end` False, matches that
        complete in this text are ignored.
        """
        for character in new:
            mask = self.pattern.mask(character)
            if not self._begun and not mask & self.pattern.first(self._where):
                self._move(character)
                continue
            start = self._step(character, mask)
            if start is not None and may_end:
                return Match(max(start, self._length - LONGEST_CUT), self._length)
        return None

    @property
    def held_back(self) -> int:
        """Number of characters at the end of the text that may belong to a match, at most
        LONGEST_CUT.
        """
        return min(self._length - self._begun[0][0], LONGEST_CUT) if self._begun else 0

    def _step(self, character: str, mask: int) -> int | None:
        """Read one character. Returns the start of the match that it completes, or None."""
        begun = [*self._begun, (self._length, self.pattern.first(self._where))]
        self._move(character)
        last, after, where = self.pattern.last(self._where), self.pattern.after, self._where
        kept: list[tuple[int, int]] = []
        found, seen = None, 0
        for start, wanted in begun:
            hits = wanted & mask
            if not hits:
                continue
            if found is None and hits & last:
                found = start
            following = after(hits, where) & ~seen
            if following:
                seen |= following
                kept.append((start, following))
        self._begun = kept
        return found

    def _move(self, character: str) -> None:
        self._length += 1
        self._where = Where.LINE if self.pattern.has_lines and character == "\n" else Where.INSIDE


@lru_cache(maxsize=KEPT_PATTERNS)
def stop_pattern(text: str) -> StopPattern:
    """Return the pattern of a text; it is compiled once while among the KEPT_PATTERNS used last.
    Raises PatternError.
    """
    return StopPattern(text)


def _keep(found: dict[Any, int], key: Any, value: int) -> None:
    if len(found) >= KEPT_STEPS:
        found.clear()
    found[key] = value


def _bits(word: int) -> Iterator[int]:
    while word:
        low = word & -word
        yield low.bit_length() - 1
        word ^= low


def _build(root: Node) -> tuple[list[str], Automaton, Automaton, Automaton]:
    """Return the characters of a pattern, each as a pattern of its own, and the automata, one for
    each `Where`.
    """
    anchors = (frozenset(Anchor), frozenset({Anchor.LINE}), frozenset[Anchor]())
    builders = [_Builder(holding) for holding in anchors]
    found = [Automaton(builder.ends(root), builder.follow) for builder in builders]
    return builders[0].places, found[0], found[1], found[2]


class _Builder:
    """Builds an `Automaton` for one set of satisfied anchors, `holding`: `ends` visits the
    pattern's tree and fills `places` and `follow`. Characters are numbered in order of appearance,
    which does not depend on the anchors.
    """

    def __init__(self, holding: frozenset[Anchor]) -> None:
        self._holding = holding
        self._parts = 0
        self.places: list[str] = []
        self.follow: list[int] = []

    def ends(self, node: Node) -> Ends:
        """Number the characters of a part and return its ends. Raises PatternError beyond
        MAX_PLACES characters or MAX_PARTS parts.
        """
        self._parts += 1
        if self._parts > MAX_PARTS or len(self.places) > MAX_PLACES:
            raise PatternError(f"with its repetitions written out it has more than {MAX_PLACES} characters")
        match node:
            case Atom(text):
                return self._place(text)
            case Anchor():
                return EMPTY if node in self._holding else NEVER
            case Joined(parts):
                found = EMPTY
                for part in parts:
                    found = self._join(found, self.ends(part))
                return found
            case Choice(parts):
                each = [self.ends(part) for part in parts]
                return Ends(_union(e.first for e in each), _union(e.last for e in each), any(e.is_empty for e in each))
            case Repeat():
                return self._repeat(node)

    def _place(self, text: str) -> Ends:
        bit = 1 << len(self.places)
        self.places.append(text)
        self.follow.append(0)
        return Ends(bit, bit, False)

    def _join(self, one: Ends, other: Ends) -> Ends:
        for place in _bits(one.last):
            self.follow[place] |= other.first
        return Ends(
            one.first | (other.first if one.is_empty else 0),
            other.last | (one.last if other.is_empty else 0),
            one.is_empty and other.is_empty,
        )

    def _repeat(self, node: Repeat) -> Ends:
        found = EMPTY
        for _ in range(node.low):
            found = self._join(found, self.ends(node.part))
        if node.high is None:
            again = self.ends(node.part)
            self._join(again, again)
            return self._join(found, again._replace(is_empty=True))
        rest = EMPTY
        for _ in range(node.high - node.low):
            rest = self._join(self.ends(node.part), rest)._replace(is_empty=True)
        return self._join(found, rest)


def _union(words: Iterator[int]) -> int:
    found = 0
    for word in words:
        found |= word
    return found
