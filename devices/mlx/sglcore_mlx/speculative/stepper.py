"""The stepper with speculation: a decode step is one forward over each request's last token and its
draft tokens.

A draft token is accepted if it equals the token that the target draws at its position, so the text
is the same as without speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import mlx.core as mx

from sglcore.sampling.state import SampledTokens
from sglcore.step.emitting_rows import RowPlan
from sglcore.step.hidden_rows import HiddenRows, hidden_rows
from sglcore.step.sampling_arrays import NO_INPUTS, SamplingInputs
from sglcore.step.sizing import MemorySizes
from sglcore.step.step_output import StepOutput
from sglcore.step.verification_rows import WideRows, most_lens, wide_rows, widen
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.attention.contract import DecodeAttention
from sglcore_mlx.forward_batch import States
from sglcore_mlx.inputs import bucket, row_bucket, wide_inputs
from sglcore_mlx.models.contract import Model
from sglcore_mlx.pool import DeviceState
from sglcore_mlx.speculative.ngram import propose
from sglcore_mlx.speculative.verify import NONE, Drafts, Placed, Runs, accept, make_drafts, padded, place
from sglcore_mlx.stepper import Launched, Stepper, hidden_arrays


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of draft tokens per request: `verified` by a step, and `made` for the next step."""

    verified: int
    made: int


Drafter: TypeAlias = Callable[[mx.array, mx.array, int], mx.array]
"""`drafter(known int32[R, M], last int32[R], tokens) -> int32[R, tokens]`, as `ngram.propose`."""


