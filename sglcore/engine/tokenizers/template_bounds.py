"""Limits of the rendering of a chat template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one rendering: its steps, the characters of all intermediate results, and those of
    the text. Some published templates need 500 steps for each message of a long conversation."""

    steps: int = 1_000_000
    """Maximum number of loop iterations, calls and filters."""
    made: int = 64_000_000
    """Maximum number of characters and list items in all intermediate results."""
    output: int = 16_000_000
    """Maximum number of characters of the rendered text."""
