"""The host batch that a worker receives: numpy arrays with CSR offsets; no tensors, pools or
requests.

Each field is declared once. The isolated copy for a forward is generated from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglcore.worker.step_plan import StepPlan

T = TypeVar("T")
Ints = NDArray[np.int32]


class ForwardMode(IntEnum):
    """The kind of forward: no rows (IDLE), last sampled tokens (DECODE), prompt chunks (EXTEND),
    both (MIXED), or prompts to embed or score (EMBED). It follows from the states of the requests,
    never from the number of tokens in a row.
    """

    IDLE = 0
    DECODE = 1
    EXTEND = 2
    MIXED = 3
    EMBED = 4

    @property
    def is_decode(self) -> bool:
        """Whether every row has exactly its last sampled token as input."""
        return self is ForwardMode.DECODE


class CaptureHiddenMode(IntEnum):
    """The hidden states that a forward returns: none, that of a row's last token, or those of all
    its tokens.
    """

    NONE = 0
    LAST = 1
    FULL = 2


class OneShot(Generic[T]):
    """A value for one forward only: the first `take` returns it, every later one returns the
    default.
    """

    __slots__ = ("_default", "_value")

    def __init__(self, default: T) -> None:
        self._default = default
        self._value = default

    def put(self, value: T) -> None:
        """Set the value that the next `take` returns."""
        self._value = value

    def take(self) -> T:
        """Return the value and forget it."""
        value, self._value = self._value, self._default
        return value

    @property
    def is_set(self) -> bool:
        """Whether `take` would return anything but the default object."""
        return self._value is not self._default

    def move(self) -> OneShot[T]:
        """Return a new one-shot with this one's value, and clear this one."""
        moved = OneShot(self._default)
        moved._value, self._value = self._value, self._default
        return moved


