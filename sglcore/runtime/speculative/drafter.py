"""The contract between a drafter and the worker that verifies its draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch

NONE = -1
"""Marks that there is no draft token here, nor after it."""

DrawDraft = Callable[[Tensor, int], Tensor]
"""`draw(logits float[R, V], depth) -> int32[R]`: draw a draft token with the requests' own
sampling.

Uses the same noise as the target's draw of the token `depth` >= 1 places after the root.
"""

RankDrafts = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""`rank(logits float[R * b, V], depth, count) -> (int32[R * b, count], float32[R * b, count])`.

Returns the `count` leading candidates of such a draw for each of a request's b rows, and the
logarithms of their estimated acceptance probabilities.
"""


@dataclass(slots=True)
class DraftRows:
    """What a forward of the target computed, T tokens, from which the drafter continues. The worker
    makes it.

    R requests sampled in this step.
    """

    batch: ForwardBatch
    """The batch of the forward: an EXTEND of prompts, or a decode of `width` rows of each
    request."""
    width: int
    """Rows of each request; 1 for prompts."""
    ids: Tensor
    """int32[T]: the token after each of the batch's tokens: the prompt's next one, or the one that
    the target drew."""
    features: Tensor | None
    """[T, F]: what the drafter reads of the target. None: it reads nothing."""
    select: Tensor
    """int[R]: the token whose `ids` is the request's new root. The target has no KV slot of the
    root yet."""
    slots: Tensor
    """int32[R]: the request's slot."""
    lengths: Tensor
    """int32[R]: the request's KV slots."""
    limits: Tensor
    """int32[R]: KV slots that are in its pages. What lies at or past that goes to slot 0."""
    most_lens: NDArray
    """int32[R] on the host: upper bounds of `lengths`, exact where steps do not overlap."""
    host_limits: NDArray
    """int32[R]: `limits` on the host."""
    draw: DrawDraft
    """Draws draft tokens as the requests' own sampling would."""
    wanted: int
    """How many draft tokens to make of each request."""
    history: Tensor | None = None
    """int32[slots + 1, context + 1]: tokens 0..lengths of each slot. None: the drafter does not
    read it."""
    is_chain: bool = False
    """Each draft token must follow the one before; no tree."""
    rank: RankDrafts | None = None
    """Ranks the candidates of a draw, for trees. None: the shard has no rows in this step."""
    begins: Tensor | None = None
    """int32[B], of prompts: 1 where a request enters its slot with these tokens, 0 where it
    continues earlier ones. None: the batch is a decode."""
    goes_on: bool = False
    """Some of these prompts continue earlier chunks."""


def no_rows(batch: ForwardBatch, features: Tensor, wanted: int, history: Tensor | None = None) -> DraftRows:
    """Return the draft rows of a data-parallel shard without requests.

    Other shards make `wanted` draft tokens in this step. `batch` has no tokens; features are [0,
    F].
    """
    none, host = batch.input_ids, np.zeros(0, np.int32)

    def draw(logits: Tensor, depth: int) -> Tensor:
        raise RuntimeError("a shard without requests draws nothing")

    return DraftRows(batch, 1, none, features, none, none, none, none, host, host, draw, wanted, history)


class Drafter(Protocol):
    """Proposes draft tokens and keeps its own state for every slot.

    `tokens`: maximum number of draft tokens. `lookahead`: number of following tokens that the state
    of a token depends on. `reads_history`: it reads `DraftRows.history`.
    """

    tokens: int
    lookahead: int
    reads_history: bool

    def advance(self, rows: DraftRows) -> Tensor:
        """Take in the target's outputs and return draft tokens after each root.

        int32[R, rows.wanted], NONE where there is nothing to propose. Does not wait. With a plan of
        several data-parallel shards (`rows.batch.step_plan`), run the forwards of the plan even
        without rows: other shards wait for them.
        """
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...
