"""`STEPS`, the `KindSteps` of frozen MTP: a draft model that reads the target's KV slots and writes
none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglcore.runtime.speculative.draft_steps import DrafterParts, DraftSizes, KindSteps, StepShape, rewritten
from sglcore.runtime.speculative.drafter import Drafter
from sglcore.runtime.speculative.frozen_drafts import FrozenDrafter
from sglcore.runtime.speculative.tree_drafts import FrozenTreeDrafter

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel


def shape(sizes: DraftSizes, model: LoadedModel) -> StepShape:
    """Implements `KindSteps.shape`: one row per request, or a tree's beams; never a prefill."""
    widths = (1,) if sizes.tree is None else (1, sizes.tree.width)
    return StepShape(widths, model.feature_size, takes_prompts=False)


def make(parts: DrafterParts) -> Drafter:
    """Implements `KindSteps.make`: a drafter of trees if `parts.tree` is set, else of chains."""
    if parts.tree is not None:
        return FrozenTreeDrafter(parts.runner, parts.tree, parts.model.feature_size)
    return FrozenDrafter(parts.runner, parts.tokens, parts.model.feature_size)


STEPS = KindSteps(make, shape, rewritten, writes_cells=False)
