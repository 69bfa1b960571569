"""The worker contract: what a device gives the scheduler. Only host data passes between them, never
tensors.

A worker may be one process with torch, a lazy array library, or a group of ranks; the scheduler
cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore.worker.swap_counts import SwapCounts


def most_window_pages(window: int, max_batch_tokens: int, page_size: int, lookahead: int = 0) -> int:
    """Return the maximum number of window pages in one request's list, for a chunk of a whole step
    and any alignment of its start and end. All sizes are in tokens; `lookahead`: how many following
    tokens the contents of a page depend on.
    """
    # The rounding of the pages at both ends already covers the first two tokens of lookahead.
    return -(-(window + max_batch_tokens + max(0, lookahead - 2)) // page_size) + 2


def reserved_windows(window_pages: int, unit: int) -> int:
    """Return how many window pages' memory is reserved where all pages share memory: those of one
    request, `window_pages`, if a window page consists of several pages (`unit`). If it is one page,
    none, because any free page can become a window page.
    """
    return window_pages if unit > 1 else 0


def least_shared_pages(pages: int, window_pages: int, unit: int) -> int:
    """Return the least `Limits.num_pages` where all pages share memory, so that one request always
    fits: `pages` pages of all tokens and `window_pages` window pages of `unit` pages each.

    The first `unit` pages belong to padding rows.
    """
    return unit * (-(-pages // unit) + window_pages + 1) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker can hold and do: numbers of requests, tokens and pages, bytes of its memory,
    and features as flags. The worker makes it when it is built, and it never changes.

    One request of `max_model_len` tokens always fits. Sizes in bytes are on each device.
    """

    max_model_len: int
    """Tokens of the longest request, prompt and output together."""
    max_requests: int
    """Request slots, numbered 1..max_requests. Slot 0 belongs to padding rows."""
    page_size: int
    """Tokens (KV slots) in a page."""
    num_pages: int
    """Usable KV pages, numbered 1..num_pages. Page 0 takes the writes of padding rows."""
    max_batch_tokens: int
    """The most tokens in a step."""
    vocab_size: int
    """Tokens in the vocabulary."""
    allows_mixed_batches: bool = True
    """One step may hold prefill chunks and decode rows."""
    can_overlap: bool = True
    """`submit` may be called before the previous ticket was collected. Slices of a prompt that
    bring no results are in flight in addition."""
    against_overlap: str = ""
    """Why `can_overlap` is False, for the ledger; empty if it is True or there is no reason but the
    kind of worker."""
    runs_ahead: bool = False
    """`submit` returns before the step has run."""
    lookahead: int = 0
    """How many following tokens the contents of a page depend on."""
    generates: bool = True
    """The worker generates text. False: it embeds or scores prompts only."""
    takes_masks: bool = False
    """Sampling applies the batch's `masks`, so requests may have a grammar."""
    takes_changes: bool = False
    """Sampling adds the batch's logit changes to rows with a mask, so such requests may use DRY."""
    keeps_state: bool = False
    """A request has a recurrent state in its slot, in addition to its KV slots. It belongs to all
    of the request's tokens so far and to no shorter prefix."""
    num_snapshots: int = 0
    """State checkpoints, numbered 1..num_snapshots, for copies of such states."""
    window: int = 0
    """The longest sliding window, in tokens: a query sees itself and the `window` - 1 tokens before
    it. 0: no layer has one."""
    num_window_pages: int = 0
    """Pages of `page_size` tokens in which sliding-window layers keep what is seen, numbered
    1..num_window_pages; page 0 belongs to padding rows. 0: they keep all tokens, in the pages of
    the other layers."""
    window_unit: int = 0
    """Pages that become one window page, where both kinds of pages share memory: a window page has
    the number of the first, a multiple of `window_unit`, and pages below `window_unit` belong to
    padding rows. `num_window_pages` is then how many fit without pages of all tokens. 0: both
    kinds have memory of their own."""
    kv_bytes: int = 0
    """Bytes of the KV pages."""
    window_bytes: int = 0
    """Bytes of the sliding-window pages."""
    state_bytes: int = 0
    """Bytes of the states in all slots."""
    snapshot_bytes: int = 0
    """Bytes of the state checkpoints."""
    host_bytes: int = 0
    """Bytes of the pages in host memory."""
    num_labels: int = 0
    """Scores in the answer to a prompt to embed. 0: the answer is a vector."""
    embed_size: int = 0
    """Elements of one token's embedding where prompts may be embeddings. 0: they may not."""
    hidden_size: int = 0
    """Elements of a hidden state, where steps return those that a batch requests. 0: they do
    not."""
    gives_norm_inputs: bool = False
    """Steps also return hidden states from before the last norm."""
    takes_mrope: bool = False
    """Prompts that are embeddings may have positions by three axes (time, height, width)."""
    reads_history: bool = False
    """The worker remembers all tokens of a request, for embeddings of several tokens at once
    (n-grams)."""
    keeps_history: bool = False
    """The worker remembers all tokens of a request, for its drafter."""
    draft_tokens: int = 0
    """The most draft tokens that a decode row brings to a step. Making them writes up to that many
    KV slots after the text. 0: no speculation."""
    draft_cells: int = 0
    """KV slots after the text that a draft tree needs, for its nodes and for making it. A row has
    them after its last possible token too. 0: drafts are chains."""
    takes_proposals: bool = False
    """The worker verifies draft tokens of the batch (`ScheduleBatch.proposals`) too."""
    draft_lengths: tuple[int, ...] = ()
    """Numbers of draft tokens, ascending, from which a plan of several shards chooses. Empty:
    `draft_tokens` only."""
    sliced_layers: int = 0
    """Layers of the model, where a prompt may be computed in slices of layers. 0: prompts come
    whole."""
    slice_budget: int = 0
    """Tokens times layers of each slice. 0: by the clock, so small that running requests are hardly
    slowed."""

    @property
    def capacity(self) -> int:
        """Number of tokens that fit in the KV pool."""
        return self.num_pages * self.page_size


