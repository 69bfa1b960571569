"""The worker contract: what a device gives the scheduler. Host data crosses this seam, tensors never do.

A worker may be one process with torch, a lazy array library, or a group of ranks; the scheduler cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglcore.device.batch import ScheduleBatch
from sglcore.device.swap_counts import SwapCounts


def most_window_pages(window: int, max_batch_tokens: int, page_size: int, lookahead: int = 0) -> int:
    """Window pages that one request's list may have, with a chunk of a step's tokens, wherever in a page both begin and end."""
    # The first two tokens of lookahead are in what the pages at both ends are rounded up by.
    return -(-(window + max_batch_tokens + max(0, lookahead - 2)) // page_size) + 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker can hold and do, fixed when it is built.

    `num_pages` counts the usable pages 1..num_pages (page 0 swallows the writes of padding rows); `max_requests` counts the
    usable slots 1..max_requests (slot 0 belongs to padding rows). One request of `max_model_len` tokens always fits. `lookahead`
    is how many following tokens a page's contents depend on. `runs_ahead`: submit returns before the step has run, so planning
    the next one meanwhile saves time. `can_overlap`: submit may be called before the previous ticket was collected, and slices of
    a prompt that bring nothing are in flight beside. `takes_masks`: sampling keeps to the batch's `masks`, so requests may have a
    grammar; `takes_changes`: and adds what the batch says to single logits of such rows, so they may ask for DRY. `keeps_state`:
    beside its cells a request has a state in its slot, which belongs to all of its tokens so far and to no shorter prefix;
    1..num_snapshots are the places in which the worker can keep copies of such states. `window`: the longest window of layers
    that have one: a query sees itself and the `window` - 1 tokens before it. 1..num_window_pages are the pages, of `page_size`
    tokens too, in which such layers keep what is seen (0: all, in the pages of the other layers; window page 0 belongs to padding
    rows). Bytes, on each device: `kv_bytes` of the pages, `window_bytes` of the window pages, `state_bytes` of the slots' states,
    and `snapshot_bytes`; `host_bytes` of the pages in host memory. `num_labels`: what is answered to a prompt to embed are so
    many scores (0: a vector). `embed_size`: prompts may be embeddings of so many numbers a token (0: not); `takes_mrope`: with
    positions by three axes. `reads_history`: the worker remembers all tokens of a request, for embeddings of several at once;
    `keeps_history`: for proposals. A decode row brings up to `draft_tokens`, trees by `draft_cells` cells; `takes_proposals`: the batch's.
    `sliced_layers`: a prompt may come by slices of so many layers (0: whole); `slice_budget`: each of so many token·layers (0: few).
    """

    max_model_len: int
    max_requests: int
    page_size: int
    num_pages: int
    max_batch_tokens: int
    vocab_size: int
    allows_mixed_batches: bool = True
    can_overlap: bool = True
    runs_ahead: bool = False
    lookahead: int = 0
    generates: bool = True
    takes_masks: bool = False
    takes_changes: bool = False
    keeps_state: bool = False
    num_snapshots: int = 0
    window: int = 0
    num_window_pages: int = 0
    kv_bytes: int = 0
    window_bytes: int = 0
    state_bytes: int = 0
    snapshot_bytes: int = 0
    host_bytes: int = 0
    num_labels: int = 0
    embed_size: int = 0
    takes_mrope: bool = False
    reads_history: bool = False
    keeps_history: bool = False
    draft_tokens: int = 0
    draft_cells: int = 0
    takes_proposals: bool = False
    sliced_layers: int = 0
    slice_budget: int = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit in the KV pool."""
        return self.num_pages * self.page_size


@dataclass(slots=True, weakref_slot=True, eq=False)
class Ticket:
    """A submitted step. `payload` belongs to the worker: results to come and all that the device still reads."""

    step: int
    payload: object = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm, of the model's raw logits) of N tokens.

    `chosen` float32[N]; `ranks` int32[N], 1 for the most likely; `top_ids` int32[N, K] and `top_logprobs` float32[N, K],
    most likely first, where K is the largest number asked for in the batch.
    """

    chosen: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one step produced, row for row of its batch.

    Row i emitted `token_ids[token_offsets[i]:token_offsets[i + 1]]` (none for a chunk that was not the last; several where
    proposals were right). `proposed` int32[B]: how many proposals the step verified of each row (None: of none). `drafts`
    int32[B, k]: what is proposed to follow, -1 from where nothing is, if the batch had masks. `bad_rows`
    bool[B] marks rows whose logits were not finite. `logprobs` runs along `token_ids`. `prompt_logprobs` maps a row to
    one entry per token of this chunk (its token at chunk index j predicts the token after it). `embeddings` is
    float32[B, hidden]. `path` says what ran ("eager", or the graph's kind and bucket). `swaps`: of rows in host memory.
    """

    step: int
    token_offsets: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    bad_rows: NDArray[np.bool_]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    embeddings: NDArray[np.float32] | None = None
    path: str = "eager"
    proposed: NDArray[np.int32] | None = None
    drafts: NDArray[np.int32] | None = None
    swaps: SwapCounts | None = None


class ModelWorker(Protocol):
    """A model on a device."""

    @property
    def limits(self) -> Limits:
        """What this worker can hold; constant."""
        ...

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Start a step and return without waiting for the device. The worker may keep and change `batch`."""
        ...

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step, release all that it retained, and return its results. Once per ticket, in order."""
        ...

    def close(self) -> None:
        """Wait for the device and free everything. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Trial:
    """Two workers over the same weights, tables and pages, of which a start keeps the faster one: `bold`, described by `summary`, and
    `plain`. They take turns; each may be dropped while the other goes on. `prompt` int32[N] begins a text. `leave` frees what is
    there for the bold one alone."""

    summary: str
    bold: ModelWorker
    plain: ModelWorker
    prompt: NDArray[np.int32]
    leave: Callable[[], None]
