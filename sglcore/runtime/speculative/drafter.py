"""The contract between a drafter and the worker that verifies its draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.step.batch_field import Axis

NONE = -1
"""No draft token here or after it."""

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
    """The output of a target forward over T tokens, from which the drafter continues. The worker
    makes it.

    R requests sampled in this step.
    """

    batch: ForwardBatch
    """Batch of the forward: a prefill, or a decode with `width` rows per request."""
    width: int
    """Rows per request; 1 in a prefill."""
    ids: Tensor
    """int32[T]: the token after each of the batch's tokens: the next prompt token, or the token
    that the target drew."""
    features: Tensor | None
    """[T, F]: the target's features for the drafter. None: it reads none."""
    select: Tensor
    """int[R]: index in `ids` of each request's new root: the token just sampled, which has no KV
    slot of the target yet.
    """
    slots: Tensor
    """int32[R]: request slots."""
    lengths: Tensor
    """int32[R]: number of valid KV slots of each request."""
    limits: Tensor
    """int32[R]: KV slots in the pages of each request. Tokens at or past it go to slot 0."""
    most_lens: NDArray
    """int32[R] on the host: upper bounds of `lengths`, exact if steps do not overlap."""
    host_limits: NDArray
    """int32[R]: `limits` on the host."""
    draw: DrawDraft
    """Draws draft tokens as the requests' own sampling would."""
    wanted: int
    """Number of draft tokens to propose per request."""
    history: Tensor | None = None
    """int32[slots + 1, context + 1]: tokens 0..lengths of each request slot. None: the drafter does
    not read it."""
    is_chain: bool = False
    """Draft a chain, not a tree."""
    rank: RankDrafts | None = None
    """Ranks the candidates of a draw, for trees. None: the shard has no rows in this step."""
    begins: Tensor | None = None
    """int32[B], in a prefill: 1 if a request enters its slot with these tokens, 0 if it continues
    earlier ones. None: the batch is a decode."""
    goes_on: bool = False
    """Some of the prompts continue earlier chunks."""

    def sources(self, axis: Axis) -> Tensor:
        """Return int[R]: the entry of each sampled request in the batch's fields of `axis`, that of
        its last row where it has several. See `Sources` in draft_batches.py.
        """
        if axis is Axis.TOKENS or self.batch.extend_seq_lens is None:
            return self.select
        return (self.batch.req_pool_indices == self.slots[:, None]).int().argmax(1)


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
        """Take in the target's outputs and return draft tokens after each root (a request's last
        sampled token).

        int32[R, rows.wanted], NONE where there is nothing to propose. Does not wait. With a plan of
        several data-parallel shards (`rows.batch.step_plan`), run the forwards of the plan even
        without rows: other shards wait for them.
        """
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...
