"""The worker that verifies proposals: one forward of the target over each request's last token and what was proposed after it.

A proposal is right when it equals the token that the target draws in its place, so the text is the same as without any. The
state between steps is in tables by slot on the device: how many cells of it are valid, and what is proposed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.device.worker import BatchResult, Limits, Ticket
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.drafter import NONE, Drafter, DraftRows, DrawDraft
from sglcore.runtime.speculative.features import features_of
from sglcore.runtime.speculative.length import LengthController
from sglcore.runtime.staging import StagedArrays
from sglcore.runtime.token_table import TokenTable
from sglcore.runtime.tp_worker import TpModelWorker, prompt_embeds
from sglcore.sampling.sampler import SamplingState
from sglcore.sampling.state import SampledTokens
from sglcore.step.output import StepOutput
from sglcore.step.proposals import WideRows, node_limits, wide_rows, widen
from sglcore.step.rows import RowPlan, plan_rows


@dataclass(frozen=True, slots=True)
class Verified:
    """A verified step of B requests with N tokens each: `slots`, `lengths` and `limits` int32[B] as they were before, `usable`
    bool[B, N] (the token has a cell of its own), and `proposals` int32[B, N - 1]."""

    slots: Tensor
    lengths: Tensor
    limits: Tensor
    usable: Tensor
    proposals: Tensor


class Started(NamedTuple):
    """A verification of so many proposals of each request, and `time.perf_counter()` when it was submitted. `is_steady`: as many
    are made for the next step."""

    step: int
    requests: int
    tokens: int
    begin: float
    is_steady: bool


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
        self._started = deque[Started]()
        self._last_collect = 0.0
        self._feature_size = feature_size
        self._table = token_table
        device, slots = token_table.last.device, limits.max_requests + 1
        # Before the forward stream takes over what was made.
        self._lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self._proposals = torch.full((slots, drafter.tokens), NONE, dtype=torch.int32, device=device)
        self._proposals_here = self._proposals.numpy() if reads_proposals else None
        self._nodes = torch.arange(drafter.tokens + 1, dtype=torch.int32, device=device)
        self._wide: WideRows | None = None
        super().__init__(runner, token_table, limits)

    @torch.inference_mode()
    def forward_batch_generation(self, batch: ScheduleBatch) -> Ticket:
        """A prompt's forward, or a verification; then what the drafter proposes next."""
        return self._verify(batch) if batch.forward_mode.is_decode else self._extend(batch)

    def _extend(self, batch: ScheduleBatch) -> Ticket:
        rows = plan_rows(batch)
        inputs = self._sampling.inputs(batch, rows)
        sent = {**inputs.arrays, **prompt_embeds(batch), **_chunk_arrays(batch, rows)}
        arrays = StagedArrays(sent, lasting=inputs.new is not None)
        staged = self.runner.init_batch(batch, arrays)
        arrived = arrays.arrived
        if batch.embed_rows is not None:
            staged.input_embeds = self.runner.model.embed_ids(staged.input_ids)
            staged.input_embeds[arrived["embed_rows"]] = arrived["prompt_embeds"].to(staged.input_embeds.dtype)
        hidden, path = self.runner.forward(staged)
        tokens, prompt = self._sampling.run(batch, staged, rows, hidden, inputs, arrived)
        self._advance_prompts(batch, staged, rows, hidden, arrived)
        output = StepOutput(rows, path, tokens, prompt, drafts=self._drafts(batch, staged.req_pool_indices))
        return self._ticket(batch, staged, arrays, output)

    def _advance_prompts(
        self, batch: ScheduleBatch, staged: ForwardBatch, rows: RowPlan, hidden: Tensor, arrived: Mapping[str, Tensor]
    ) -> None:
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
            self._drafting(1, slots, lengths),
            self.length.tokens,
            self._history,
        )
        self._propose(drawn)

    def _verify(self, batch: ScheduleBatch) -> Ticket:
        begin, planned, width = time.perf_counter(), self.length.tokens, self._tokens_of(batch) + 1
        wide = self._widened(batch, width)
        many = widen(batch, wide)
        rows = plan_rows(many)
        inputs = self._sampling.inputs(many, rows)
        assert batch.cell_limits is not None
        sent = {**inputs.arrays, "cell_limits": batch.cell_limits}
        if (nodes := node_limits(batch, width)) is not None:
            sent["node_limits"] = nodes
        arrays = StagedArrays(sent, lasting=inputs.new is not None)
        staged = self.runner.init_batch(many, arrays)
        step = self._place(staged, arrays.arrived, width)
        if self._sampling.looks_back(inputs):
            self._table.admit_history(staged.req_pool_indices, staged.positions, staged.input_ids)
        hidden, path = self.runner.forward(staged)
        logits = self.runner.logits(hidden, None)
        state = self._sampling.state(many, rows, inputs, arrays.arrived, staged.seq_lens)
        sampled, accepted, proposed = self._decide(step, logits, state)
        output = StepOutput(rows, path, sampled, runs=(accepted, proposed))
        self.length.choose(batch.batch_size)
        is_steady = self.length.tokens == planned
        self._started.append(Started(batch.step, batch.batch_size, width - 1, begin, is_steady))
        # The host goes on while proposals are made, unless it waits for them too.
        ticket = self._ticket(batch, staged, arrays, output) if batch.masks is None else None
        self._advance_verified(batch, staged, step, sampled, accepted, hidden)
        if ticket is None:
            output.drafts = self._drafts(batch, step.slots)
            ticket = self._ticket(batch, staged, arrays, output)
        return ticket

    def _tokens_of(self, batch: ScheduleBatch) -> int:
        """How many proposals of each request this step verifies."""
        tokens = self.length.tokens
        if self._proposals_here is None or not tokens:
            return tokens
        proposed = self._proposals_here[batch.slots] != NONE
        return min(tokens, self.length.fitting(int(proposed.any(0).sum())))

    def _widened(self, batch: ScheduleBatch, width: int) -> WideRows:
        number = batch.composition * (self.drafter.tokens + 2) + width
        if self._wide is None or self._wide.number != number:
            self._wide = wide_rows(batch, width, number)
        return self._wide

    def _drafts(self, batch: ScheduleBatch, slots: Tensor) -> Tensor | None:
        """int32[B, k]: what is proposed next, where the host makes masks along it."""
        return None if batch.masks is None else self._proposals.index_select(0, slots)

    def _place(self, staged: ForwardBatch, arrived: Mapping[str, Tensor], width: int) -> Verified:
        """Where each token of a request is to go, by the tables of its slot; one without a cell, or without a mask that it
        needs, goes to slot 0."""
        limits = arrived["cell_limits"]
        every = staged.req_pool_indices.view(-1, width)
        slots = every[:, 0].clone()
        lengths = self._lengths.index_select(0, slots)
        positions = lengths[:, None] + self._nodes[:width]
        usable = positions < limits[:, None]
        if "node_limits" in arrived:
            usable &= self._nodes[:width] < arrived["node_limits"][:, None]
        proposals = self._proposals.index_select(0, slots)[:, : width - 1]
        staged.positions.view(-1, width).copy_(positions.mul_(usable))
        staged.seq_lens.view(-1, width).copy_(positions + 1)
        every.mul_(usable)
        staged.input_ids.view(-1, width)[:, 1:].copy_(proposals.clamp(min=0))
        return Verified(slots, lengths, limits, usable, proposals)

    def _decide(
        self, step: Verified, logits: Tensor, state: SamplingState
    ) -> tuple[SampledTokens[Tensor], Tensor, Tensor]:
        """The token after each of B * N, from logits float[B * N, V]; how many proposals of each request are accepted, int32[B], and
        how many there were."""
        sampled = self._sampling.sampler.sample(logits, state)
        return sampled, *self._accept(step, sampled)

    def _accept(self, step: Verified, sampled: SampledTokens[Tensor]) -> tuple[Tensor, Tensor]:
        """int32[B]: how many proposals of each request are right, up to the first that is not; and how many there were."""
        drawn = sampled.token_ids.view(step.usable.shape)
        is_right = (drawn[:, :-1] == step.proposals) & step.usable[:, 1:]
        accepted = is_right.to(torch.int32).cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
        proposed = ((step.proposals >= 0) & step.usable[:, 1:]).sum(1, dtype=torch.int32)
        return accepted, proposed

    def _drafting(self, width: int, slots: Tensor, lengths: Tensor) -> DrawDraft:
        """What draws the proposals of requests in slots int32[R] with roots at lengths int32[R], of a step of `width` rows each."""
        return self._sampling.drafting(width, lengths)

    def _advance_verified(
        self,
        batch: ScheduleBatch,
        staged: ForwardBatch,
        step: Verified,
        sampled: SampledTokens[Tensor],
        accepted: Tensor,
        hidden: Tensor,
    ) -> None:
        width = step.usable.shape[1]
        select = accepted + torch.arange(
            0, sampled.token_ids.shape[0], width, dtype=torch.int32, device=accepted.device
        )
        roots = sampled.token_ids.index_select(0, select)
        lengths = torch.minimum(step.lengths + accepted + 1, torch.maximum(step.limits, step.lengths))
        self._lengths.scatter_(0, step.slots, lengths)
        self._table.publish(step.slots, roots)
        if self._history is not None:
            self._table.admit_history(step.slots, lengths, roots)
        rows = DraftRows(
            staged,
            width,
            sampled.token_ids,
            features_of(hidden, self._feature_size),
            select,
            step.slots,
            lengths,
            step.limits,
            batch.seq_lens,
            self._drafting(width, step.slots, lengths),
            self.length.tokens,
            self._history,
        )
        self._propose(rows)

    @property
    def _history(self) -> Tensor | None:
        return self._table.history if self.limits.keeps_history else None

    def _propose(self, rows: DraftRows) -> None:
        found = self.drafter.advance(rows)
        missing = self.drafter.tokens - found.shape[1]
        self._proposals[rows.slots] = torch.nn.functional.pad(found, (0, missing), value=NONE)

    def collect(self, ticket: Ticket) -> BatchResult:
        """As the plain worker's. What a step took is the time since it was submitted, or since the one before it was collected:
        nothing waits for it."""
        result = super().collect(ticket)
        now, before = time.perf_counter(), self._last_collect
        self._last_collect = now
        while self._started and self._started[0].step <= result.step:
            started = self._started.popleft()
            if started.step == result.step:
                accepted = np.diff(result.token_offsets) - 1
                seconds = now - max(before, started.begin) if started.is_steady else None
                self.length.learn(started.requests, started.tokens, accepted, seconds)
        return result

    def close(self) -> None:
        """As the plain worker's, and the drafter's."""
        if not self._closed:
            super().close()
            self.drafter.close()


def _chunk_arrays(batch: ScheduleBatch, rows: RowPlan) -> dict[str, NDArray]:
    """What follows each chunk and where it ends, and of the rows that emit, slots and cells."""
    assert batch.cell_limits is not None
    following = np.full(batch.batch_size, -1, np.int32) if batch.next_ids is None else batch.next_ids
    return {
        "next_ids": following,
        "ends": batch.token_offsets[1:] - np.int32(1),
        "emitting_slots": rows.select(batch.slots),
        "emitting_limits": rows.select(batch.cell_limits),
    }
