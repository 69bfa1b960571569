"""`STEPS`, the `KindSteps` of MTP: layers after the target's last one. One layer drafts all tokens,
or each drafts one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglcore.runtime.speculative.draft_steps import DrafterParts, DraftSizes, KindSteps, StepShape, rewritten
from sglcore.runtime.speculative.drafter import Drafter
from sglcore.runtime.speculative.kinds import eagle_steps
from sglcore.runtime.speculative.mtp_drafts import MultiHeadDrafter

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel


def shape(sizes: DraftSizes, model: LoadedModel) -> StepShape:
    """Implements `KindSteps.shape`: as for EAGLE with one layer; with one layer per token, `heads`
    - 1 rows more than the tokens to verify.
    """
    if sizes.heads == 1:
        return eagle_steps.shape(sizes, model)
    # The draft rewrites `heads` - 1 KV slots before those of the target.
    return StepShape(tuple(each + sizes.heads - 1 for each in sizes.widths), model.feature_size)


def make(parts: DrafterParts) -> Drafter:
    """Implements `KindSteps.make`: a drafter with one layer per token if `parts` has further
    layers, otherwise one as for EAGLE.
    """
    if not parts.heads:
        return eagle_steps.make(parts)
    return MultiHeadDrafter((parts.runner, *parts.heads), parts.slots, parts.model)


STEPS = KindSteps(make, shape, rewritten)
