"""Decodes tokens as they arrive, in whole characters, and cuts the text at stop strings and
patterns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from sglcore.sampling.stop_pattern import PatternScan, stop_pattern

CONTEXT = 8
"""Number of last prompt tokens that are decoded together with the first new tokens."""

UNKNOWN = "\ufffd"
"""The character that decoders write for an incomplete character."""

INCOMPLETE = 4
"""Maximum number of last tokens that may belong to an incomplete character, which has at most 3
bytes, at least one in each token."""


class DecodesTokens(Protocol):
    """A tokenizer as `IncrementalDetokenizer` uses it, such as `TextCodec`."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, without special tokens unless `skip_special_tokens` is
        False."""
        ...


class Ending(NamedTuple):
    """The end of a text: the range of characters start..end - 1 of a stop string or a pattern's
    match, and that string or pattern as `cause`."""

    start: int
    end: int
    cause: str


class IncrementalDetokenizer:
    """The text of tokens that arrive one after another, cut at stop strings and at matches of
    `patterns`.

    `push` returns text that is final: no half characters, and no beginning of a possible stop
    string or match. `stopped_by` is the stop string or pattern that ended the text; `taken` is the
    number of tokens of the last `push` that were used: all, or those up to and with the one that
    completed the stop. `prompt` ends with the tokens before the first one, which decide whether the
    text begins with a space. A stop string or match that is complete within the first `min_tokens`
    tokens does not count.
    """

    def __init__(
        self,
        codec: DecodesTokens,
        stop: Sequence[str],
        *,
        skip_special: bool,
        include_stop: bool,
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
        patterns: Sequence[str] = (),
    ) -> None:
        self._codec = codec
        self._skip_special = skip_special
        self._skipped = codec.special_ids if skip_special else frozenset()
        self._stop = tuple(stop)
        self._scans = [PatternScan(stop_pattern(each)) for each in patterns]
        self._include_stop = include_stop
        self._ids = list(prompt[-CONTEXT:])
        self._first, self._read = 0, len(self._ids)
        self._shown = 0
        self._count, self._min_tokens = 0, min_tokens
        self._free = 0
        """Number of leading characters of the text in which no stop string may end."""
        self.text = ""
        self.stopped_by: str | None = None
        self.taken = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add new tokens, up to the one that ends the text; returns the text that became final."""
        self.taken = 0
        for token_id in ids:
            if self.stopped_by is not None:
                break
            self.taken += 1
            self._count += 1
            if token_id in self._skipped:
                continue
            self._ids.append(token_id)
            new = self._pending()
            if new and not new.endswith(UNKNOWN):
                self._append(new)
                self._first, self._read = self._read, len(self._ids)
            elif len(self._ids) - self._read > 2 * INCOMPLETE:
                self._take_garbage()
        return self._show(len(self.text) - self._held_back())

    def finish(self) -> str:
        """End the text after its last token; returns the rest of it, including the decoding of an
        incomplete last character."""
        if self.stopped_by is None:
            self._append(self._pending())
        return self._show(len(self.text))

    def _pending(self) -> str:
        """Return the text of the tokens that are not in `text` yet, decoded after earlier tokens,
        which decoders need for spaces and bytes."""
        return self._decoded(len(self._ids))[len(self._decoded(self._read)) :]

    def _take_garbage(self) -> None:
        """Add bytes that form no character to the text, except last bytes that may still become
        one; otherwise they would be decoded again with every token. Adds nothing if that would cut
        a character."""
        end = len(self._ids) - INCOMPLETE
        before, done, whole = (self._decoded(place) for place in (self._read, end, len(self._ids)))
        if len(done) > len(before) and whole.startswith(done):
            self._append(done[len(before) :])
            self._first, self._read = self._read, end

    def _decoded(self, end: int) -> str:
        return self._codec.decode(self._ids[self._first : end], skip_special_tokens=self._skip_special)

    def _append(self, new: str) -> None:
        may_end, before = self._count > self._min_tokens, len(self.text)
        self.text += new
        found = [
            Ending(match.start, match.end, scan.pattern.text)
            for scan in self._scans
            if (match := scan.feed(new, may_end=may_end)) is not None
        ]
        if not may_end:
            self._free = len(self.text)
            return
        found += self._words(before)
        if found:
            ending = min(found, key=lambda each: (each.start, -each.end))
            self.text = self.text[: ending.end if self._include_stop else ending.start]
            self.stopped_by = ending.cause

    def _words(self, before: int) -> Iterator[Ending]:
        """Yield the first occurrence of each stop string in the text.

        The first `before` characters were already searched.
        """
        first = max(before - max(map(len, self._stop), default=0), 0)
        for word in self._stop:
            place = self.text.find(word, max(first, self._free - len(word) + 1))
            if place >= 0:
                yield Ending(place, place + len(word), word)

    def _held_back(self) -> int:
        """Return the number of last characters that may be the beginning of a stop string or of a
        pattern's match."""
        if self.stopped_by is not None:
            return 0
        begun = max((_begun(self.text, word) for word in self._stop), default=0)
        return max(begun, *(scan.held_back for scan in self._scans)) if self._scans else begun

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(end, self._shown)
        return self.text[start : self._shown]


def _begun(text: str, word: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `word`; 0 if there
    is none."""
    place = text.find(word[0], max(len(text) - len(word) + 1, 0))
    while place >= 0 and not word.startswith(text[place:]):
        place = text.find(word[0], place + 1)
    return len(text) - place if place >= 0 else 0
