"""`STEPS`, the `KindSteps` of EAGLE and EAGLE-3: a layer or a small model that reads the target's
features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglcore.runtime.speculative.chain_drafts import FeatureDrafter
from sglcore.runtime.speculative.draft_steps import DrafterParts, DraftSizes, KindSteps, StepShape, none_more
from sglcore.runtime.speculative.drafter import Drafter
from sglcore.runtime.speculative.tree_drafts import TreeDrafter

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel


def shape(sizes: DraftSizes, model: LoadedModel) -> StepShape:
    """Implements `KindSteps.shape`: rows per request are 1 and those of a verification
    (`sizes.widths`; in a step of a tree its `steps`), and with a tree its beams (`width`).
    """
    own = sizes.widths if sizes.tree is None else (sizes.tree.width, sizes.tree.steps)
    return StepShape(tuple(sorted({1, *own})), model.feature_size)


def make(parts: DrafterParts) -> Drafter:
    """Implements `KindSteps.make`: a drafter of trees if `parts.tree` is set, else of chains."""
    if parts.tree is not None:
        return TreeDrafter(parts.runner, parts.tokens, parts.model.project).shaped(parts.tree)
    return FeatureDrafter(parts.runner, parts.tokens, parts.model.project)


STEPS = KindSteps(make, shape, none_more)
