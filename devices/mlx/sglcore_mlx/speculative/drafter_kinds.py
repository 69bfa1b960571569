"""Which drafter runs a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglcore.models.drafts.draft_config import STANDALONE
from sglcore_mlx.speculative.choice import DFLASH
from sglcore_mlx.speculative.drafter import BlockDrafter, FeatureDrafter, ModelDrafter, StandaloneDrafter
from sglcore_mlx.speculative.drafts import Draft
from sglcore_mlx.speculative.head_drafter import HeadDrafter

_KINDS: Mapping[str, type[ModelDrafter]] = MappingProxyType({STANDALONE: StandaloneDrafter, DFLASH: BlockDrafter})


def drafter_type(draft: Draft) -> type[ModelDrafter]:
    """Return the drafter of a draft: by its kind, and by its number of layers."""
    return HeadDrafter if draft.heads > 1 else _KINDS.get(draft.kind, FeatureDrafter)


def lookahead_of(draft: Draft | None) -> int:
    """Return the `lookahead` of a draft's drafter; 0 without a draft."""
    if draft is None:
        return 0
    return draft.heads if draft.heads > 1 else drafter_type(draft).lookahead
