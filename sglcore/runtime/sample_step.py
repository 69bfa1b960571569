"""From hidden states to tokens: which rows emit, their logits, the draw, and what the device remembers of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.device.worker import TokenLogprobs as HostLogprobs
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.token_table import TokenTable
from sglcore.sampling.batch import SamplingBatch
from sglcore.sampling.logprobs import TokenLogprobs, logprobs_of
from sglcore.sampling.processors import PenaltyState, make_penalties
from sglcore.sampling.sampler import SampledTokens, Sampler, SamplingState, make_state

PROMPT_LOGITS_ELEMENTS = 1 << 24
"""Prompt log-probabilities are worked on this many logits at a time, so that long prompts need no vocabulary-sized
memory for every token."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which rows emit: `emitting` int64[N] (None: all B), and the results' `token_offsets` int32[B + 1]."""

    batch_size: int
    emitting: NDArray[np.int64] | None
    token_offsets: NDArray[np.int32]

    def scatter_bad(self, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[B] from the flags bool[N] of the emitting rows."""
        if self.emitting is None:
            return bad
        every = np.zeros(self.batch_size, dtype=bool)
        every[self.emitting] = bad
        return every


def plan_rows(batch: ScheduleBatch) -> RowPlan:
    """Host work only."""
    if batch.forward_mode.is_decode:
        return RowPlan(batch.batch_size, None, batch.token_offsets)
    offsets = np.zeros(batch.batch_size + 1, dtype=np.int32)
    np.cumsum(batch.emits, out=offsets[1:])
    return RowPlan(batch.batch_size, np.flatnonzero(batch.emits), offsets)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens on the device, row for row of the emitting rows, and prompt log-probabilities by row."""

    tokens: SampledTokens
    prompt: dict[int, TokenLogprobs] = field(default_factory=dict)

    def host_tokens(self) -> NDArray[np.int32]:
        """int32[N]. Waits."""
        return self.tokens.token_ids.cpu().numpy()

    def host_bad(self) -> NDArray[np.bool_]:
        """bool[N]. Waits."""
        return self.tokens.bad_rows.cpu().numpy()

    def host_logprobs(self) -> HostLogprobs | None:
        """Along the tokens. Waits."""
        return _to_host(self.tokens.logprobs) if self.tokens.logprobs is not None else None

    def host_prompt_logprobs(self) -> dict[int, HostLogprobs]:
        """By row. Waits."""
        return {row: _to_host(found) for row, found in self.prompt.items()}


class SampleStep:
    """Logits, draw and bookkeeping for one runner. Keeps the device state of the last composition: slots and sampling
    parameters, which are constant while it lasts."""

    def __init__(self, runner: ModelRunner, token_table: TokenTable, vocab_size: int) -> None:
        self._runner = runner
        self._table = token_table
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size, token_table.last.device)
        self._composition = -1
        self._host = SamplingBatch.from_rows([])
        self._state: SamplingState | None = None
        self._slots = token_table.last.new_empty(0, dtype=torch.int64)

    def run(self, batch: ScheduleBatch, staged: ForwardBatch, rows: RowPlan, hidden: Tensor) -> Sampled:
        """Sample one token for each emitting row of hidden [T, H] and publish it. Waits for nothing."""
        prompt = dict(self._score_prompts(batch, hidden)) if batch.prompt_logprobs is not None else {}
        assert staged.req_pool_indices is not None and staged.seq_lens is not None
        slots, positions = staged.req_pool_indices, staged.seq_lens
        if rows.emitting is not None:
            device = hidden.device
            emitting = torch.from_numpy(rows.emitting).to(device)
            slots, positions = slots[emitting], positions[emitting]
            last = torch.from_numpy(batch.token_offsets[1:][rows.emitting].astype(np.int64) - 1).to(device)
            logits = self._runner.logits(hidden, last)
        else:
            logits = self._runner.logits(hidden, None)
        state = self._state_for(batch, rows, slots, positions)
        sampled = self._sampler.sample(logits, state)
        self._table.publish(self._slots, sampled.token_ids)
        if state.needs.any_penalty:
            self._table.append_history(self._slots, positions.long(), sampled.token_ids)
        return Sampled(sampled, prompt)

    def _state_for(self, batch: ScheduleBatch, rows: RowPlan, slots: Tensor, positions: Tensor) -> SamplingState:
        if self._state is None or batch.composition != self._composition:
            assert isinstance(batch.sampling, SamplingBatch)
            host = batch.sampling if rows.emitting is None else batch.sampling.select(rows.emitting)
            penalties = self._penalties(host, batch, rows, slots)
            self._state = make_state(host, positions, penalties)
            self._slots = slots.long()
            self._host, self._composition = host, batch.composition
            return self._state
        if self._state.positions is positions and not self._state.needs.any_penalty:
            return self._state
        penalties = self._penalties(self._host, batch, rows, slots) if self._state.needs.any_penalty else None
        self._state = replace(self._state, positions=positions, penalties=penalties)
        return self._state

    def _penalties(
        self, host: SamplingBatch, batch: ScheduleBatch, rows: RowPlan, slots: Tensor
    ) -> PenaltyState | None:
        """Counts from the history as it is now: nothing is accumulated, so nothing can be counted twice."""
        active = host.penalty_rows()
        if not len(active):
            return None
        host_lens = batch.seq_lens if rows.emitting is None else batch.seq_lens[rows.emitting]
        lengths = host_lens[active]
        history = self._table.history[slots.long()[torch.from_numpy(active).long().to(slots.device)]]
        return make_penalties(
            host,
            history[:, : int(lengths.max())],
            torch.from_numpy(lengths.copy()).to(slots.device),
            self._vocab_size,
        )

    def _score_prompts(self, batch: ScheduleBatch, hidden: Tensor) -> Iterator[tuple[int, TokenLogprobs]]:
        """Each asking row's chunk: token j predicts the prompt token after it; a sampled token is not scored here."""
        assert batch.prompt_logprobs is not None and batch.next_ids is not None
        for row in np.flatnonzero(batch.prompt_logprobs >= 0).tolist():
            start, end = int(batch.token_offsets[row]), int(batch.token_offsets[row + 1])
            targets = np.append(batch.input_ids[start + 1 : end], batch.next_ids[row])
            if targets[-1] < 0:
                targets, end = targets[:-1], end - 1
            wanted = int(batch.prompt_logprobs[row])
            yield row, self._score(hidden[start:end], torch.from_numpy(targets).to(hidden.device), wanted)

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


def _to_host(found: TokenLogprobs) -> HostLogprobs:
    return HostLogprobs(
        found.chosen.cpu().numpy(), found.rank.cpu().numpy(), found.top_ids.cpu().numpy(), found.top.cpu().numpy()
    )
