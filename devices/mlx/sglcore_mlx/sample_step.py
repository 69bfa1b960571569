"""From logits to tokens: the sampling state of the rows that emit, the draw, and what the device remembers of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore.device.batch import ScheduleBatch
from sglcore.device.worker import TokenLogprobs
from sglcore.sampling.batch import SamplingBatch
from sglcore.step.rows import RowPlan
from sglcore.step.sizing import MemorySizes
from sglcore_mlx.forward import resolve_ids
from sglcore_mlx.models.contract import Model
from sglcore_mlx.pool import DeviceState
from sglcore_mlx.sampling.logprobs import Logprobs, logprobs_of
from sglcore_mlx.sampling.processors import Masks
from sglcore_mlx.sampling.sampler import SampledTokens, Sampler
from sglcore_mlx.sampling.state import SamplingState, make_state

PROMPT_LOGITS_ELEMENTS = 1 << 24
"""Prompt log-probabilities are worked on this many logits at a time, so that long prompts need no vocabulary-sized memory
for every token."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens, row for row of the emitting rows, and prompt log-probabilities by row; lazy."""

    tokens: SampledTokens
    prompt: dict[int, Logprobs] = field(default_factory=dict)

    def arrays(self) -> list[mx.array]:
        """Everything that the host will read."""
        found = [self.tokens.token_ids, self.tokens.bad_rows]
        for part in (self.tokens.logprobs, *self.prompt.values()):
            if part is not None:
                found += [part.chosen, part.ranks, part.top_ids, part.top]
        return found


def host_logprobs(part: Logprobs) -> TokenLogprobs:
    """On the host; waits if they have not been evaluated."""
    return TokenLogprobs(np.array(part.chosen), np.array(part.ranks), np.array(part.top_ids), np.array(part.top))


@dataclass(frozen=True, slots=True)
class Composition:
    """What is constant while a composition lasts: the emitting rows' sampling parameters, their slots and their state."""

    number: int
    host: SamplingBatch
    slots: NDArray[np.int32]
    device_slots: mx.array
    state: SamplingState


