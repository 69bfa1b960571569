"""The worker that verifies proposals: one forward of the target over each request's last token and what was proposed after it.

A proposal is right when it equals the token that the target draws in its place, so the text is the same as without any. The
state between steps is in tables by slot on the device: how many cells of it are valid, and what is proposed.
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

from sglcore.device.batch import ScheduleBatch
from sglcore.device.draft_length import LengthController, Started, StepTimes
from sglcore.device.worker import BatchResult, Limits, Ticket
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.drafter import NONE, Drafter, DraftRows, DrawDraft, no_rows
from sglcore.runtime.speculative.features import features_of
from sglcore.runtime.staging import StagedArrays
from sglcore.runtime.token_table import TokenTable
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.sampler import SamplingState
from sglcore.sampling.state import SampledTokens
from sglcore.step.output import StepOutput
from sglcore.step.proposals import WideRows, node_limits, wide_rows, widen
from sglcore.step.rows import RowPlan, plan_rows
from sglcore.step.sampling import NO_INPUTS, SamplingInputs


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """The rows of verifications while these stay the same: which `composition` of the host they are, their `slots` and `limits`
    int32[B] on the device, and the limits on the host."""

    composition: int
    cell_limits: NDArray[np.int32]
    slots: Tensor
    limits: Tensor


class Verified(NamedTuple):
    """What a verification came to, as rows that follow one another, the same number of each request: their `batch`, hidden [T, H],
    what they emit, what was drawn for each, and `runs` int32[4, B]. The draw was of `width` rows a request."""

    batch: ForwardBatch
    hidden: Tensor
    plan: RowPlan
    sampled: SampledTokens[Tensor]
    runs: Tensor
    width: int


class SpeculativeWorker(TpModelWorker):
    """Composes the target's runner and a drafter. Decode rows bring up to `limits.draft_tokens` proposals, as `length` has it, prompts
    as always."""

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
        """`feature_size`: of the runner's output, the last so many numbers of each token are the drafter's; None: all are, and
        the model's too. `lengths` are the numbers of proposals that a step may verify, ascending (none: always all).
        `reads_proposals`: the host reads them in their place, so that no step is wider than what was proposed."""
        self.drafter = drafter
        self.length = LengthController(lengths or (drafter.tokens,))
        self._times = StepTimes()
        self._feature_size = feature_size
        self._table = token_table
        device, slots = token_table.last.device, limits.max_requests + 1
        # Before the forward stream takes over what was made.
        self._lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self._proposals = torch.full((slots, drafter.tokens), NONE, dtype=torch.int32, device=device)
        self._proposals_here = self._proposals.numpy() if reads_proposals else None
        self._kernels = runner.attn_backend.kernels
        self._wide: WideRows | None = None
        self._rows: VerifiedRows | None = None
        super().__init__(runner, token_table, limits)

    @torch.inference_mode()
    def forward_batch_generation(self, batch: ScheduleBatch) -> Ticket:
        """A prompt's forward, or a verification; then what the drafter proposes next."""
        return self._verify(batch) if batch.forward_mode.is_decode else self._extend(batch)

    def _extend(self, batch: ScheduleBatch) -> Ticket:
        rows, states = plan_rows(batch), self.runner.state_pool
        inputs = self._sampling.inputs(batch, rows)
        more = _chunk_arrays(batch, rows)
        staged, arrays = self._stage(batch, inputs, more if states is None else more | states.changes(batch))
        assert arrays is not None
        hidden, path = self.runner.forward(staged)
        if states is not None:
            states.copy_out(arrays.arrived)
        tokens, prompt = self._sampling.run(batch, staged, rows, hidden, inputs, arrays.arrived)
        self._advance_prompts(batch, staged, rows, hidden, arrays.arrived)
        output = StepOutput(rows, path, tokens, prompt, drafts=self._drafts(batch, staged.req_pool_indices))
        return self._ticket(batch, staged, arrays, output)

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
            self._sampling.ranking(1, lengths),
            arrived["begins"],
            bool(batch.page_counts.any()),
        )
        self._propose(drawn)

    def _verify(self, batch: ScheduleBatch) -> Ticket:
        begin, planned, width = time.perf_counter(), self.length.tokens, self._verified(batch) + 1
        wide = self._widened(batch, width)
        is_steady = batch.masks is None and self._sampling.is_steady(wide.number)
        many = batch if is_steady else widen(batch, wide)
        inputs = NO_INPUTS if is_steady else self._sampling.inputs(many, wide.plan)
        arrays = self._arrays(batch, inputs, width)
        staged = self.runner.init_rows(batch, width, arrays)
        rows = self._rows_of(batch, arrays.arrived)
        if (given := arrays.arrived.get("proposals")) is not None:
            replace_proposals(self._proposals, rows.slots, given)
        self._place(staged, rows, arrays.arrived.get("node_limits"))
        # A row alone is right, and its state goes on at once.
        states = None if width == 1 else self.runner.state_pool
        if states is not None:
            runs = states.runs(staged.req_pool_indices, width)
            staged.run_slots, staged.run_targets, staged.run_lens, staged.run_rows = runs
        if self._sampling.looks_back(inputs):
            self._table.admit_history(staged.req_pool_indices, staged.positions, staged.input_ids)
        hidden, path = self.runner.forward(staged)
        logits = self.runner.logits(hidden, None)
        state = self._sampling.state(many, wide.plan, inputs, arrays.arrived, self._ends(staged))
        found = self._decided(batch, staged, rows, hidden, logits, state, wide.plan)
        output = StepOutput(found.plan, path, found.sampled, runs=(found.runs[0], found.runs[1]))
        self.length.choose(batch.batch_size)
        is_same = self.length.tokens == planned
        self._times.begin(Started(batch.step, batch.batch_size, width - 1, begin, is_same))
        # The host goes on while proposals are made, unless it waits for them too.
        ticket = self._ticket(batch, staged, arrays, output) if batch.masks is None else None
        if states is not None:
            states.take_in(staged.req_pool_indices, found.runs[0] + 1, width)
        self._advance_verified(batch, rows, found)
        if ticket is None:
            output.drafts = self._drafts(batch, rows.slots)
            ticket = self._ticket(batch, staged, arrays, output)
        return ticket

    def _arrays(self, batch: ScheduleBatch, inputs: SamplingInputs, width: int) -> StagedArrays:
        """What the device does not have yet."""
        assert batch.cell_limits is not None
        sent, known = dict(inputs.arrays), self._rows
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
        """How many proposals of each request this step makes."""
        return self.length.tokens if batch.step_plan is None else batch.step_plan.proposed

    def _verified(self, batch: ScheduleBatch) -> int:
        """How many proposals of each request this step verifies. Of shards each would see only what it has itself."""
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
        """int32[B, k]: what is proposed next, where the host makes masks along it."""
        return None if batch.masks is None else self._proposals.index_select(0, slots)

    def _place(self, staged: ForwardBatch, rows: VerifiedRows, nodes: Tensor | None) -> None:
        """Where each token of a request is to go, by the tables of its slot; one without a cell, or without a mask that it
        needs, goes to slot 0."""
        tables = self._table.last, self._lengths, self._proposals
        inputs = staged.input_ids, staged.positions, staged.seq_lens, staged.req_pool_indices
        self._kernels.place_proposals(*tables, rows.slots, rows.limits, nodes, *inputs)

    def _is_chain(self, batch: ScheduleBatch) -> bool:
        """What is proposed after a step must be a chain: what is drawn for a row depends on those before it, or has a mask that does. All
        steps of such a request are of this kind, so that none of its proposals is another's sibling."""
        return batch.masks is not None or self._sampling.is_penalised

    def _ends(self, staged: ForwardBatch) -> Tensor:
        """int32[B * N]: the number of the token that is drawn for each row, in its text."""
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
        """The tokens after the rows of a step, from logits float[B * N, V], and how many of each request are right."""
        sampled, runs = self._decide(staged, rows, logits, state)
        return Verified(staged, hidden, plan, sampled, runs, staged.num_tokens // max(batch.batch_size, 1))

    def _decide(
        self, staged: ForwardBatch, rows: VerifiedRows, logits: Tensor, state: SamplingState
    ) -> tuple[SampledTokens[Tensor], Tensor]:
        """The token after each of B * N, from logits float[B * N, V], and int32[4, B], the `runs` of the table's
        `accept_proposals`; the tables are those of the next step from here on."""
        sampled = self._sampling.sampler.sample(logits, state)
        return sampled, self._accept(staged, rows, sampled)

    def _drafting(self, width: int, slots: Tensor, lengths: Tensor) -> DrawDraft:
        """What draws the proposals of requests in slots int32[R] with roots at lengths int32[R], of a step of `width` rows each."""
        return self._sampling.drafting(width, lengths)

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
            self._sampling.ranking(found.width, lengths),
        )
        self._propose(drafted)

    @torch.inference_mode()
    def forward_idle(self, batch: ScheduleBatch) -> Ticket:
        """Of every forward of the step one of no rows, of the target and of what proposes."""
        staged, hidden, output = self._run_idle(batch)
        features = features_of(hidden, self._feature_size)
        self.drafter.advance(no_rows(staged, features, self._wanted(batch), self._history))
        return self._ticket(batch, staged, None, output)

    @property
    def _history(self) -> Tensor | None:
        return self._table.history if self.limits.keeps_history else None

    def _propose(self, rows: DraftRows) -> None:
        found = self.drafter.advance(rows)
        missing = self.drafter.tokens - found.shape[1]
        whole = found if not missing else torch.nn.functional.pad(found, (0, missing), value=NONE)
        self._proposals.index_put_((rows.slots,), whole)

    def collect(self, ticket: Ticket) -> BatchResult:
        """As the plain worker's."""
        result = super().collect(ticket)
        self._times.end(result, self.length)
        return result

    def close(self) -> None:
        """As the plain worker's, and the drafter's."""
        if not self._closed:
            super().close()
            self.drafter.close()


def replace_proposals(table: Tensor, slots: Tensor, given: Tensor) -> None:
    """Rows `slots` int32[B] of table int32[S, k] become given int32[B, k], but those of which nothing is given."""
    table.index_put_((slots,), torch.where(given[:, :1] < 0, table.index_select(0, slots), given))


def _chunk_arrays(batch: ScheduleBatch, rows: RowPlan) -> dict[str, NDArray]:
    """What follows each chunk, where it ends and whether its request enters, and of the rows that emit, slots and cells."""
    assert batch.cell_limits is not None
    following = np.full(batch.batch_size, -1, np.int32) if batch.next_ids is None else batch.next_ids
    return {
        "next_ids": following,
        "ends": batch.token_offsets[1:] - np.int32(1),
        "begins": (batch.page_counts == 0).astype(np.int32),
        "emitting_slots": rows.select(batch.slots),
        "emitting_limits": rows.select(batch.cell_limits),
    }
