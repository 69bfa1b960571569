"""`STEPS`, the `KindSteps` of standalone drafts: any model with the target's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglcore.runtime.speculative.chain_drafts import StandaloneDrafter
from sglcore.runtime.speculative.draft_steps import DrafterParts, DraftSizes, KindSteps, StepShape
from sglcore.runtime.speculative.drafter import Drafter
from sglcore.runtime.speculative.tree_drafts import StandaloneTreeDrafter

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel


def shape(sizes: DraftSizes, model: LoadedModel) -> StepShape:
    """Implements `KindSteps.shape`: rows per request are 1 and one more, the new root, than those
    of a verification (`sizes.widths`; in a step of a tree its `steps`), and with a tree its beams
    (`width`)."""
    own = (each + 1 for each in sizes.widths)
    if sizes.tree is not None:
        own = (sizes.tree.width, sizes.tree.steps + 1)
    return StepShape(tuple(sorted({1, *own})))


def make(parts: DrafterParts) -> Drafter:
    """Implements `KindSteps.make`: a drafter of trees if `parts.tree` is set, else of chains."""
    if parts.tree is not None:
        return StandaloneTreeDrafter(parts.runner, parts.tokens).shaped(parts.tree)
    return StandaloneDrafter(parts.runner, parts.tokens)


def more_rows(drafts: int) -> int:
    """Implements `KindSteps.more_rows`: 1, the new root."""
    return 1


STEPS = KindSteps(make, shape, more_rows)
