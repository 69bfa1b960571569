"""Text that arrives in pieces, for a parser that is written as if all text were there.

A parser is a generator over a Scanner, started with `yield from`. A step that needs more text
yields; it continues after more text was pushed or the text has ended. Its results depend only on
the characters, never on where the text was split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from sglcore.serving.chat.parsers.delta import Delta, Kind
from sglcore.serving.chat.parsers.json_text import JsonText

T = TypeVar("T")
Scan = Generator[None, None, T]
"""A step of a parser: a generator that yields while it waits for text, and returns a T."""


class Malformed(Exception):
    """The text does not have the form that a parser expects, so it is content; `Scanner.attempt`
    catches this."""


class Scanner:
    """The text of one answer that has not been read yet, and the deltas that were made from the
    text read so far. Methods that return a Scan are generators, run with `yield from`: they yield
    while they need more text, and go on after `push` or `end`. "Read" means that the position moves
    on."""

    def __init__(self, new_id: Callable[[], str], controls: Iterable[str] = ()) -> None:
        """`new_id` makes the id of a call that has none in its text; `controls`: special tokens in
        the text that `pass_until` removes, because clients must not see them."""
        self._text = ""
        self._at = 0
        self._ended = False
        self._pins = 0
        self._new_id = new_id
        self._controls = tuple(controls)
        self._out: list[Delta] = []
        self._calls = 0
        self._spaces = ""
        """White space that belongs to the content only if more content follows."""
        self._after_block = False
        self._joint = ""

    def push(self, text: str) -> None:
        """Append more text of the answer. It is parsed when the parser's generator is run on, not
        here."""
        self._text += text

    def end(self) -> None:
        """Note that no more text follows; the parser's generator then runs to its end."""
        self._ended = True

    def taken(self) -> list[Delta]:
        """Return the deltas since the last call, and forget the text that has been read, unless
        `attempt` may go back to it."""
        if not self._pins:
            self._text, self._at = self._text[self._at :], 0
        out, self._out = self._out, []
        return out

    def attempt(self, step: Scan[T]) -> Scan[T | None]:
        """Run a step and return its result. If the step raises Malformed, go back to the position
        where it began and return None; deltas that the step has added stay."""
        start = self._at
        self._pins += 1
        try:
            return (yield from step)
        except Malformed:
            self._at = start
            return None
        finally:
            self._pins -= 1

    def more(self) -> Scan[bool]:
        """Wait until there is unread text; returns False at the end of the text, else True."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Scan[str]:
        """Read over white space, and return the next character without reading it; "" at the end of
        the text."""
        while (yield from self.more()):
            self._at = _SPACES.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
        return ""

    def literal(self, word: str) -> Scan[None]:
        """Read over white space, and read `word`. Raises Malformed if another text comes next; the
        white space stays read."""
        if not (yield from self.starts(word)):
            raise Malformed
        self._at += len(word)

    def take(self, word: str) -> Scan[bool]:
        """Read over white space, read `word` and return True; returns False and reads nothing, not
        even white space, if another text comes next."""
        return (yield from self.attempt(self._literal_true(word))) is True

    def skip(self, mark: str) -> Scan[None]:
        """Read the character `mark` if it comes next, without white space before it; else read
        nothing."""
        if (yield from self.more()) and self._text[self._at] == mark:
            self._at += 1

    def character(self) -> str:
        """Read and return the next character. Call it after `more` has returned True."""
        self._at += 1
        return self._text[self._at - 1]

    def unread(self, size: int) -> None:
        """Go back over the last `size` characters that were read."""
        self._at -= size

    def starts(self, word: str) -> Scan[bool]:
        """Read over white space, and return whether `word` comes next, without reading it. Waits
        for more text only while `word` may still come."""
        yield from self.peek()
        while len(self._text) - self._at < len(word):
            if self._ended or not word.startswith(self._text[self._at :]):
                return False
            yield
        return self._text.startswith(word, self._at)

    def upto(self, marks: tuple[str, ...], limit: int | None = None) -> Scan[tuple[str, str]]:
        """Read up to and including the first of the marks; returns the text before it, and the
        mark. Raises Malformed at the end of the text, or if the text before it has more than
        `limit` characters (None: no limit)."""
        read: list[str] = []
        while True:
            text, mark = self._run(marks)
            read.append(text)
            if limit is not None and sum(map(len, read)) > limit:
                raise Malformed
            if mark:
                return "".join(read), mark
            if self._ended:
                raise Malformed
            yield

    def hand_on(self, marks: tuple[str, ...], sink: Callable[[str], None]) -> Scan[str]:
        """Pass the text before the first of the marks to `sink` as it arrives, in parts that may be
        empty; read and return the mark, "" at the end of the text."""
        while True:
            text, mark = self._run(marks)
            sink(text)
            if mark or self._ended:
                return mark
            yield

    def pass_until(self, marks: tuple[str, ...], kind: Kind) -> Scan[str]:
        """Add the text before the first of the marks to the deltas, as text of `kind`, without
        control tokens; read and return the mark, "" at the end of the text. No marks: all text."""
        while True:
            mark = yield from self.hand_on(marks + self._controls, lambda text: self.say(kind, text))
            if mark in marks:
                return mark
            if not mark:
                self.say_raw(kind, self._spaces)
                self._spaces = ""
                return ""

    def json_object(self, sink: Callable[[str], None]) -> Scan[bool]:
        """Read a JSON object and pass its text to `sink` as it arrives; returns False if it is not
        JSON or ends early. `sink` then has had the part before. White space before the object is
        not skipped."""
        json = JsonText()
        while not json.done:
            if not (yield from self.more()):
                return False
            size = json.feed(self._text, self._at)
            if size:
                sink(self._text[self._at : self._at + size])
            self._at += size
            if json.bad:
                return False
        return True

    def say(self, kind: Kind, text: str) -> None:
        """Add text of the kind reasoning or content to the deltas.

        White space next to a call or a block of reasoning is dropped; at the end of `text` it is
        held until more text follows.
        """
        held = self._spaces + text
        if self._after_block:
            held = held.lstrip()
            self._after_block = not held
            held = self._joint + held if held else ""
        body = held.rstrip()
        self._spaces = held[len(body) :]
        self.say_raw(kind, body)

    def say_raw(self, kind: Kind, text: str) -> None:
        """Add text of the kind reasoning or content to the deltas, with all its white space; empty
        text adds none."""
        if text:
            self._out.append(Delta(kind, text))

    def border(self, joint: str = "") -> None:
        """Note that a call or a block of reasoning begins or ends here: white space on both sides
        is dropped.

        `joint` is put before the next text, if more follows.
        """
        self._spaces, self._after_block, self._joint = "", True, joint

    def start_call(self, name: str, call_id: str = "") -> int:
        """Add the start of a call to the deltas; returns the call's index, from 0, for `arguments`.
        Without a `call_id`, the call gets a new one. White space around the call is dropped."""
        self.border()
        self._out.append(Delta("tool_start", "", self._calls, name, call_id or self._new_id()))
        self._calls += 1
        return self._calls - 1

    def arguments(self, index: int) -> Callable[[str], None]:
        """Return the function that adds parts of the arguments' JSON text to call number `index`,
        as deltas; it ignores empty parts."""
        return lambda text: self._out.append(Delta("tool_arguments", text, index)) if text else None

    def _literal_true(self, word: str) -> Scan[bool]:
        yield from self.literal(word)
        return True

    def _run(self, marks: tuple[str, ...]) -> tuple[str, str]:
        """Read the available text up to and including the first mark, or all text that cannot be
        the beginning of one; returns the text before the mark, and the mark ("": none yet). Does
        not wait."""
        start = self._at
        found = _pattern(marks).search(self._text, start) if marks else None
        if found:
            self._at = found.end()
            return self._text[start : found.start()], found.group()
        self._at = len(self._text) - (0 if self._ended else self._partial(marks, start))
        return self._text[start : self._at], ""

    def _partial(self, marks: tuple[str, ...], start: int) -> int:
        prefixes, longest = _prefixes(marks)
        for size in range(min(longest, len(self._text) - start), 0, -1):
            if self._text[-size:] in prefixes:
                return size
        return 0


_SPACES = re.compile(r"\s*")


@lru_cache(maxsize=256)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


@lru_cache(maxsize=256)
def _prefixes(marks: tuple[str, ...]) -> tuple[frozenset[str], int]:
    found = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
    return found, max(map(len, found), default=0)
