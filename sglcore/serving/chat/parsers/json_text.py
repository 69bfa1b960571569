"""Finds the end of a JSON object while its text arrives: strict JSON (RFC 8259), without building
values."""

from __future__ import annotations

import re

MAX_DEPTH = 512

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LETTERS = frozenset("0123456789+-.eEabcdfghijklmnopqrstuvwxyz")
_WORDS = frozenset({"true", "false", "null"})
_OPEN = "{["
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonText:
    """The state of one JSON object (not a list or another value) with text that arrives in parts.
    `done`: the object has ended; `bad`: the text is not JSON, or is nested deeper than
    MAX_DEPTH."""

    def __init__(self) -> None:
        self.done = False
        self.bad = False
        self._stack: list[str] = []
        self._wants = "object"
        self._escape = ""
        self._word = ""

    def feed(self, text: str, at: int = 0) -> int:
        """Read `text` from index `at` on, and return how many of these characters belong to the
        object: fewer than all only if it is done or bad then. Call it with the next part of the
        text, not with all of it; 0 once it is done or bad."""
        start = at
        while at < len(text) and not (self.done or self.bad):
            at = self._take(text, at)
        return at - start

    def _take(self, text: str, at: int) -> int:
        """Read one item of `text` at index `at`, such as a mark or a part of a string, with white
        space before it; returns the index after it. Sets `bad` at a character that JSON does not
        allow there."""
        if self._wants in ("string", "key string"):
            return self._in_string(text, at)
        if self._word:
            return self._in_word(text, at)
        if self._wants != "object":
            space = _SPACE.match(text, at)
            at = space.end() if space else at
            if at == len(text):
                return at
        return at + 1 if self._accepts(text[at]) else at

    def _accepts(self, mark: str) -> bool:
        """Read the character `mark`, outside of strings, numbers and words; returns whether JSON
        allows it here, else sets `bad`."""
        wants = self._wants
        if wants == "object":
            self.bad = mark != "{"
            return not self.bad and self._opened(mark)
        if mark == '"' and wants in ("value", "value or end", "key", "key or end"):
            self._wants = "string" if wants.startswith("value") else "key string"
        elif wants.startswith("value") and mark in _OPEN:
            return self._opened(mark)
        elif wants.startswith("value") and (mark == "-" or (mark.isascii() and mark.isalnum())):
            self._word = mark
        elif mark == ":" and wants == "colon":
            self._wants = "value"
        elif mark == "," and wants == "comma or end":
            self._wants = "key" if self._stack[-1] == "{" else "value"
        elif mark in "}]" and wants in ("comma or end", "value or end", "key or end"):
            return self._closed(mark)
        else:
            self.bad = True
        return not self.bad

    def _opened(self, mark: str) -> bool:
        self._stack.append(mark)
        self._wants = "key or end" if mark == "{" else "value or end"
        self.bad = len(self._stack) > MAX_DEPTH
        return not self.bad

    def _closed(self, mark: str) -> bool:
        self.bad = self._stack[-1] + mark not in ("{}", "[]")
        if not self.bad:
            self._stack.pop()
            self._wants = "comma or end"
            self.done = not self._stack
        return not self.bad

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            return self._in_escape(text, at)
        plain = _PLAIN.match(text, at)
        at = plain.end() if plain else at
        if at == len(text):
            return at
        if text[at] == '"':
            self._wants = "colon" if self._wants == "key string" else "comma or end"
        elif text[at] == "\\":
            self._escape = "\\"
        else:
            self.bad = True
            return at
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        mark = text[at]
        if self._escape == "\\" and mark in _ESCAPES:
            self._escape = ""
        elif (self._escape == "\\" and mark == "u") or (len(self._escape) > 1 and mark in _HEX):
            self._escape = "" if len(self._escape) == 5 else self._escape + mark
        else:
            self.bad = True
            return at
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        """Read a part of a number or a word, which ends at the first character that neither can
        contain; returns the index after the part. At its end the whole is checked, and `bad` set if
        it is neither."""
        start = at
        while at < len(text) and text[at] in _LETTERS:
            at += 1
        self._word += text[start:at]
        if at < len(text):
            self.bad = self._word not in _WORDS and not _NUMBER.fullmatch(self._word)
            self._word, self._wants = "", "comma or end"
        return at
