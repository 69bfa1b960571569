"""The host batch that crosses the worker seam: numpy arrays with CSR offsets, no tensors, no pools, no requests.

One declaration per field; the isolated copy that a forward sees is generated from it.
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

from sglcore.device.plan import StepPlan

T = TypeVar("T")
Ints = NDArray[np.int32]


class ForwardMode(IntEnum):
    """What a forward does. Decided by request state, never by how many tokens a row brings."""

    IDLE = 0
    DECODE = 1
    EXTEND = 2
    MIXED = 3
    EMBED = 4

    @property
    def is_decode(self) -> bool:
        """Every row brings exactly its last sampled token."""
        return self is ForwardMode.DECODE


class CaptureHiddenMode(IntEnum):
    """Which hidden states a forward hands back."""

    NONE = 0
    LAST = 1
    FULL = 2


class OneShot(Generic[T]):
    """A value for one forward only: the first `take` returns it, every later one returns the default."""

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
        """A value is waiting to be taken."""
        return self._value is not self._default

    def move(self) -> OneShot[T]:
        """A new one-shot that holds this one's value; this one is left empty."""
        moved = OneShot(self._default)
        moved._value, self._value = self._value, self._default
        return moved


def offsets_of(lengths: Sequence[int] | np.ndarray) -> Ints:
    """int32[N + 1]: where each of N parts begins, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


class HostSampling(Protocol):
    """Sampling state of a batch's rows, as the seam sees it."""

    def copy_for_forward(self) -> HostSampling:
        """A copy that one forward may keep; later changes to the original do not reach it."""
        ...


def _one_shot(default: T) -> Callable[[], OneShot[T]]:
    return lambda: OneShot(default)


