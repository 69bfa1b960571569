"""From hidden states to tokens: which rows emit, their logits, the draw, and what the device remembers of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.device.worker import TokenLogprobs as HostLogprobs
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.staging import StagedArrays
from sglcore.runtime.token_table import TokenTable
from sglcore.sampling.batch import SamplingBatch, SamplingNeeds
from sglcore.sampling.logprobs import TokenLogprobs, logprobs_of
from sglcore.sampling.processors import (
    MaskState,
    PenaltyRows,
    PenaltyState,
    count_penalties,
    penalty_arrays,
    place_penalties,
)
from sglcore.sampling.sampler import SampledTokens, Sampler, SamplingState, place_state, state_arrays
from sglcore.step.rows import RowPlan

PROMPT_LOGITS_ELEMENTS = 1 << 24
"""Prompt log-probabilities are worked on this many logits at a time, so that long prompts need no vocabulary-sized
memory for every token."""


Results = tuple[NDArray[np.int32], NDArray[np.bool_], HostLogprobs | None, dict[int, HostLogprobs]]
"""`Sampled` on the host: int32[N] and bool[N] of the emitting rows, their log-probabilities, and the prompts'."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens on the device, row for row of the emitting rows, and prompt log-probabilities by row."""

    tokens: SampledTokens
    prompt: dict[int, TokenLogprobs] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Everything that was asked for, in the order that `read_results` knows."""
        found = [self.tokens.token_ids, self.tokens.bad_rows]
        for part in (self.tokens.logprobs, *self.prompt.values()):
            if part is not None:
                found += [part.chosen, part.rank, part.top_ids, part.top]
        return found

    def read_results(self, arrays: Sequence[NDArray]) -> Results:
        """From the host's arrays of `tensors`."""
        if len(arrays) == 2:
            return arrays[0], arrays[1], None, {}
        tokens, bad, *others = arrays
        parts = iter([HostLogprobs(*others[first : first + 4]) for first in range(0, len(others), 4)])
        logprobs = None if self.tokens.logprobs is None else next(parts)
        return tokens, bad, logprobs, dict(zip(self.prompt, parts, strict=True))


@dataclass(frozen=True, slots=True)
class Scored:
    """A row that asks for prompt log-probabilities: its tokens [start, end) of the step, where its targets start, and how
    many alternatives it wants."""

    row: int
    start: int
    end: int
    first: int
    top_n: int


@dataclass(slots=True)
class Order:
    """What sampling needs of one host batch, by its places in `arrays`; -1 and empty where it needs nothing.

    `host` is the sampling state of the emitting rows, if the composition is new.
    """

    arrays: StagedArrays = field(default_factory=StagedArrays)
    host: SamplingBatch | None = None
    needs: SamplingNeeds | None = None
    state: dict[str, int] = field(default_factory=dict)
    penalties: dict[str, int] = field(default_factory=dict)
    slots: int = -1
    positions: int = -1
    last: int = -1
    targets: int = -1
    mask_rows: int = -1
    masks: int = -1
    scored: list[Scored] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Composition:
    """What is constant while the composition lasts: `slots` int64[N] of the emitting rows, and the rows with penalties on
    the host and on the device, with their slots int64[R]."""

    number: int
    slots: Tensor
    penalised: NDArray[np.int32]
    penalty_rows: PenaltyRows | None
    penalty_slots: Tensor | None