@dataclass(slots=True, weakref_slot=True, eq=False)
class Ticket:
    """A submitted step. `payload` belongs to the worker: pending results, and all that the device
    still reads.
    """

    step: int
    payload: object = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of N tokens: natural logarithms, of the model's raw logits. Each token has
    its own, its rank, and the K most likely alternatives.

    K is the largest number of alternatives that a row of the batch requests.
    """

    chosen: NDArray[np.float32]
    """float32[N]: of the token itself."""
    ranks: NDArray[np.int32]
    """int32[N]: its rank; 1 is the most likely token."""
    top_ids: NDArray[np.int32]
    """int32[N, K]: the alternatives, the most likely first."""
    top_logprobs: NDArray[np.float32]
    """float32[N, K]: of the alternatives."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one step produced, row by row of its batch: sampled tokens, which rows had bad logits,
    log-probabilities, embeddings, and counts of draft tokens. The worker's `collect` makes it."""

    step: int
    """The number of the step."""
    token_offsets: NDArray[np.int32]
    """int32[B + 1]: row i sampled `token_ids[token_offsets[i]:token_offsets[i + 1]]`. A chunk that
    is not the last samples nothing; a row with accepted draft tokens has several."""
    token_ids: NDArray[np.int32]
    """int32[N]: the sampled tokens of all rows."""
    bad_rows: NDArray[np.bool_]
    """bool[B]: the row's logits were not finite."""
    logprobs: TokenLogprobs | None = None
    """One entry for each of `token_ids`. None: no row requests log-probabilities."""
    prompt_logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """By row, one entry for each token of this chunk: the token at chunk index j predicts the next
    one."""
    hidden_states: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    """By row, float32[n, hidden]: the hidden states that the batch requests (`hidden_modes`). LAST:
    n = 1; FULL: one for each token of a chunk. In a verification both have one for each sampled
    token, from which it was drawn."""
    embeddings: NDArray[np.float32] | None = None
    """float32[B, hidden], the vectors or scores of prompts to embed. None: the step was not one of
    EMBED."""
    path: str = "eager"
    """What ran: the graph's kind and bucket; or "eager", after a colon perhaps the inputs that kept
    the step from a graph."""
    proposed: NDArray[np.int32] | None = None
    """int32[B] (optional): how many draft tokens the step verified of each row. None: it verified
    none."""
    drafts: NDArray[np.int32] | None = None
    """int32[B, k] (optional): the worker's next draft tokens, -1 from the end of the draft on.
    Given if the batch had masks."""
    swaps: SwapCounts | None = None
    """Counts of KV rows in host memory. None: the worker keeps none there."""


class ModelWorker(Protocol):
    """A model on a device, as the scheduler sees it: steps are submitted, and collected in the same
    order.
    """

    @property
    def limits(self) -> Limits:
        """The limits of this worker; constant."""
        ...

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Start a step and return without waiting for its results. The worker may keep and change
        `batch`. Without `Limits.can_overlap` the previous step must have been collected.
        """
        ...

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step, release all that it retained, and return its results. Call it once per
        ticket, in the order of `submit`.
        """
        ...

    def close(self) -> None:
        """Wait for the device and free everything. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Trial:
    """Two workers over the same weights, tables and pages, with and without speculation. A start
    measures both and keeps `bold` if it is clearly faster (`keep_faster` in engine/speed_trial.py).

    They run in turn; each may be dropped while the other goes on.
    """

    summary: str
    """Describes the bold worker, for a person."""
    bold: ModelWorker
    """The worker that may be faster."""
    plain: ModelWorker
    """The worker that is kept if the bold one is not clearly faster."""
    prompt: NDArray[np.int32]
    """int32[N]: the beginning of a text, which is the prompt of the trial."""
    leave: Callable[[], None]
    """Frees the resources that only the bold worker uses."""