Verify: TypeAlias = Callable[..., tuple[list[mx.array], list[mx.array], list[list[mx.array]], list[mx.array]]]
"""A `DecodeForward.rows_to_verify`, perhaps compiled."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The requests of a verification: `slots` and `limits` int32[B] (request slot, and KV slots in
    its pages), and `most`, the largest number of valid KV slots that one of them can have after it.
    """

    slots: mx.array
    limits: mx.array
    most: int

    @property
    def count(self) -> int:
        """B, the number of requests."""
        return self.slots.shape[0]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A forward of the target over N tokens of each of B requests, padded to P requests."""

    logits: mx.array
    """float32 [B * N, V]."""
    hidden: mx.array
    """[P * N, H]: the target's hidden states, followed by features if it returns some."""
    fields: dict[str, mx.array]
    """The inputs by field, [P * N] each."""
    page_table: mx.array
    """int32[P, n]: the pages of each request."""
    limits: mx.array
    """int32[P]: KV slots in the pages of each request."""
    rows: Rows
    """The B requests."""
    placed: Placed
    """The tokens of P requests."""
    path: str
    """The name of the path that ran."""
    states: list[States]
    """The recurrent states before the tokens, by layer."""
    inputs: list[list[mx.array]]
    """The inputs of each layer's recurrence."""
    before: mx.array | None
    """[P * N, H]: the hidden states before the last norm, if requested."""
    wanted: HiddenRows | None
    """The rows of hidden states to return. None: none are requested."""
    entries: list[mx.array]
    """The KV entries of the tokens, [P * N, *entry] by layer, if they are kept."""

    @property
    def ends(self) -> mx.array:
        """int32[B * N]: the position in its text of the token after each token."""
        return self.placed.first(self.rows.count).ends


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a verification, as chains with the same number of tokens for each request."""

    found: Forwarded
    """The forward, reduced to the tokens of the chains; its logits are still all."""
    plan: RowPlan
    """The rows of the chains, which emit."""
    sampled: SampledTokens[mx.array]
    """The token after each token of B requests."""
    runs: Runs
    """What was accepted."""
    width: int
    """The number of tokens of each request in the sampling."""


class SpeculativeStepper(Stepper):
    """A stepper that drafts by n-grams of the request's own text (`drafter`), unless the host
    provides draft tokens, and verifies them in the next decode step. Decode requests have up to
    `tokens` draft tokens each; prompts run as without speculation."""

    _more_rows = 0
    """Tokens of a request that a drafter's forward has in addition to those that are verified."""

    def __init__(
        self,
        model: Model,
        attention: DecodeAttention,
        state: DeviceState,
        sizes: MemorySizes,
        *,
        tokens: int,
        **options: Any,
    ) -> None:
        """`tokens`: the most draft tokens of a request; `options`: the keyword arguments of
        `Stepper`."""
        super().__init__(model, attention, state, sizes, **options)
        self.drafter: Drafter = propose
        self._tokens = tokens
        self._counts = Counts(tokens, tokens)
        self._wide: WideRows | None = None
        self._verifies: dict[int, Verify] = {}
        advanced = self._forward.advanced
        self._advanced = mx.compile(advanced) if self._compiles else advanced
        state.drafts = make_drafts(sizes.max_requests, tokens)
        self._sampling.make_history(state)
        mx.eval(state.arrays())

    def launch_with(self, counts: Counts, batch: ScheduleBatch) -> Launched:
        """Launch a step, as `launch` does; `counts`: the draft tokens per request that this step
        verifies and makes."""
        self._counts = counts
        return self.launch(batch)

    def _generate(self, batch: ScheduleBatch) -> StepOutput[mx.array]:
        return self._verify(batch) if batch.forward_mode.is_decode else self._extend(batch)

    def _extend(self, batch: ScheduleBatch) -> StepOutput[mx.array]:
        """Run a prefill step, then draft for the requests with a complete prompt. Return the step's
        output."""
        output, slots = self._prefill(batch)[0], mx.array(batch.slots)
        assert output.tokens is not None
        self._drafts.lengths[slots] = mx.array(batch.seq_lens)
        lengths, roots = output.rows.select(batch.seq_lens), output.tokens.token_ids
        if len(lengths):
            emitting = mx.array(output.rows.select(batch.slots))
            self._propose(emitting, mx.array(lengths), roots, int(lengths.max()))
        output.drafts = self._told(batch, slots)
        return output

    def _verify(self, batch: ScheduleBatch) -> StepOutput[mx.array]:
        """Run a decode step: verify each request's draft tokens, then draft for the next step.
        Return the step's output."""
        width = self._counts.verified + 1
        self._table.append(batch)
        wide = self._widened(batch, width)
        is_steady = batch.masks is None and self._sampling.is_steady(wide.number)
        many = batch if is_steady else widen(batch, wide)
        inputs = NO_INPUTS if is_steady else self._sampling.inputs(many, wide.plan)
        arrived = {name: mx.array(values) for name, values in inputs.arrays.items()}
        found = self._run(batch, width)
        made = self._decide(many, wide.plan, found, inputs, arrived)
        found, runs = made.found, made.runs
        self._advance(batch, found, runs)
        self._follow(made)
        drafts = self._told(batch, found.rows.slots)
        counts, captured = (runs.accepted, runs.proposed), self._read_back(found.wanted, found.hidden, found.before)
        return StepOutput(made.plan, found.path, made.sampled, runs=counts, drafts=drafts, hidden=captured)

    def _decide(
        self,
        batch: ScheduleBatch,
        plan: RowPlan,
        found: Forwarded,
        inputs: SamplingInputs,
        arrived: Mapping[str, mx.array],
    ) -> Verified:
        """Sample after each token, and accept draft tokens. `batch`, `plan`, `inputs` and `arrived`
        are of the sampling, with one row for each token."""
        sampled = self._sampling.verify(batch, plan, found.logits, inputs, arrived, self._state, found.ends)
        runs = self._accept(sampled, found.rows, found.placed.first(found.rows.count))
        return Verified(found, plan, sampled, runs, found.placed.ids.shape[1])

    def _advance(self, batch: ScheduleBatch, found: Forwarded, runs: Runs) -> None:
        """Advance the recurrent states by the accepted tokens."""
        if found.states:
            lens = padded(runs.accepted + 1, found.placed.ids.shape[0])
            self._state.states.leave(batch, self._advanced(found.states, found.inputs, lens))

    def _follow(self, made: Verified) -> None:
        """Draft after a verification."""
        rows = made.found.rows
        self._propose(rows.slots, made.runs.lengths, made.runs.roots, rows.most)

    def _steps_of(self, width: int) -> int:
        """Return how many rows of each request a `Verified` has after a step of `width` rows: all
        of them; with draft trees, those of one path.
        """
        return width

    def _more_fields(self, placed: Placed, slots: mx.array) -> dict[str, mx.array]:
        """Return further fields of a verification of these tokens, of the request slots
        int32[P]."""
        return {}

    def _verify_for(self, num_hidden: int) -> Verify:
        """As `_decode_for`, for several tokens of each request; it returns hidden states after the
        last norm even if `num_hidden` is 0."""
        num_hidden = max(num_hidden, 1)
        if num_hidden not in self._verifies:
            rows = replace(self._forward, num_hidden=num_hidden).rows_to_verify
            self._verifies[num_hidden] = mx.compile(rows) if self._compiles else rows
        return self._verifies[num_hidden]

    def _run(self, batch: ScheduleBatch, width: int) -> Forwarded:
        """Run the target over `width` tokens of each request. Writes the tokens to the history
        before anything reads it, so that MLX writes in place."""
        count, state, table = batch.batch_size, self._state, self._table
        wanted = hidden_rows(batch, self._steps_of(width))
        verify = self._verify_for(hidden_arrays(batch, wanted))
        most = int(most_lens(batch, width + self._more_rows).max())
        pages = bucket(-(-most // table.page_size), table.rows.shape[1])
        size = row_bucket(count, self._row_buckets, self._max_requests) if self._compiles else count
        given = wide_inputs(self._batch_type, batch, table, size, pages, width)
        slots, limits, page_table = mx.array(given.slots), mx.array(given.limits), mx.array(given.page_table)
        if batch.proposals is not None:
            self._take_proposals(slots[:count], mx.array(batch.proposals))
        placed = self._place(slots, limits, None if given.nodes is None else mx.array(given.nodes), width)
        state.made_history[placed.owners, placed.positions] = placed.ids
        fields = {name: mx.array(values) for name, values in given.fields.items()}
        fields |= placed.fields(page_table, table.page_size) | self._more_fields(placed, slots)
        states = state.states.take(batch, size)
        outputs, state.cells, inputs, entries = verify(fields, page_table, state.cells, states, state.take_moved())
        logits, hidden, *before = outputs
        path = f"compiled:{size}x{width}" if self._compiles else "eager"
        rows = Rows(slots[:count], limits[:count], most)
        return Forwarded(
            logits[: count * width],
            hidden,
            fields,
            page_table,
            limits,
            rows,
            placed,
            path,
            states,
            inputs,
            before[0] if before else None,
            wanted,
            entries,
        )

    def _widened(self, batch: ScheduleBatch, width: int) -> WideRows:
        number = batch.composition * (self._tokens + 2) + width
        if self._wide is None or self._wide.number != number:
            self._wide = wide_rows(batch, width, number)
        return self._wide

    def _take_proposals(self, slots: mx.array, given: mx.array) -> None:
        """Replace our draft tokens at the request slots [B] with the host's, given int32 [B, k],
        for requests where it has some (its first is not negative)."""
        table = self._drafts.proposals
        table[slots] = mx.where(given[:, :1] < 0, table[slots], given)

    def _place(self, slots: mx.array, limits: mx.array, nodes: mx.array | None, width: int) -> Placed:
        return place(self._state.last, self._drafts, slots, limits, nodes, width)

    def _accept(self, sampled: SampledTokens[mx.array], rows: Rows, placed: Placed) -> Runs:
        """Accept draft tokens, update lengths and last tokens of the request slots for the next
        step, and return what was accepted."""
        runs = accept(sampled.token_ids.reshape(placed.ids.shape), placed, self._drafts, rows.slots, rows.limits)
        self._drafts.lengths[rows.slots] = runs.lengths
        self._state.last[rows.slots] = runs.roots
        return runs

    def _propose(self, slots: mx.array, lengths: mx.array, roots: mx.array, most: int) -> None:
        """Write draft tokens for the next step to the table at `slots` [B], for texts with lengths
        int32 [B] (at most `most`), followed by roots int32 [B], tokens that are not in the history
        yet."""
        tokens, table = self._counts.made, self._drafts.proposals
        table[slots] = NONE
        if not tokens:
            return
        places = mx.arange(most + 1, dtype=mx.int32)[None]
        known = self._state.made_history[slots, : most + 1]
        known = mx.where(places == lengths[:, None], roots[:, None], known)
        table[slots, :tokens] = self.drafter(known, lengths, tokens)

    def _told(self, batch: ScheduleBatch, slots: mx.array) -> mx.array | None:
        """Return the next draft tokens int32[B, k] if the host needs them for masks, else None."""
        return None if batch.masks is None else self._drafts.proposals[slots]

    @property
    def _drafts(self) -> Drafts:
        assert self._state.drafts is not None
        return self._state.drafts

    def close(self) -> None:
        """Wait for the running step and release compiled functions, as `Stepper.close`; call it on
        the stream thread."""
        super().close()
        del self._verifies, self._advanced
