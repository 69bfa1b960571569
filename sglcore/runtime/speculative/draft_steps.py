"""Records that describe how a kind of drafts runs: `KindSteps` for kinds with a draft model,
`LookupSteps` for the others. The modules of `kinds/` make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglcore.config.engine_config import EngineConfig
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.drafter import Drafter
from sglcore.step.tree_shapes import TreeShape

if TYPE_CHECKING:
    from sglcore.runtime.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of one runner's decode steps, as `KindSteps.shape` returns it.

    `widths` are the possible rows per request. `feature_size` is the number of feature elements of
    each row. `aux_layers` are the layers before which a drafter reads the model (empty: the model
    runs unchanged). `takes_prompts`: it also runs prefill.
    """

    widths: tuple[int, ...] = (1,)
    feature_size: int = 0
    aux_layers: tuple[int, ...] = ()
    takes_prompts: bool = True

    @property
    def most(self) -> int:
        """Maximum rows per request."""
        return max(self.widths)


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """The decisions of a start that determine the shape of a draft's steps."""

    lengths: tuple[int, ...]
    """Possible numbers of draft tokens in a step, ascending."""
    tree: TreeShape | None
    """Shape of draft trees. None: drafts are chains."""
    heads: int
    """Layers of the draft model that propose one token each."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows per request of the steps that verify these numbers of tokens."""
        return tuple(each + 1 for each in self.lengths)


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """The argument of `KindSteps.make`: what a drafter with a draft model is made of."""

    tokens: int
    """Maximum draft tokens per step."""
    tree: TreeShape | None
    """Shape of draft trees. None: drafts are chains."""
    runner: ModelRunner
    """Runs the draft model."""
    heads: Sequence[ModelRunner]
    """Run the layers after the first, if each layer proposes one token."""
    slots: int
    """Request slots, slot 0 included."""
    is_exact: bool
    """The host must give exact lengths."""

    @property
    def model(self) -> Any:
        """The draft model; each kind knows its own attributes."""
        return self.runner.model


@dataclass(frozen=True, slots=True)
class KindSteps:
    """The functions that run one kind of drafts from a model: how its drafter is made, and what
    steps its forwards need.
    """

    make: Callable[[DrafterParts], Drafter]
    """Makes the drafter."""
    shape: Callable[[DraftSizes, LoadedModel], StepShape]
    """The shape of the draft's own decode steps, for chains or trees."""
    more_rows: Callable[[int], int]
    """`more_rows(drafts)`: rows per request that a forward of the draft has in addition to
    `drafts`, the tokens to verify, root included.
    """
    fit_lengths: Callable[[EngineConfig, tuple[int, ...], LoadedModel], tuple[int, ...]] | None = None
    """Limits the numbers of draft tokens to what the draft can make. None: any."""
    writes_cells: bool = True
    """Its draft tokens have KV slots of their own."""


@dataclass(frozen=True, slots=True)
class LookupSteps:
    """The functions that run one kind of drafts without a model."""

    make: Callable[[int], Drafter]
    """`make(tokens)` returns the drafter of at most `tokens` draft tokens per step."""
    from_host: bool = False
    """The host proposes tokens, so that each step waits for the one before."""


def none_more(drafts: int) -> int:
    """Return 0, as `KindSteps.more_rows`: the draft runs only the rows of the tokens to verify."""
    return 0


def rewritten(drafts: int) -> int:
    """Return max(drafts - 2, 1), as `KindSteps.more_rows`: for a draft that rewrites the KV slots
    of its further layers, or runs each root with a block of its own. `drafts` counts the root.
    """
    return max(drafts - 2, 1)
