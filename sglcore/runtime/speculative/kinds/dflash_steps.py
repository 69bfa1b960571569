"""`STEPS`, the `KindSteps` of DFlash: a draft model that fills in a block of mask tokens in one
forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.runtime.speculative.block_drafts import BlockDrafter
from sglcore.runtime.speculative.draft_steps import DrafterParts, DraftSizes, KindSteps, StepShape, rewritten
from sglcore.runtime.speculative.drafter import Drafter

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel

BLOCK_SIZE = "block_size"
"""Key in `words`: tokens of a block, its root included."""


def shape(sizes: DraftSizes, model: LoadedModel) -> StepShape:
    """Implements `KindSteps.shape`: the rows per request are a whole block."""
    return StepShape((model.config.words[BLOCK_SIZE],))


def make(parts: DrafterParts) -> Drafter:
    """Implements `KindSteps.make`: a drafter that fills in a block of masks per request."""
    return BlockDrafter(parts.runner, parts.tokens, parts.model, parts.is_exact)


def fit_lengths(config: EngineConfig, lengths: tuple[int, ...], model: LoadedModel) -> tuple[int, ...]:
    """Implements `KindSteps.fit_lengths`: the lengths, cut to what fits in a block after its root.

    Raises ConfigError if more were configured.
    """
    most = model.config.words[BLOCK_SIZE] - 1
    if config.draft_tokens is not None and lengths[-1] > most:
        found = f"draft_tokens is {lengths[-1]}, and a block of the draft has {most}"
        raise ConfigError(found, remedy=f"--draft-tokens {most}, or fewer")
    return tuple(sorted({min(each, most) for each in lengths}))


STEPS = KindSteps(make, shape, rewritten, fit_lengths)
