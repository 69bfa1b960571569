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
    """What a forward of the target computed, T tokens, for the drafter to go on from.

    `batch` is the forward's, an EXTEND of prompts or a decode whose rows are `width` tokens of each request (1 for prompts). `ids`
    int32[T] is the token after each of its tokens: the prompt's next one, or what the target drew. `features` [T, F] is what the
    drafter asked for. R requests emitted: `select` int[R] is the token whose `ids` is the request's new root, of which the
    target has no cell yet; `slots` and `lengths` int32[R], its slot and its cells; `limits` int32[R], cells that are in its
    pages: what lies at or past it goes to slot 0. `most_lens` int32[R] is as much of `lengths` as the host knows: the most
    they can be, exact where steps do not overlap. `host_limits` int32[R]: `limits` on the host. `wanted`: how many proposals to make of each; `is_chain`: each must follow the one before. `history` int32[slots + 1, context + 1] has the tokens 0..lengths of each slot, if the
    drafter reads it. Of prompts, `begins` int32[B] is 1 where a request enters its slot with these tokens, 0 where it goes on from
    earlier ones; `goes_on`: some do.
    """

    batch: ForwardBatch
    width: int
    ids: Tensor
    features: Tensor | None
    select: Tensor
    slots: Tensor
    lengths: Tensor
    limits: Tensor
    most_lens: NDArray
    host_limits: NDArray
    draw: DrawDraft
    wanted: int
    history: Tensor | None = None
    is_chain: bool = False
    rank: RankDrafts | None = None
    begins: Tensor | None = None
    goes_on: bool = False


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
