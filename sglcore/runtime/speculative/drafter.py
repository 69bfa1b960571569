"""What proposes tokens: the contract between a drafter and the worker that verifies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch

NONE = -1
"""In place of a proposal: there is none here, nor after it."""

DrawDraft = Callable[[Tensor, int], Tensor]
"""`draw(logits float[R, V], depth) -> int32[R]`: what the requests' own sampling would draw from these logits, with the
same noise, as the token `depth` >= 1 places after the root."""

RankDrafts = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""`rank(logits float[R * b, V], depth, count) -> (int32[R * b, count], float32[R * b, count])`: the first `count` of what such a
draw races for each of a request's b rows, and how likely each is to be right, as logarithms."""


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
    """Those of a shard of requests that has nothing to run in a step, of which every other makes `wanted` proposals: from its `batch` of
    no tokens, and features [0, F]."""
    none, host = batch.input_ids, np.zeros(0, np.int32)

    def draw(logits: Tensor, depth: int) -> Tensor:
        raise RuntimeError("a shard without requests draws nothing")

    return DraftRows(batch, 1, none, features, none, none, none, none, host, host, draw, wanted, history)


class Drafter(Protocol):
    """Proposes tokens, and keeps what it needs of every slot by itself.

    `tokens`: how many it proposes at most. `lookahead`: how many following tokens what it keeps of a token depends on.
    `reads_history`: it reads `DraftRows.history`.
    """

    tokens: int
    lookahead: int
    reads_history: bool

    def advance(self, rows: DraftRows) -> Tensor:
        """Take in what the target computed, and propose int32[R, rows.wanted] for the tokens after each root; NONE where there is
        nothing to propose. Waits for nothing. With a plan of several shards of requests (`rows.batch.step_plan`) the forwards are
        those of the plan, whatever the rows are: others wait for each of them."""
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...
