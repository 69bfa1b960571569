"""The limits of a chat template's work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one rendering.

    Some published templates need 500 steps for each message of a long conversation.
    """

    steps: int = 1_000_000
    """Loop iterations, calls and filters."""
    made: int = 64_000_000
    """Characters of intermediate results."""
    output: int = 16_000_000
    """Characters of the prompt."""
