"""Parse regular expressions in Python's syntax into trees of single characters, for a matcher that
only moves forward.

The input must have been compiled by `re`, so its syntax is correct. Unsupported syntax is refused
by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_FLAGS = re.compile(r"(?:\(\?[aiLmsux]+\))*")
_COUNTS = re.compile(r"\{(?:(\d+)|(\d*),(\d*))\}")
_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x..|u....|U.{8}|N\{[^}]*\}|0[0-7]{0,2}|.)", re.DOTALL)
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")
_REFUSED = (
    (re.compile(r"\(\?<?[=!]"), "looks ahead or back"),
    (re.compile(r"\(\?P=|\(\?\(|\\[1-9]"), "refers to a group"),
    (re.compile(r"\(\?>"), "has an atomic group"),
    (re.compile(r"\(\?#"), "has a comment"),
    (re.compile(r"\(\?[aiLmsux-]"), "has flags for a part of it"),
    (re.compile(r"\$|\\Z"), "matches the end of a text that is still growing"),
    (re.compile(r"\\[bB]"), "matches the edge of a word, which depends on the next character"),
)


DEEPEST = 50
"""Maximum depth of nested groups."""


class PatternError(ValueError):
    """A regular expression that the matcher does not support, with the reason."""


class Anchor(IntEnum):
    """What must precede a position: nothing, so that it is the start of the text (BEGINNING), or
    nothing or a newline (LINE).
    """

    BEGINNING = 0
    LINE = 1


@dataclass(frozen=True, slots=True)
class Atom:
    """A leaf of a pattern's tree: it matches one character; `text` is the regular expression for
    that character.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A node of a pattern's tree: its parts one after another; no parts match the empty text."""

    parts: Sequence[Node]


@dataclass(frozen=True, slots=True)
class Choice:
    """A node of a pattern's tree: one of several alternatives."""

    parts: Sequence[Node]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A node of a pattern's tree: a part repeated `low` to `high` times (None: no maximum)."""

    part: Node
    low: int
    high: int | None


Node = Atom | Anchor | Joined | Choice | Repeat


def read_pattern(text: str) -> Node:
    """Return the tree of a pattern that `re` has compiled. Raises PatternError for unsupported
    syntax.
    """
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._depth = text, 0
        flags = _FLAGS.match(text)
        assert flags is not None
        self._at, self._has_lines = flags.end(), "m" in flags[0]
        if "x" in flags[0]:
            raise PatternError("it has the flag x")

    def read(self) -> Node:
        """Return the tree of the whole pattern. Raises PatternError for unsupported syntax."""
        return self._choice()

    def _choice(self) -> Node:
        found = [self._joined()]
        while self._takes("|"):
            found.append(self._joined())
        return found[0] if len(found) == 1 else Choice(found)

    def _joined(self) -> Node:
        found: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            found.append(self._repeated(self._part()))
        return Joined(found)

    def _part(self) -> Node:
        for pattern, reason in _REFUSED:
            if pattern.match(self._text, self._at):
                raise PatternError(f"it {reason}")
        if self._takes("^"):
            return Anchor.LINE if self._has_lines else Anchor.BEGINNING
        if self._takes(r"\A"):
            return Anchor.BEGINNING
        group = _GROUP.match(self._text, self._at)
        return self._atom() if group is None else self._group(group.end())

    def _group(self, start: int) -> Node:
        self._at, self._depth = start, self._depth + 1
        if self._depth > DEEPEST:
            raise PatternError(f"it is nested more than {DEEPEST} groups deep")
        found = self._choice()
        self._takes(")")
        self._depth -= 1
        return found

    def _atom(self) -> Atom:
        text, start = self._text, self._at
        longer = _CLASS.match(text, start) or _ESCAPE.match(text, start)
        self._at = longer.end() if longer is not None else start + 1
        found = text[start : self._at]
        return Atom(re.escape(found) if longer is None and found != "." else found)

    def _repeated(self, part: Node) -> Node:
        low, high = 1, None
        if (counts := _COUNTS.match(self._text, self._at)) is not None:
            self._at = counts.end()
            low = int(counts[1] or counts[2] or 0)
            high = low if counts[1] else int(counts[3]) if counts[3] else None
        elif self._takes("?"):
            low, high = 0, 1
        elif self._takes("*"):
            low = 0
        elif not self._takes("+"):
            return part
        if self._takes("+"):
            raise PatternError("it has a possessive repetition")
        self._takes("?")
        return Repeat(part, low, high)

    def _takes(self, word: str) -> bool:
        is_there = self._text.startswith(word, self._at)
        self._at += len(word) if is_there else 0
        return is_there