def offsets_of(lengths: Sequence[int] | np.ndarray) -> Ints:
    """Return int32[N + 1]: the start of each of N parts, and the end of the last one."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


class HostSampling(Protocol):
    """The sampling state of a batch's rows, as the contract sees it: something to copy for a
    forward. The scheduler of this repository gives a `sampling.params_batch.SamplingBatch`."""

    def copy_for_forward(self) -> HostSampling:
        """Return a copy that one forward may keep. Later changes to the original do not
        affect it.
        """
        ...


def _one_shot(default: T) -> Callable[[], OneShot[T]]:
    return lambda: OneShot(default)


@dataclass(slots=True)
class ScheduleBatch:
    """One step for the worker: B rows (requests) and T tokens, as host arrays.

    The scheduler's BatchBuilder makes it. N parts of different lengths are one array and
    int32[N + 1] offsets into it. The class has slots, so an undeclared attribute is impossible.
    """

    step: int
    """The number of the step. Steps are numbered in the order of submission."""
    forward_mode: ForwardMode
    """What the forward does with the rows."""
    slots: Ints
    """int32[B]: each row's request slot, its index in the device tables. 0 only in an EMBED batch,
    which needs no slots."""
    seq_lens: Ints
    """int32[B]: tokens of the request after this forward. For a decode row of a worker that makes
    draft tokens it is the most that the request can have then, and exact where no other step is in
    flight."""
    prefix_lens: Ints
    """int32[B]: tokens of the request in the KV pool before this forward."""
    token_offsets: Ints
    """int32[B + 1]: where each row's tokens begin in `input_ids`."""
    input_ids: Ints
    """int32[T]: the tokens of all rows. A negative id -s stands for the last token sampled for slot
    s, which only the device knows yet. Of a decode row it has the last token only, even where the
    worker verifies draft tokens after it."""
    page_counts: Ints
    """int32[B]: page-table entries that the device already has for the slot."""
    new_page_offsets: Ints
    """int32[B + 1]: where each row's entries begin in `new_pages`."""
    new_pages: Ints
    """int32[N]: page-table entries to append to those of each slot."""
    emits: NDArray[np.bool_]
    """bool[B]: the row samples a token. A chunk that is not the last of its prompt does not."""
    composition: int = 0
    """The version of the rows. It is equal in two batches only if their rows, the order and the
    sampling state are equal; lengths and tokens may differ."""
    sampling: HostSampling | None = None
    """The sampling state of the rows. None: no row samples."""
    history_offsets: Ints | None = None
    """int32[B + 1] (optional): where each row's tokens begin in `history_ids`. None: no row brings
    history."""
    history_ids: Ints | None = None
    """int32[N] (optional): all known tokens of each row that enters a slot and that needs its
    history, for its sampling or for the worker (`Limits.reads_history`, `Limits.keeps_history`)."""
    next_ids: Ints | None = None
    """int32[B] (optional): the prompt token after the row's chunk; -1: the next token is to be
    sampled. Given where a row requests prompt log-probabilities, and with chunks of a worker with a
    `Limits.lookahead`."""
    prompt_logprobs: Ints | None = None
    """int32[B] (optional): how many alternatives the row requests for each of its prompt tokens;
    -1: no log-probabilities. None: no row requests them."""
    mask_rows: Ints | None = None
    """int32[M] (optional): the row of each grammar mask, ascending. These rows sample in this step.
    Masks belong to this step alone, whatever `composition` says. None: no row has a mask."""
    mask_nodes: Ints | None = None
    """int32[M] (optional): after how many draft tokens each mask holds, from 0 upwards in each row.
    Draft tokens after a row's last mask are not verified. None except in a decode step of a worker
    that makes draft tokens."""
    masks: Ints | None = None
    """int32[M, ceil(V / 32)] (optional): the tokens that each mask allows, lowest bit first, 1 =
    allowed."""
    change_rows: Ints | None = None
    """int32[E] (optional): the row of each logit change, ascending. Only rows with a mask have
    changes."""
    change_nodes: Ints | None = None
    """int32[E] (optional): after how many draft tokens each logit change holds."""
    change_ids: Ints | None = None
    """int32[E] (optional): the token of each logit change, at most once in a row after the same
    draft tokens."""
    change_values: NDArray[np.float32] | None = None
    """float32[E] (optional): what is added to that token's logit in this step."""
    state_from: Ints | None = None
    """int32[B] (optional): what the state in each slot becomes before the forward. -1: it stays, 0:
    zeros, n: a copy of state checkpoint n. None: no row moves a state, the worker keeps none
    (`Limits.keeps_state`), or the batch is an EMBED one; its rows begin with zeros."""
    state_to: Ints | None = None
    """int32[B] (optional): n: copy the slot's state into checkpoint n after the forward, 0: do
    nothing. The worker copies in, runs and copies out, step by step as submitted. A batch names no
    checkpoint twice here. None as `state_from`."""
    window_starts: Ints | None = None
    """int32[B] (optional): tokens of the row before its first sliding-window page, a multiple of
    the page size. None only in an EMBED batch, and where the worker keeps no such pages
    (`Limits.num_window_pages`). Token t of a row is at (t - window_starts) % page_size of page (t -
    window_starts) // page_size of the row's list, which holds all of `seq_lens`. KV slots outside
    the window are never read."""
    window_offsets: Ints | None = None
    """int32[B + 1] (optional): where each row's list begins in `window_pages`. None: no list
    changed."""
    window_pages: Ints | None = None
    """int32[N] (optional): the whole new list of sliding-window pages of each row with a changed
    list (it entered a slot, grew, or lost its first pages); nothing for other rows. The worker
    takes the lists in the order of submission, each before its forward: a page may be in another
    row's list as soon as no row submitted later has it."""
    token_type_ids: Ints | None = None
    """int32[T] (optional): the segment of each token in its text, in an EMBED batch. None: all are
    of segment 0."""
    embed_rows: Ints | None = None
    """int32[N] (optional): tokens of the step with a given embedding, ascending. None: no token has
    one."""
    prompt_embeds: NDArray[np.float32] | None = None
    """float32[N, H] (optional): the embedding of each token in `embed_rows`."""
    mrope_positions: Ints | None = None
    """int32[3, T] (optional): the positions of each token by time, height and width. None: no
    token's three positions differ."""
    ngram_starts: Ints | None = None
    """None: the device knows a text's earlier tokens. It goes with API 4."""
    ngram_lens: Ints | None = None
    """None, as `ngram_starts`."""
    cell_limits: Ints | None = None
    """int32[B] (optional): KV slots of the row that are in its pages and that its output, or a
    draft tree after its last token, can need. None: the worker makes no draft tokens
    (`Limits.draft_tokens`)."""
    proposals: Ints | None = None
    """int32[B, k] (optional): the scheduler's draft tokens after each row's last token, k =
    `Limits.draft_tokens`, -1 from the end of the draft on. A row that begins with -1 keeps the
    worker's own. Only in a decode step of a worker that takes them (`Limits.takes_proposals`),
    planned with all last tokens known. None: no row has any."""
    layers: Ints | None = None
    """int32[2] (optional): the first of the model's layers that this step runs, and the one after
    the last. A step from layer 0 on opens a prompt (EXTEND), replaces one that was open, and brings
    the whole batch. Steps without rows run further layers; the one with the last layer brings the
    results, the others none. None: the step runs all layers."""
    decode_rows: int = 0
    """Requests that decode while the prompt that this step opens is computed layer by layer."""
    step_plan: StepPlan | None = None
    """What the data-parallel shards of requests agreed on for this step. Each shard is submitted a
    batch in each step; one with nothing to run an IDLE batch of no rows. None: the requests are in
    one shard."""
    hidden_modes: Ints | None = None
    """int32[B] (optional): the `CaptureHiddenMode` of each row, as an integer; negative: of the
    hidden states before the last norm. Read only where `capture_hidden_mode` is set. None: no row
    requests hidden states."""
    capture_hidden_mode: OneShot[CaptureHiddenMode] = field(default_factory=_one_shot(CaptureHiddenMode.NONE))
    """The largest mode in `hidden_modes`, which says that this forward returns hidden states; for
    one forward only."""
    seq_lens_cpu_cache: OneShot[Ints | None] = field(default_factory=_one_shot(None))
    """int32[B] to stage in place of `seq_lens`; for one forward only. None: `seq_lens`."""
    return_hidden_states_before_norm: OneShot[bool] = field(default_factory=_one_shot(False))
    """Some row's hidden states are those from before the last norm; for one forward only."""

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all rows."""
        return len(self.input_ids)

    def copy_for_forward(self) -> ScheduleBatch:
        """Return an isolated copy for one forward: arrays are copied, one-shot values are moved to
        it (this batch keeps their defaults), and the sampling state and the step plan give their
        own `copy_for_forward`.
        """
        array, scalars = np.ndarray, _SCALARS
        values = [
            value if (kind := type(value)) in scalars else value.copy() if kind is array else _isolate(value)
            for value in _reader(type(self))(self)
        ]
        return type(self)(*values)

    def take_back(self, view: ScheduleBatch) -> None:
        """Move the one-shot values that are still set in `view`, the copy of a failed forward, back
        into this batch.
        """
        read = _reader(type(self))
        for mine, other in zip(read(self), read(view), strict=True):
            if isinstance(mine, OneShot) and other.is_set:
                mine.put(other.take())


@cache
def _reader(kind: type[ScheduleBatch]) -> Callable[[ScheduleBatch], tuple[Any, ...]]:
    """Return a function that reads all declared fields of this kind of batch, in order."""
    return attrgetter(*(declared.name for declared in fields(kind)))


_SCALARS = frozenset({int, ForwardMode, type(None)})


def _isolate(value: Any) -> Any:
    """Return a one-shot moved to a new one, or else `value.copy_for_forward()`. A kind of value
    without this method raises here, so that it cannot leak between forwards.
    """
    return value.move() if type(value) is OneShot else value.copy_for_forward()
