"""Samples tokens from logits for the requests that need one, and keeps last tokens and history on
the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import mlx.core as mx

from sglcore.sampling.state import Masks, SampledTokens, place_changes
from sglcore.step.emitting_rows import RowPlan, last_tokens
from sglcore.step.sampling_arrays import NO_SAMPLING, BatchSampling, SamplingInputs, sampling_inputs
from sglcore.step.sizing import MemorySizes
from sglcore.step.tables import new_history
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.forward import resolve_ids
from sglcore_mlx.pool import DeviceState
from sglcore_mlx.sampling.sampler import Sampler
from sglcore_mlx.sampling.state import ROW_FIELDS, SamplingState, place_state

Arrays = Mapping[str, mx.array]


class SampleStep:
    """Sampling and its bookkeeping for one model. Keeps the sampling arrays on the device while the
    composition of the batch stays the same."""

    def __init__(self, vocab_size: int, sizes: MemorySizes, compiles: bool = False) -> None:
        """`compiles`: sampling is compiled, once for each kind of batch."""
        self._history_shape = (sizes.max_requests + 1, sizes.max_model_len + 1)
        self._sampler = Sampler(vocab_size, compiled=compiles)
        self._known: tuple[BatchSampling, Arrays] = NO_SAMPLING, {}

    def admit(self, batch: ScheduleBatch, state: DeviceState) -> None:
        """Write the known tokens of new requests to the history in `state`, for requests with which
        the batch brings them: for penalties, or for the drafter. Otherwise does nothing."""
        entries = new_history(batch)
        if entries is not None and len(entries[0]):
            slots, columns, ids = map(mx.array, entries)
            self._history(state)[slots, columns] = ids

    def inputs(self, batch: ScheduleBatch, rows: RowPlan) -> SamplingInputs:
        """Return the host arrays that `run` needs for this batch; without new sampling arrays if
        its composition is that of the last sampling. Host work only."""
        return sampling_inputs(batch, rows, self._known[0].number, all_rows=True)

    def run(
        self,
        batch: ScheduleBatch,
        rows: RowPlan,
        logits: mx.array,
        inputs: SamplingInputs,
        arrived: Arrays,
        state: DeviceState,
    ) -> SampledTokens[mx.array]:
        """Sample a token for each of the logits [N, V], and store it in `state.last` at its request
        slot; return the tokens, lazy. `arrived`: the arrays of `inputs` on the device, by name.
        Builds the lazy graph only."""
        host, parts = self._take(inputs, arrived)
        positions = mx.array(batch.seq_lens) if rows.emitting is None else arrived["positions"]
        history = self._history_of(parts["slots"], positions, batch, rows, state) if host.needs.any_penalty else None
        sampled = self._draw(logits, positions, arrived, history)
        if logits.shape[0]:
            state.last[parts["slots"]] = sampled.token_ids
        return sampled

    def verify(
        self,
        batch: ScheduleBatch,
        rows: RowPlan,
        logits: mx.array,
        inputs: SamplingInputs,
        arrived: Arrays,
        state: DeviceState,
        positions: mx.array,
    ) -> SampledTokens[mx.array]:
        """Sample a token for each of the logits [N, V], as token number `positions` int32 [N] of
        its request, and return them, lazy. The history must hold all earlier tokens. Unlike `run`
        it stores no token. Builds the lazy graph only."""
        history = self._verified_history(batch, rows, inputs, arrived, state)
        return self._draw(logits, positions, arrived, history)

    def state_of_rows(
        self,
        batch: ScheduleBatch,
        rows: RowPlan,
        inputs: SamplingInputs,
        arrived: Arrays,
        state: DeviceState,
        positions: mx.array,
    ) -> SamplingState:
        """Return the state of the sampling of `verify`, with the same parameters. Builds the lazy
        graph only."""
        return self._state(positions, arrived, self._verified_history(batch, rows, inputs, arrived, state))

    def _verified_history(
        self, batch: ScheduleBatch, rows: RowPlan, inputs: SamplingInputs, arrived: Arrays, state: DeviceState
    ) -> mx.array | None:
        """Take over the inputs of a sampling, and return the history that its penalties count;
        None: it has none."""
        host, parts = self._take(inputs, arrived)
        longest = host.longest(batch, rows) if host.needs.any_penalty else 0
        return state.made_history[parts["slots"], :longest] if longest else None

    @property
    def sampler(self) -> Sampler:
        """The sampler of the model's vocabulary."""
        return self._sampler

    def is_steady(self, number: int) -> bool:
        """Return whether the last sampling had the composition `number` and does not depend on
        lengths on the host (no penalties), so that no new inputs are needed."""
        return self._known[0].number == number and not self._known[0].needs.any_penalty

    def drafting(self, width: int) -> Callable[[mx.array, mx.array], mx.array]:
        """Return `draw(logits [B, V], positions int32[B]) -> int32[B]` for the B requests of the
        last sampling, which had `width` rows of each. It uses their temperature, cut-offs and
        noise, without penalties, biases, XTC and masks. Queues only."""
        state_at = self.state_of_requests(width)

        def draw(logits: mx.array, positions: mx.array) -> mx.array:
            return self._sampler.sample(logits, state_at(positions)).token_ids

        return draw

    def ranking(self, width: int) -> Callable[[mx.array, mx.array, int], tuple[mx.array, mx.array]]:
        """Return `rank(logits [B * b, V], positions int32[B], count)`: the result of
        `Sampler.leaders` for b rows of each request, int32 and float32 [B * b, count], with the
        sampling of `drafting`. Queues only."""
        state_at = self.state_of_requests(width)

        def rank(logits: mx.array, positions: mx.array, count: int) -> tuple[mx.array, mx.array]:
            each = logits.shape[0] // max(positions.shape[0], 1)
            return self._sampler.leaders(logits, state_at(positions, each), count)

        return rank

    def state_of_requests(self, width: int) -> Callable[..., SamplingState]:
        """Return `state_at(positions int32[B], each=1)`: the sampling state of the last sampling,
        which had `width` rows of each request, with `each` rows, at these positions; without
        penalties, biases, XTC and masks."""
        host, parts = self._known
        needs = replace(host.needs, any_penalty=False, any_bias=False, any_xtc=False, top_logprobs=None)
        own = {name: parts[name][::width] for name in ROW_FIELDS if name in parts}

        def state_at(positions: mx.array, each: int = 1) -> SamplingState:
            if each == 1:
                return place_state(needs, positions, own)
            rows = {name: mx.repeat(part, each, axis=0) for name, part in own.items()}
            return place_state(needs, mx.repeat(positions, each), rows)

        return state_at

    @property
    def is_penalised(self) -> bool:
        """Whether the last sampling used penalties, which depend on the text so far."""
        return self._known[0].needs.any_penalty

    def make_history(self, state: DeviceState) -> None:
        """Allocate the history in `state` (zeros) if it is not there, even if sampling does not
        need it."""
        self._history(state)

    def _take(self, inputs: SamplingInputs, arrived: Arrays) -> tuple[BatchSampling, Arrays]:
        if inputs.new is not None:
            self._known = inputs.new, arrived
        return self._known

    def _draw(
        self, logits: mx.array, positions: mx.array, arrived: Arrays, history: mx.array | None
    ) -> SampledTokens[mx.array]:
        return self._sampler.sample(logits, self._state(positions, arrived, history))

    def _state(self, positions: mx.array, arrived: Arrays, history: mx.array | None) -> SamplingState:
        host, parts = self._known
        placed = place_state(host.needs, positions, parts, history=history, masks=_masks(arrived))
        return replace(placed, changes=place_changes(arrived))

    def _history(self, state: DeviceState) -> mx.array:
        if state.history is None:
            state.history = mx.zeros(self._history_shape, mx.int32)
        return state.history

    def _history_of(
        self, slots: mx.array, positions: mx.array, batch: ScheduleBatch, rows: RowPlan, state: DeviceState
    ) -> mx.array:
        """Return int32 [N, longest]: the tokens so far of the requests at `slots` [N]. Penalties
        count them anew in each step, so that no token is counted twice.

        Each request's newest token, an input of this step, is written to the history at positions -
        1 first. Nothing else reads the table afterwards, so that the next step can write in place.
        """
        history = self._history(state)
        history[slots, positions - 1] = resolve_ids(batch.input_ids[last_tokens(batch, rows)], state.last)
        return history[slots, : self._known[0].longest(batch, rows)]


def _masks(arrived: Arrays) -> Masks[mx.array] | None:
    return Masks(arrived["mask_rows"], arrived["masks"]) if "masks" in arrived else None