@dataclass(slots=True)
class ScheduleBatch:
    """One step for the worker, B rows (requests) and T tokens; slots, so an undeclared attribute is impossible.

    `slots` int32[B]: each row's place in the device tables (0 only in an EMBED batch, which needs none).
    `seq_lens` int32[B]: tokens of the request once this forward has run; `prefix_lens` int32[B]: cells computed before.
    `token_offsets` int32[B + 1] and `input_ids` int32[T]: the row's tokens. A negative id -s stands for the last token
    sampled for slot s, which only the device knows yet.
    `page_counts` int32[B]: page-table entries the device already has for the slot; `new_page_offsets` int32[B + 1] and
    `new_pages` int32[N]: the entries to append to them.
    `emits` bool[B]: the row samples a token (a chunk that is not the last of its prompt does not).
    `composition`: equal in two batches only if rows, order and sampling state are equal (lengths and tokens may differ).
    `history_offsets` int32[B + 1], `history_ids`: all tokens known of a row whose sampling needs its history, sent when
    the row enters a slot. `next_ids` int32[B]: the prompt token after the chunk (-1: to be sampled), and
    `prompt_logprobs` int32[B] (-1: none, else how many alternatives), when a row asks for prompt log-probabilities.
    `mask_rows` int32[M] and `masks` int32[M, ceil(V / 32)]: rows that emit under a grammar, ascending, and the tokens that
    each may draw (lowest bit first, 1 = allowed). They belong to this step alone, whatever the composition. `mask_nodes`
    int32[M], in a decode step of a worker that proposes: after how many proposals each mask holds, from 0 upwards in each
    row; proposals behind a row's last mask are not verified.
    `change_ids` int32[E] and `change_values` float32[E]: what this step adds to single logits of rows with a mask,
    `change_rows` int32[E], ascending, each token once in a row, after `change_nodes` int32[E] proposals.
    `state_from` int32[B]: what each slot's state becomes before the forward: -1 what it is, 0 zeros, n a copy of snapshot n.
    `state_to` int32[B]: 0 nothing, n copy the slot's state into snapshot n after the forward. The worker copies in, runs,
    copies out, step by step as submitted; a batch names no snapshot twice in `state_to`. Both are None where no row
    moves a state, where the worker keeps none (`Limits.keeps_state`), and in an EMBED batch, whose rows begin with zeros.
    `window_starts` int32[B]: tokens of the row before its first window page, a multiple of the page size; None only where
    the worker keeps no window pages (`Limits.num_window_pages`) and in an EMBED batch. `window_offsets` int32[B + 1] and
    `window_pages` int32[N]: the whole new list of window pages of each row whose list changed (it entered a slot, grew, or
    lost its first pages), nothing for the others; None where no list changed. Token t of a row is in cell
    (t - window_starts) % page_size of window page (t - window_starts) // page_size of its list, which holds all of
    `seq_lens`; what the window does not see is never read. The worker takes the lists in the order of submission, each before
    its forward: a window page may be in another row's list as soon as no row submitted later has it in its own.
    `cell_limits` int32[B]: cells of the row that are in its pages and that its output can need, or a tree of its last token; None
    where the worker proposes nothing (`Limits.draft_tokens`). A decode row of a worker that does brings as many tokens as the worker verifies, its
    last one and proposals, of which `input_ids` has the first; `seq_lens` is then the most that the request can have once this
    forward has run, and exact where no other step is in flight.
    `proposals` int32[B, k], in a decode step of a worker that takes them (`Limits.takes_proposals`): what is proposed after each row's
    last token, k being `Limits.draft_tokens`, -1 from where nothing is. A row whose first is -1 keeps what the worker proposes. The
    batch was planned with all last tokens known. None: no row has any.
    `token_type_ids` int32[T]: the segment of each token in its text, in an EMBED batch where some are not of the first.
    `embed_rows` int32[N] and `prompt_embeds` float32[N, H]: tokens of the step whose embedding is given, ascending, and it.
    `mrope_positions` int32[3, T]: time, height and width of each token where some differ. `ngram_starts`,
    `ngram_lens` int32[B]: where each row's tokens are in its slot's history, of a worker that reads it, and how many.
    `layers` int32[2]: the first of the model's layers that this step runs, and the one after the last; None: all. A step from layer 0 on
    opens a prompt, forgetting one that was open, and brings its whole batch, which is an EXTEND one; steps without rows take it on, and
    that with the last layer brings the results of the batch that opened it. The others bring none. `decode_rows`: how many rows decode
    beside a prompt that this step opens.
    `step_plan`: what the shards agreed on, of a worker whose requests are in several; each of them is submitted a batch in each step,
    one that has nothing to run an IDLE batch of no rows.
    """

    step: int
    forward_mode: ForwardMode
    slots: Ints
    seq_lens: Ints
    prefix_lens: Ints
    token_offsets: Ints
    input_ids: Ints
    page_counts: Ints
    new_page_offsets: Ints
    new_pages: Ints
    emits: NDArray[np.bool_]
    composition: int = 0
    sampling: HostSampling | None = None
    history_offsets: Ints | None = None
    history_ids: Ints | None = None
    next_ids: Ints | None = None
    prompt_logprobs: Ints | None = None
    mask_rows: Ints | None = None
    mask_nodes: Ints | None = None
    masks: Ints | None = None
    change_rows: Ints | None = None
    change_nodes: Ints | None = None
    change_ids: Ints | None = None
    change_values: NDArray[np.float32] | None = None
    state_from: Ints | None = None
    state_to: Ints | None = None
    window_starts: Ints | None = None
    window_offsets: Ints | None = None
    window_pages: Ints | None = None
    token_type_ids: Ints | None = None
    embed_rows: Ints | None = None
    prompt_embeds: NDArray[np.float32] | None = None
    mrope_positions: Ints | None = None
    ngram_starts: Ints | None = None
    ngram_lens: Ints | None = None
    cell_limits: Ints | None = None
    proposals: Ints | None = None
    layers: Ints | None = None
    decode_rows: int = 0
    step_plan: StepPlan | None = None
    capture_hidden_mode: OneShot[CaptureHiddenMode] = field(default_factory=_one_shot(CaptureHiddenMode.NONE))
    seq_lens_cpu_cache: OneShot[Ints | None] = field(default_factory=_one_shot(None))
    return_hidden_states_before_norm: OneShot[bool] = field(default_factory=_one_shot(False))

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens over all rows."""
        return len(self.input_ids)

    def copy_for_forward(self) -> ScheduleBatch:
        """An isolated copy for one forward: arrays copied, one-shot values moved, sampling state forward-only."""
        array, scalars = np.ndarray, _SCALARS
        values = [
            value if (kind := type(value)) in scalars else value.copy() if kind is array else _isolate(value)
            for value in _reader(type(self))(self)
        ]
        return type(self)(*values)

    def take_back(self, view: ScheduleBatch) -> None:
        """Return one-shot values that a failed forward never took."""
        read = _reader(type(self))
        for mine, other in zip(read(self), read(view), strict=True):
            if isinstance(mine, OneShot) and other.is_set:
                mine.put(other.take())


@cache
def _reader(kind: type[ScheduleBatch]) -> Callable[[ScheduleBatch], tuple[Any, ...]]:
    """Reads all declared fields of this kind of batch, in order."""
    return attrgetter(*(declared.name for declared in fields(kind)))


_SCALARS = frozenset({int, ForwardMode, type(None)})


def _isolate(value: Any) -> Any:
    """Copy, by kind, what is neither scalar nor array; a kind nobody thought about is an error here, not a leak later."""
    return value.move() if type(value) is OneShot else value.copy_for_forward()
