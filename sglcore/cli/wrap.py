"""Streamed text on a terminal, with line breaks between words."""

from __future__ import annotations

import os
import shutil
import sys


class Writer:
    """Prints text on standard output at once, without buffering.

    On a terminal with cursor control, a word that reaches the right edge is erased and printed
    again on the next line. Elsewhere the text is printed unchanged.
    """

    def __init__(self) -> None:
        self._is_wrapped = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        """Print text at once, broken between words on a terminal; no newline is added at its
        end."""
        width = shutil.get_terminal_size().columns
        sys.stdout.write(wrapped(self, text, width) if self._is_wrapped else text)
        sys.stdout.flush()

    def take(self, char: str, width: int) -> str:
        """Return what to print for the next character on a terminal of `width` columns: the
        character itself or, if its word would pass the right edge, control codes that move the word
        to the next line. Updates the cursor's column."""
        from rich.cells import cell_len

        cells = cell_len(char)
        if char.isspace():
            self._column = 0 if char == "\n" else self._column + cells
            self._word = ""
            return char
        taken = cell_len(self._word)
        is_over = self._column + cells > width
        if is_over and 0 < taken < self._column:
            self._column = taken + cells
            self._word += char
            return f"\x1b[{taken}D\x1b[K\n{self._word}"
        self._column = cells if is_over else self._column + cells
        self._word = "" if cells > 1 else self._word + char
        return char


def wrapped(writer: Writer, text: str, width: int) -> str:
    """Return what to print for text on a terminal of `width` columns, with the control codes of
    `Writer.take`; updates the column of `writer`.

    At the right edge the cursor stays on the last character. Erasing a word therefore also erases
    the space before it, which is not visible there.
    """
    return "".join(writer.take(char, width) for char in text)
