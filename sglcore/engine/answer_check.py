"""Answers checked for what of their schema is not enforced: in a process of their own, because a
client's pattern may take for ever.

The library that checks is jsonschema, an optional extra; it is loaded in that process alone.
"""

from __future__ import annotations

from importlib.util import find_spec

import msgspec

from sglcore.engine.confined import CheckLimits, ConfinedChecks

MODULE = "sglcore.engine.answer_check_process"
LIBRARY = "jsonschema"
REMEDY = "pip install 'sglcore[schema-checks]'"
LIMITS = CheckLimits(seconds=1.0, memory=256 << 20, young_seconds=0.25, slow=4, most_waiting=64)
"""An ordinary check takes a few milliseconds; the answer waits for it."""


class Question(msgspec.Struct, frozen=True):
    """An answer, and what is asked of it."""

    schema: str
    """JSON text, as the client gave it."""
    left_out: tuple[str, ...]
    """Names of its parts that are not enforced."""
    text: str
    """The answer."""
    begin: str = ""
    """The text before each value of the schema; empty: the whole text is one value."""


class AnswerChecks(ConfinedChecks):
    """Takes a Question; the verdict's `said` are the names of those parts that the answer does not
    keep to."""

    def __init__(self, limits: CheckLimits = LIMITS) -> None:
        self.limits = limits
        super().__init__(MODULE, "answers", lambda: limits)

    @property
    def has_library(self) -> bool:
        """Whether it is installed; without it nothing can be asked."""
        return find_spec(LIBRARY) is not None
