"""Checks of finished answers against the parts of their JSON schema that are not enforced, in a
separate process, because a client's regular expression may take forever.

The checks use jsonschema, an optional extra, which is loaded in that process only.
"""

from __future__ import annotations

from importlib.util import find_spec

import msgspec

from sglcore.engine.structured_output.killable_checks import CheckLimits, ConfinedChecks

MODULE = "sglcore.engine.structured_output.answer_check_process"
LIBRARY = "jsonschema"
REMEDY = "pip install 'sglcore[schema-checks]'"
LIMITS = CheckLimits(seconds=1.0, memory=256 << 20, young_seconds=0.25, slow=4, most_waiting=64)
"""The default limits of a check. An ordinary check takes a few milliseconds; the answer waits for
it."""


class Question(msgspec.Struct, frozen=True):
    """The input of one check by `AnswerChecks`: the text of a finished answer, its whole JSON
    schema as text, and the names of the schema's parts to check it against."""

    schema: str
    """The whole schema as JSON text, as the client sent it."""
    left_out: tuple[str, ...]
    """Names of the schema's parts that were not enforced."""
    text: str
    """The text of the answer."""
    begin: str = ""
    """The text before each value of the schema; empty: the whole text is one value."""


class AnswerChecks(ConfinedChecks):
    """The checks of answers: `submit` takes a Question, and its Verdict arrives by the callback
    `told`. `said` of a Verdict has the names in `left_out` that the answer violates; empty means
    none only if `error`, `ended` and `busy` are not set."""

    def __init__(self, limits: CheckLimits = LIMITS) -> None:
        self.limits = limits
        super().__init__(MODULE, "answers", lambda: limits)

    @property
    def has_library(self) -> bool:
        """Whether jsonschema is installed; without it, no question can be checked."""
        return find_spec(LIBRARY) is not None
