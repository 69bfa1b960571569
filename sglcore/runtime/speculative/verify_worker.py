"""The worker that verifies draft tokens.

It runs one target forward over each request's last token and draft tokens. A draft token is
accepted if it equals the token that the target draws in its place, so the text is the same as
without speculation. Between steps, tables by slot on the device hold the number of valid KV slots
and the draft tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.draft_sampling import DraftSampling
from sglcore.runtime.speculative.drafter import NONE, Drafter, DraftRows, DrawDraft, no_rows
from sglcore.runtime.speculative.target_features import features_of
from sglcore.runtime.staging import StagedArrays
from sglcore.runtime.token_table import TokenTable
from sglcore.runtime.tp_worker import TpModelWorker, read_back
from sglcore.sampling.sampler import SamplingState
from sglcore.sampling.state import SampledTokens
from sglcore.step.draft_length import LengthController, Started, StepTimes
from sglcore.step.emitting_rows import RowPlan, plan_rows
from sglcore.step.hidden_rows import hidden_rows
from sglcore.step.sampling_arrays import NO_INPUTS, SamplingInputs
from sglcore.step.step_output import StepOutput
from sglcore.step.verification_rows import WideRows, node_limits, wide_rows, widen
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """The rows of verification steps, valid as long as the composition is the same.

    `slots` and `limits` int32[B] are the request slots, and the KV slots in the pages of each
    request, on the device; `cell_limits` are the limits on the host.
    """

    composition: int
    cell_limits: NDArray[np.int32]
    slots: Tensor
    limits: Tensor


class Verified(NamedTuple):
    """The result of a verification, as chains with the same number of rows per request.

    Their `batch`, hidden [T, H], the plan of the sampled rows, the sampled tokens, and `runs`
    int32[4, B]. The draw had `width` rows per request. `order` int32[T]: the rows of the step that
    these are (None: all, in order).
    """

    batch: ForwardBatch
    hidden: Tensor
    plan: RowPlan
    sampled: SampledTokens[Tensor]
    runs: Tensor
    width: int
    order: Tensor | None = None


class SpeculativeWorker(TpModelWorker):
    """The worker that runs the target by its runner, and a drafter.

    A decode step verifies up to `limits.draft_tokens` draft tokens per request; `length` chooses
    how many. Prefill works as in the plain worker.
    """

    def __init__(
        self,
        runner: ModelRunner,
        token_table: TokenTable,
        limits: Limits,
        drafter: Drafter,
        feature_size: int | None = None,
        lengths: tuple[int, ...] = (),
        reads_proposals: bool = False,
    ) -> None:
        """`feature_size`: the last elements of each output row of the runner are the drafter's
        features.

        None: all are, and the model's hidden states too. `lengths`: the numbers of draft tokens
        that a step may verify, ascending (empty: always all). `reads_proposals`: the host reads
        draft tokens from shared memory, so that no step is wider than the draft tokens that exist.
        """
        self.drafter = drafter
        self.length = LengthController(lengths or (drafter.tokens,))
        self._times = StepTimes()
        self._feature_size = feature_size
        self._table = token_table
        device, slots = token_table.last.device, limits.max_requests + 1
        # Allocated before the forward stream takes over.
        self._lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self._proposals = torch.full((slots, drafter.tokens), NONE, dtype=torch.int32, device=device)
        self._proposals_here = self._proposals.numpy() if reads_proposals else None
        self._kernels = runner.attn_backend.kernels
        self._wide: WideRows | None = None
        self._rows: VerifiedRows | None = None
        super().__init__(runner, token_table, limits)
        self.draft_sampling = DraftSampling(self.sampling)

    def forward_batch_generation(self, batch: ScheduleBatch) -> Ticket:
        """Queue a prefill or a verification, then the drafting of the next tokens; return the
        step's ticket.
        """
        return self._verify(batch) if batch.forward_mode.is_decode else self._extend(batch)

    def _extend(self, batch: ScheduleBatch) -> Ticket:
        rows, states = plan_rows(batch), self.runner.state_pool
        inputs = self.sampling.inputs(batch, rows)
        wanted, more = hidden_rows(batch), _chunk_arrays(batch, rows)
        staged, arrays = self.stage(batch, inputs, more if wanted is None else {**more, **wanted.arrays})
        assert arrays is not None
        hidden, before, path = self.runner.forward_both(staged)
        if states is not None:
            states.copy_out(arrays.arrived)
        tokens, prompt = self.sampling.run(batch, staged, rows, hidden, inputs, arrays.arrived)
        self._advance_prompts(batch, staged, rows, hidden, arrays.arrived)
        given = read_back(wanted, arrays.arrived, self._states_of(hidden), before)
        hisparse = self.runner.attn_backend.hisparse
        swaps = None if hisparse is None else hisparse.count(batch)
        drafts = self._drafts(batch, staged.req_pool_indices)
        output = StepOutput(rows, path, tokens, prompt, hidden=given, drafts=drafts, swaps=swaps)
        return self.issue(batch, staged, arrays, output)

    def _advance_prompts(
        self, batch: ScheduleBatch, staged: ForwardBatch, rows: RowPlan, hidden: Tensor, arrived: Mapping[str, Tensor]
    ) -> None:
        assert batch.cell_limits is not None
        every = staged.req_pool_indices
        self._lengths.scatter_(0, every, staged.seq_lens)
        following = torch.where(arrived["next_ids"] < 0, self._table.last.index_select(0, every), arrived["next_ids"])
        ids = staged.input_ids.roll(-1)
        ids.scatter_(0, arrived["ends"], following)
        lengths, slots = arrived["positions"], arrived["emitting_slots"]
        drawn = DraftRows(
            staged,
            1,
            ids,
            features_of(hidden, self._feature_size),
            arrived["last"],
            slots,
            lengths,
            arrived["emitting_limits"],
            rows.select(batch.seq_lens),
            rows.select(batch.cell_limits),
            self._drafting(1, slots, lengths),
            self._wanted(batch),
            self._history,
            self._is_chain(batch),
            self.draft_sampling.ranking(1, lengths),
            arrived["begins"],
            bool(batch.page_counts.any()),
        )
        self._propose(drawn)

    def _verify(self, batch: ScheduleBatch) -> Ticket:
        begin, planned, width = time.perf_counter(), self.length.tokens, self._verified(batch) + 1
        wide = self._widened(batch, width)
        is_steady = batch.masks is None and self.sampling.is_steady(wide.number)
        many = batch if is_steady else widen(batch, wide)
        inputs = NO_INPUTS if is_steady else self.sampling.inputs(many, wide.plan)
        wanted = hidden_rows(batch, self._steps_of(width))
        arrays = self._arrays(batch, inputs, width, {} if wanted is None else wanted.arrays)
        staged = self.runner.init_batch(batch, arrays, width)
        rows = self._rows_of(batch, arrays.arrived)
        if (given := arrays.arrived.get("proposals")) is not None:
            replace_proposals(self._proposals, rows.slots, given)
        self._place(staged, rows, arrays.arrived.get("node_limits"))
        # A single row is always accepted, and its state advances in the forward.
        states = None if width == 1 else self.runner.state_pool
        if states is not None:
            runs = states.runs(staged.req_pool_indices, width)
            staged.run_slots, staged.run_targets, staged.run_lens, staged.run_rows = runs
        if self.sampling.looks_back(inputs):
            self._table.admit_history(staged.req_pool_indices, staged.positions, staged.input_ids)
        hidden, before, path = self.runner.forward_both(staged)
        logits = self.runner.logits(hidden, None)
        state = self.sampling.state(many, wide.plan, inputs, arrays.arrived, self._ends(staged))
        found = self._decided(batch, staged, rows, hidden, logits, state, wide.plan)
        before = before if before is None or found.order is None else before.index_select(0, found.order)
        given = read_back(wanted, arrays.arrived, self._states_of(found.hidden), before)
        hisparse = self.runner.attn_backend.hisparse
        swaps = None if hisparse is None else hisparse.count(batch, width)
        runs = found.runs[0], found.runs[1]
        output = StepOutput(found.plan, path, found.sampled, runs=runs, hidden=given, swaps=swaps)
        self.length.choose(batch.batch_size)
        is_same = self.length.tokens == planned
        self._times.begin(Started(batch.step, batch.batch_size, width - 1, begin, is_same))
        # The host continues while the drafter runs, unless it needs the draft tokens for masks.
        ticket = self.issue(batch, staged, arrays, output) if batch.masks is None else None
        if states is not None:
            states.take_in(staged.req_pool_indices, found.runs[0] + 1, width)
        self._advance_verified(batch, rows, found)
        if ticket is None:
            output.drafts = self._drafts(batch, rows.slots)
            ticket = self.issue(batch, staged, arrays, output)
        return ticket

    def _states_of(self, hidden: Tensor) -> Tensor:
        """Return the model's hidden states [T, H] in a forward's output, without features of the
        drafter.
        """
        return hidden if self._feature_size is None else hidden[:, : -self._feature_size]

    def _steps_of(self, width: int) -> int:
        """Return how many rows of each request a `Verified` has after a step of `width` rows: all
        of them; with draft trees, those of one path.
        """
        return width

    def _arrays(
        self, batch: ScheduleBatch, inputs: SamplingInputs, width: int, more: Mapping[str, NDArray]
    ) -> StagedArrays:
        """Return the host arrays of a verification that the device does not have yet, those of
        `inputs` and of `more` included.
        """
        assert batch.cell_limits is not None
        sent, known = {**inputs.arrays, **more}, self._rows
        is_new = (
            known is None
            or known.composition != batch.composition
            or not np.array_equal(known.cell_limits, batch.cell_limits)
        )
        if is_new:
            sent |= {"verified_slots": batch.slots, "cell_limits": batch.cell_limits}
        if (nodes := node_limits(batch, width)) is not None:
            sent["node_limits"] = nodes
        if batch.proposals is not None:
            sent["proposals"] = batch.proposals
        return StagedArrays(sent, lasting=is_new or inputs.new is not None)

    def _rows_of(self, batch: ScheduleBatch, arrived: Mapping[str, Tensor]) -> VerifiedRows:
        if "verified_slots" in arrived:
            assert batch.cell_limits is not None
            on_device = arrived["verified_slots"], arrived["cell_limits"]
            self._rows = VerifiedRows(batch.composition, batch.cell_limits, *on_device)
        assert self._rows is not None
        return self._rows

    def _wanted(self, batch: ScheduleBatch) -> int:
        """Return the number of draft tokens per request that this step makes."""
        return self.length.tokens if batch.step_plan is None else batch.step_plan.proposed

    def _verified(self, batch: ScheduleBatch) -> int:
        """Return the number of draft tokens per request that this step verifies.

        With data-parallel shards it comes from the plan, because a shard sees only its own.
        """
        if batch.step_plan is not None:
            return batch.step_plan.verified
        tokens = self.length.tokens
        if self._proposals_here is None or not tokens:
            return tokens
        proposed = self._proposals_here[batch.slots] != NONE
        if batch.proposals is not None:
            proposed |= batch.proposals != NONE
        return min(tokens, self.length.fitting(int(proposed.any(0).sum())))

    def _widened(self, batch: ScheduleBatch, width: int) -> WideRows:
        number = batch.composition * (self.drafter.tokens + 2) + width
        if self._wide is None or self._wide.number != number:
            self._wide = wide_rows(batch, width, number)
        return self._wide

    def _drafts(self, batch: ScheduleBatch, slots: Tensor) -> Tensor | None:
        """Return the next draft tokens int32[B, k] of the request slots `slots` int32[B] if the
        host needs them to make masks, otherwise None.
        """
        return None if batch.masks is None else self._proposals.index_select(0, slots)

    def _place(self, staged: ForwardBatch, rows: VerifiedRows, nodes: Tensor | None) -> None:
        """Place each token of a request by the tables of its slot.

        A token without a KV slot, or without a mask that it needs, goes to slot 0.
        """
        tables = self._table.last, self._lengths, self._proposals
        inputs = staged.input_ids, staged.positions, staged.seq_lens, staged.req_pool_indices
        self._kernels.place_proposals(*tables, rows.slots, rows.limits, nodes, *inputs)

    def _is_chain(self, batch: ScheduleBatch) -> bool:
        """Return whether the next draft must be a chain.

        So it is if sampling depends on earlier rows, by penalties or masks. This holds for all
        steps of such a request, so that none of its draft tokens are siblings.
        """
        return batch.masks is not None or self.sampling.is_penalised

    def _ends(self, staged: ForwardBatch) -> Tensor:
        """Return int32[B * N]: the position in its text of the token drawn for each row."""
        return staged.seq_lens

    def _decided(
        self,
        batch: ScheduleBatch,
        staged: ForwardBatch,
        rows: VerifiedRows,
        hidden: Tensor,
        logits: Tensor,
        state: SamplingState,
        plan: RowPlan,
    ) -> Verified:
        """Sample after each row, from logits float[B * N, V], and count accepted tokens."""
        sampled, runs = self._decide(staged, rows, logits, state)
        return Verified(staged, hidden, plan, sampled, runs, staged.num_tokens // max(batch.batch_size, 1))

    def _decide(
        self, staged: ForwardBatch, rows: VerifiedRows, logits: Tensor, state: SamplingState
    ) -> tuple[SampledTokens[Tensor], Tensor]:
        """Return the sampled tokens of B * N rows and `runs` int32[4, B], as in the kernel
        `accept_proposals`.

        Also updates the tables for the next step. Logits are float[B * N, V].
        """
        sampled = self.sampling.sampler.sample(logits, state)
        return sampled, self._accept(staged, rows, sampled)

    def _drafting(self, width: int, slots: Tensor, lengths: Tensor) -> DrawDraft:
        """Return the draw function for draft tokens of the requests in slots int32[R].

        Their roots are at lengths int32[R]. The step had `width` rows per request.
        """
        return self.draft_sampling.drafting(width, lengths)

    def _accept(self, staged: ForwardBatch, rows: VerifiedRows, sampled: SampledTokens[Tensor]) -> Tensor:
        runs = torch.empty(4, rows.slots.shape[0], dtype=torch.int32, device=rows.slots.device)
        tables = self._table.last, self._lengths, self._proposals
        drawn = sampled.token_ids, staged.req_pool_indices
        self._kernels.accept_proposals(*drawn, rows.slots, rows.limits, *tables, runs)
        return runs

    def _advance_verified(
        self,
        batch: ScheduleBatch,
        rows: VerifiedRows,
        found: Verified,
    ) -> None:
        select, lengths = found.runs[2], found.runs[3]
        if self._history is not None:
            self._table.admit_history(rows.slots, lengths, self._table.last.index_select(0, rows.slots))
        drafted = DraftRows(
            found.batch,
            found.batch.num_tokens // max(batch.batch_size, 1),
            found.sampled.token_ids,
            features_of(found.hidden, self._feature_size),
            select,
            rows.slots,
            lengths,
            rows.limits,
            batch.seq_lens,
            rows.cell_limits,
            self._drafting(found.width, rows.slots, lengths),
            self._wanted(batch),
            self._history,
            self._is_chain(batch),
            self.draft_sampling.ranking(found.width, lengths),
        )
        self._propose(drafted)

    def forward_idle(self, batch: ScheduleBatch) -> Ticket:
        """Run every forward of the step without rows, of the target and of the drafter, because
        other data-parallel shards wait for them; return the step's ticket.
        """
        staged, hidden, output = self._run_idle(batch)
        features = features_of(hidden, self._feature_size)
        self.drafter.advance(no_rows(staged, features, self._wanted(batch), self._history))
        return self.issue(batch, staged, None, output)

    @property
    def _history(self) -> Tensor | None:
        return self._table.history if self.limits.keeps_history else None

    def _propose(self, rows: DraftRows) -> None:
        found = self.drafter.advance(rows)
        missing = self.drafter.tokens - found.shape[1]
        whole = found if not missing else torch.nn.functional.pad(found, (0, missing), value=NONE)
        self._proposals.index_put_((rows.slots,), whole)

    def collect(self, ticket: Ticket) -> BatchResult:
        """Collect as the plain worker, and record the step's time for `length`."""
        result = super().collect(ticket)
        self._times.end(result, self.length)
        return result

    def close(self) -> None:
        """Close as the plain worker, and close the drafter."""
        if not self._closed:
            super().close()
            self.drafter.close()


def replace_proposals(table: Tensor, slots: Tensor, given: Tensor) -> None:
    """Replace, in place, rows `slots` int32[B] of `table` int32[S, k] by `given` int32[B, k].

    A row does not change if its row of `given` starts with NONE.
    """
    table.index_put_((slots,), torch.where(given[:, :1] < 0, table.index_select(0, slots), given))


def _chunk_arrays(batch: ScheduleBatch, rows: RowPlan) -> dict[str, NDArray]:
    """Return the arrays of a prefill step.

    For each chunk the token after it, its last row, and whether its request is new; for each
    sampled row its slot and limit.
    """
    assert batch.cell_limits is not None
    following = np.full(batch.batch_size, -1, np.int32) if batch.next_ids is None else batch.next_ids
    return {
        "next_ids": following,
        "ends": batch.token_offsets[1:] - np.int32(1),
        "begins": (batch.page_counts == 0).astype(np.int32),
        "emitting_slots": rows.select(batch.slots),
        "emitting_limits": rows.select(batch.cell_limits),
    }