class SampleStep:
    """Logits, draw and bookkeeping for one runner. Keeps the device state of the last composition: slots and sampling
    parameters, which are constant while it lasts."""

    def __init__(self, runner: ModelRunner, token_table: TokenTable, vocab_size: int) -> None:
        self._runner = runner
        self._table = token_table
        self._vocab_size = vocab_size
        kernels = runner.attn_backend.kernels
        self._sampler = Sampler(vocab_size, token_table.last.device, draw=kernels.draw, greedy=kernels.greedy)
        self._composition: Composition | None = None
        self._state: SamplingState | None = None

    def order(self, batch: ScheduleBatch, rows: RowPlan) -> Order | None:
        """What `run` will need of the host batch, to be sent with it; None if it needs nothing. Host work only."""
        known = self._composition is not None and self._composition.number == batch.composition
        if known and rows.emitting is None and batch.prompt_logprobs is None and batch.masks is None:
            return None
        order, emitting = Order(), rows.emitting
        if emitting is not None:
            order.positions = order.arrays.add(batch.seq_lens[emitting])
            order.last = order.arrays.add(batch.token_offsets[1:][emitting] - np.int32(1))
        if not known:
            _order_state(order, batch, emitting)
        if batch.prompt_logprobs is not None:
            _order_targets(order, batch)
        if batch.masks is not None:
            _order_masks(order, batch, emitting)
        return order

    def run(
        self,
        batch: ScheduleBatch,
        staged: ForwardBatch,
        rows: RowPlan,
        hidden: Tensor,
        order: Order | None,
    ) -> Sampled:
        """Sample one token for each emitting row of hidden [T, H] and publish it. Waits for nothing."""
        prompt = {} if order is None else dict(self._score_prompts(order, hidden))
        assert staged.seq_lens is not None
        if order is None or order.last < 0:
            positions, logits = staged.seq_lens, self._runner.logits(hidden, None)
        else:
            arrived = order.arrays
            positions, logits = arrived[order.positions], self._runner.logits(hidden, arrived[order.last].long())
        state = self._state_for(batch, rows, order, positions)
        if order is not None and order.masks >= 0:
            state = replace(state, masks=MaskState(order.arrays[order.mask_rows].long(), order.arrays[order.masks]))
        sampled = self._sampler.sample(logits, state)
        composition = self._composition
        assert composition is not None
        self._table.publish(composition.slots, sampled.token_ids)
        if state.needs.any_penalty:
            self._table.append_history(composition.slots, positions.long(), sampled.token_ids)
        return Sampled(sampled, prompt)

    def _state_for(self, batch: ScheduleBatch, rows: RowPlan, order: Order | None, positions: Tensor) -> SamplingState:
        if order is not None and order.host is not None:
            assert order.needs is not None
            composition = _composition(batch.composition, order)
            penalties = self._penalties(composition, batch, rows, positions)
            parts = {name: order.arrays[place] for name, place in order.state.items()}
            self._state = place_state(order.needs, positions, parts, penalties)
            self._composition = composition
            return self._state
        assert self._state is not None and self._composition is not None
        if self._state.positions is positions and not self._state.needs.any_penalty:
            return self._state
        penalties = self._penalties(self._composition, batch, rows, positions)
        self._state = replace(self._state, positions=positions, penalties=penalties)
        return self._state

    def _penalties(
        self, composition: Composition, batch: ScheduleBatch, rows: RowPlan, positions: Tensor
    ) -> PenaltyState | None:
        """Counts from the history as it is now: nothing is accumulated, so nothing can be counted twice."""
        constant = composition.penalty_rows
        if constant is None:
            return None
        assert constant.rows is not None and composition.penalty_slots is not None
        host_lens = batch.seq_lens if rows.emitting is None else batch.seq_lens[rows.emitting]
        longest = int(host_lens[composition.penalised].max())
        history = self._table.history[:, :longest].index_select(0, composition.penalty_slots)
        return count_penalties(constant, history, positions.index_select(0, constant.rows), self._vocab_size)

    def _score_prompts(self, order: Order, hidden: Tensor) -> Iterator[tuple[int, TokenLogprobs]]:
        """Each asking row's chunk: token j predicts the prompt token after it; a sampled token is not scored here."""
        for part in order.scored:
            targets = order.arrays[order.targets][part.first : part.first + part.end - part.start]
            yield part.row, self._score(hidden[part.start : part.end], targets, part.top_n)

    def _score(self, hidden: Tensor, targets: Tensor, top_n: int) -> TokenLogprobs:
        step = max(1, PROMPT_LOGITS_ELEMENTS // self._vocab_size)
        parts = [
            logprobs_of(self._runner.logits(hidden[first : first + step], None), targets[first : first + step], top_n)
            for first in range(0, max(len(targets), 1), step)
        ]
        return TokenLogprobs(
            torch.cat([part.chosen for part in parts]),
            torch.cat([part.rank for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top for part in parts]),
        )


def _composition(number: int, order: Order) -> Composition:
    assert order.host is not None
    arrays = order.arrays
    slots = arrays[order.slots].long()
    if not order.penalties:
        return Composition(number, slots, np.zeros(0, dtype=np.int32), None, None)
    constant = place_penalties({name: arrays[place] for name, place in order.penalties.items()})
    assert constant.rows is not None
    return Composition(number, slots, order.host.penalty_rows(), constant, slots.index_select(0, constant.rows))


def _order_state(order: Order, batch: ScheduleBatch, emitting: NDArray[np.int64] | None) -> None:
    assert isinstance(batch.sampling, SamplingBatch)
    host = batch.sampling if emitting is None else batch.sampling.select(emitting)
    needs, add = host.needs, order.arrays.add
    order.host, order.needs = host, needs
    order.state = {name: add(values, lasting=True) for name, values in state_arrays(host, needs).items()}
    order.slots = add(batch.slots if emitting is None else batch.slots[emitting], lasting=True)
    if needs.any_penalty:
        order.penalties = {name: add(values, lasting=True) for name, values in penalty_arrays(host).items()}


def _order_masks(order: Order, batch: ScheduleBatch, emitting: NDArray[np.int64] | None) -> None:
    """This step's masks, by the place of their rows among those that emit."""
    assert batch.mask_rows is not None and batch.masks is not None
    rows = batch.mask_rows if emitting is None else np.searchsorted(emitting, batch.mask_rows).astype(np.int32)
    order.mask_rows, order.masks = order.arrays.add(rows), order.arrays.add(batch.masks)


def _order_targets(order: Order, batch: ScheduleBatch) -> None:
    assert batch.prompt_logprobs is not None and batch.next_ids is not None
    targets: list[NDArray[np.int32]] = []
    first = 0
    for row in np.flatnonzero(batch.prompt_logprobs >= 0).tolist():
        start, end = int(batch.token_offsets[row]), int(batch.token_offsets[row + 1])
        wanted = np.append(batch.input_ids[start + 1 : end], batch.next_ids[row])
        if wanted[-1] < 0:
            wanted, end = wanted[:-1], end - 1
        order.scored.append(Scored(row, start, end, first, int(batch.prompt_logprobs[row])))
        targets.append(wanted)
        first += len(wanted)
    if targets:
        order.targets = order.arrays.add(np.concatenate(targets))
