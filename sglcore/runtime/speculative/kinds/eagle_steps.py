"""EAGLE and EAGLE-3: a layer or a small model that reads the target's features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglcore.runtime.speculative.chain_drafts import FeatureDrafter
from sglcore.runtime.speculative.draft_steps import DrafterParts, DraftSizes, KindSteps, StepShape, none_more
from sglcore.runtime.speculative.drafter import Drafter
from sglcore.runtime.speculative.tree_drafts import TreeDrafter

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel


def shape(sizes: DraftSizes, model: LoadedModel) -> StepShape:
    """Return the shape of the draft's steps: the target's rows, then one row or beam each."""
    own = sizes.widths if sizes.tree is None else (sizes.tree.width, sizes.tree.steps)
    return StepShape(tuple(sorted({1, *own})), model.feature_size)


def make(parts: DrafterParts) -> Drafter:
    """Return a drafter of trees if `parts` has a tree, otherwise of chains."""
    if parts.tree is not None:
        return TreeDrafter(parts.runner, parts.tokens, parts.model.project).shaped(parts.tree)
    return FeatureDrafter(parts.runner, parts.tokens, parts.model.project)


STEPS = KindSteps(make, shape, none_more)
