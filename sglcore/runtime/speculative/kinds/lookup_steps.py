"""`NGRAM` and `SUFFIX`, the `LookupSteps` of two kinds of drafts: `ngram` looks up the request's
own text, `suffix` first the texts of other requests.
"""

from __future__ import annotations

from sglcore.runtime.speculative.draft_steps import LookupSteps
from sglcore.runtime.speculative.drafter import Drafter
from sglcore.runtime.speculative.ngram_drafts import NgramDrafter


def make(tokens: int) -> Drafter:
    """Implements `LookupSteps.make`: the drafter that looks up the request's own text."""
    return NgramDrafter(tokens)


NGRAM = LookupSteps(make)
SUFFIX = LookupSteps(make, from_host=True)