class SampleStep:
    """The draw and its bookkeeping for one model. Keeps the state of the last composition."""

    def __init__(self, model: Model, sizes: MemorySizes, compiles: bool = False) -> None:
        """`compiles` the draw, once for each kind of batch."""
        self._model = model
        self._history_shape = (sizes.max_requests + 1, sizes.max_model_len + 1)
        self._sampler = Sampler(model.config.vocab_size, compiled=compiles)
        self._composition: Composition | None = None

    def admit(self, batch: ScheduleBatch, state: DeviceState) -> None:
        """Take up the history of rows that entered a slot and whose sampling looks back."""
        if batch.history_ids is None or batch.history_offsets is None or not len(batch.history_ids):
            return
        counts = np.diff(batch.history_offsets)
        columns = np.arange(len(batch.history_ids), dtype=np.int32) - np.repeat(batch.history_offsets[:-1], counts)
        history = self._history(state)
        history[mx.array(np.repeat(batch.slots, counts)), mx.array(columns)] = mx.array(batch.history_ids)

    def run(
        self, batch: ScheduleBatch, rows: RowPlan, logits: mx.array, state: DeviceState, prompt: dict[int, Logprobs]
    ) -> Sampled:
        """Draw a token for each of the logits [N, V] of the emitting rows, and remember it as its slot's last."""
        lens = batch.seq_lens if rows.emitting is None else batch.seq_lens[rows.emitting]
        composition, sampling = self._state(batch, rows, lens, state)
        sampled = self._sampler.sample(logits, replace(sampling, masks=_masks(batch, rows)))
        if len(lens):
            state.last[composition.device_slots] = sampled.token_ids
        return Sampled(sampled, prompt)

    def _state(
        self, batch: ScheduleBatch, rows: RowPlan, lens: NDArray[np.int32], state: DeviceState
    ) -> tuple[Composition, SamplingState]:
        positions = mx.array(lens)
        known = self._composition
        if known is None or known.number != batch.composition:
            known = self._composition = self._compose(batch, rows, positions, state, lens)
            return known, known.state
        penalties = known.state.penalties
        if penalties is not None:
            penalties = replace(penalties, history=self._history_of(known.slots, batch, rows, lens, state))
        return known, replace(known.state, positions=positions, penalties=penalties)

    def _compose(
        self, batch: ScheduleBatch, rows: RowPlan, positions: mx.array, state: DeviceState, lens: NDArray[np.int32]
    ) -> Composition:
        assert isinstance(batch.sampling, SamplingBatch)
        host = batch.sampling if rows.emitting is None else batch.sampling.select(rows.emitting)
        slots = batch.slots if rows.emitting is None else batch.slots[rows.emitting]
        history = self._history_of(slots, batch, rows, lens, state) if host.needs.any_penalty else None
        made = make_state(host, positions, history=history)
        return Composition(batch.composition, host, slots, mx.array(slots), made)

    def _history(self, state: DeviceState) -> mx.array:
        if state.history is None:
            state.history = mx.zeros(self._history_shape, mx.int32)
        return state.history

    def _history_of(
        self, slots: NDArray[np.int32], batch: ScheduleBatch, rows: RowPlan, lens: NDArray[np.int32], state: DeviceState
    ) -> mx.array:
        """int32 [N, longest]: the tokens so far, counted anew each step, so that nothing can be counted twice.

        A row's newest token, which this step brought, is written first: nothing reads the table after that, so that the
        next step writes to it in place.
        """
        history, device_slots = self._history(state), mx.array(slots)
        ends = batch.token_offsets[1:] if rows.emitting is None else batch.token_offsets[1:][rows.emitting]
        history[device_slots, mx.array(lens - np.int32(1))] = resolve_ids(batch.input_ids[ends - 1], state.last)
        return history[device_slots, : int(lens.max(initial=1))]

    def score_prompts(self, batch: ScheduleBatch, hidden: mx.array) -> Iterator[tuple[int, Logprobs]]:
        """Each asking row's chunk of hidden [T, H]: token j predicts the prompt token after it; a sampled token is not
        scored here."""
        if batch.prompt_logprobs is None or batch.next_ids is None:
            return
        for row in np.flatnonzero(batch.prompt_logprobs >= 0).tolist():
            start, end = int(batch.token_offsets[row]), int(batch.token_offsets[row + 1])
            targets = np.append(batch.input_ids[start + 1 : end], batch.next_ids[row])
            if targets[-1] < 0:
                targets, end = targets[:-1], end - 1
            yield row, self._score(hidden[start:end], targets, int(batch.prompt_logprobs[row]))

    def _score(self, hidden: mx.array, targets: NDArray[np.int32], top_n: int) -> Logprobs:
        if not len(targets):
            return no_logprobs(top_n)
        step = max(1, PROMPT_LOGITS_ELEMENTS // self._model.config.vocab_size)
        parts = [
            logprobs_of(self._model.logits(hidden[at : at + step]), mx.array(targets[at : at + step]), top_n)
            for at in range(0, len(targets), step)
        ]
        return Logprobs(
            mx.concatenate([part.chosen for part in parts]),
            mx.concatenate([part.ranks for part in parts]),
            mx.concatenate([part.top_ids for part in parts]),
            mx.concatenate([part.top for part in parts]),
        )


def _masks(batch: ScheduleBatch, rows: RowPlan) -> Masks | None:
    """This step's masks, by the place of their rows among those that emit."""
    if batch.masks is None or batch.mask_rows is None:
        return None
    own = batch.mask_rows
    places = own if rows.emitting is None else np.searchsorted(rows.emitting, own).astype(np.int32)
    return Masks(mx.array(places), mx.array(batch.masks))


def no_logprobs(top_n: int) -> Logprobs:
    """Those of no token."""
    ints, floats = mx.zeros((0, top_n), mx.int32), mx.zeros((0, top_n), mx.float32)
    return Logprobs(mx.zeros((0,), mx.float32), mx.zeros((0,), mx.int32), ints, floats)
