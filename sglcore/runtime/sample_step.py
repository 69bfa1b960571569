"""From hidden states to tokens: logits of the sampled rows, the draw, and the state kept for the
next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.token_table import TokenTable
from sglcore.sampling.logprobs import logprobs_of
from sglcore.sampling.params_batch import SamplingNeeds
from sglcore.sampling.processors import PenaltyRows, PenaltyState, count_penalties, place_penalties
from sglcore.sampling.sampler import Sampler, SamplingState, place_state
from sglcore.sampling.state import Logprobs, Masks, SampledTokens, place_changes
from sglcore.step.emitting_rows import RowPlan
from sglcore.step.sampling_arrays import NO_SAMPLING, BatchSampling, SamplingInputs, sampling_inputs, score_prompts
from sglcore.worker.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """The sampling parameters of the last draw on the device; `host` is the `BatchSampling` they
    were made from.

    `slots` int[N] are the slots of the sampled rows, `state` is the state of the last draw.
    `penalties` has the rows with penalties, int32[R], their parameters and their slots.
    """

    host: BatchSampling
    slots: Tensor
    state: SamplingState
    penalties: tuple[Tensor, PenaltyRows, Tensor] | None = None


class SampleStep:
    """Runs what follows a runner's forward: computes logits, draws tokens, and stores last tokens
    and history.

    Keeps sampling state as long as the composition is the same.
    """

    def __init__(
        self, runner: ModelRunner, token_table: TokenTable, vocab_size: int, keeps_history: bool = False
    ) -> None:
        """`keeps_history`: store every token in the history, even if its sampling does not use
        it.
        """
        self._keeps_history = keeps_history
        self._runner = runner
        self._table = token_table
        self._vocab_size = vocab_size
        kernels = runner.attn_backend.kernels
        ranks = runner.extensions.ranks
        make = Sampler if ranks is None else ranks.make_sampler
        self.sampler = make(
            vocab_size, token_table.last.device, draw=kernels.draw, greedy=kernels.greedy, is_narrow=runner.is_narrow
        )
        self.known = _nothing(token_table.last.device)
        """The sampling of the last draw."""

    def inputs(self, batch: ScheduleBatch, rows: RowPlan) -> SamplingInputs:
        """Return the host arrays that `run` needs, to be copied with the batch. Host work only."""
        return sampling_inputs(batch, rows, self.known.host.number)

    def run(
        self,
        batch: ScheduleBatch,
        staged: ForwardBatch,
        rows: RowPlan,
        hidden: Tensor,
        inputs: SamplingInputs,
        arrived: Mapping[str, Tensor],
    ) -> tuple[SampledTokens[Tensor], dict[int, Logprobs[Tensor]]]:
        """Sample one token per sampled row of hidden [T, H] and store it in the token table.

        Returns the tokens, and prompt log-probabilities by row. `arrived` are the arrays of
        `inputs` on the device. Does not wait.
        """
        prompt: dict[int, Logprobs[Tensor]] = {}
        if inputs.scored:
            prompt = score_prompts(inputs, arrived, hidden, self._vocab_size, self._score, torch.cat)
        positions, last = staged.seq_lens, None
        if rows.emitting is not None:
            positions, last = arrived["positions"], arrived["last"]
        logits = self._runner.logits(hidden, last)
        sampled = self.sampler.sample(logits, self.state(batch, rows, inputs, arrived, positions))
        slots = self.known.slots
        self._table.publish(slots, sampled.token_ids)
        if self.looks_back(inputs):
            self._table.admit_history(slots, positions, sampled.token_ids)
        return sampled, prompt

    def is_steady(self, number: int) -> bool:
        """Return whether the last draw had the composition `number` and no penalties.

        Such a draw needs no host lengths.
        """
        return self.known.host.number == number and not self.known.host.needs.any_penalty

    def looks_back(self, inputs: SamplingInputs) -> bool:
        """Return whether the history must contain the tokens of this step."""
        host = self.known.host if inputs.new is None else inputs.new
        return self._keeps_history or host.needs.any_penalty

    @property
    def is_penalised(self) -> bool:
        """True if the last draw used penalties, which depend on the text so far."""
        return self.known.host.needs.any_penalty

    def state(
        self,
        batch: ScheduleBatch,
        rows: RowPlan,
        inputs: SamplingInputs,
        arrived: Mapping[str, Tensor],
        positions: Tensor,
    ) -> SamplingState:
        """Return the sampling state for one token per sampled row.

        `positions` int32[N] are their token positions. Keeps the part that later steps of the
        composition reuse.
        """
        known = self.known if inputs.new is None else self._placed(inputs.new, arrived, positions)
        state = known.state
        if state.positions is not positions or known.penalties is not None:
            penalties = self._penalties(known, batch, rows, positions)
            state = replace(state, positions=positions, penalties=penalties)
            known = replace(known, state=state)
        self.known = known
        if "masks" in arrived:
            masks = Masks(arrived["mask_rows"], arrived["masks"])
            state = replace(state, masks=masks, changes=place_changes(arrived))
        return state

    def _placed(self, host: BatchSampling, arrived: Mapping[str, Tensor], positions: Tensor) -> DeviceSampling:
        # A scatter by int32 is converted at each step, so slots are int64 from the start if the
        # device allows it.
        slots = arrived["slots"] if self._runner.is_narrow else arrived["slots"].long()
        state = place_state(host.needs, positions, arrived)
        if not host.needs.any_penalty:
            return DeviceSampling(host, slots, state)
        own = arrived["penalty_rows"]
        return DeviceSampling(host, slots, state, (own, place_penalties(arrived, own), slots.index_select(0, own)))

    def _penalties(
        self, known: DeviceSampling, batch: ScheduleBatch, rows: RowPlan, positions: Tensor
    ) -> PenaltyState | None:
        """Return the penalties of the rows that have some, from the tokens of the history, which
        are counted anew at each step: nothing can be counted twice. None if no row has any.
        """
        if known.penalties is None:
            return None
        own, constant, slots = known.penalties
        history = self._table.history[:, : known.host.longest(batch, rows)].index_select(0, slots)
        return count_penalties(constant, history, positions.index_select(0, own), self._vocab_size)

    def _score(self, hidden: Tensor, targets: Tensor, top_n: int) -> Logprobs[Tensor]:
        return logprobs_of(self._runner.logits(hidden, None), targets, top_n, is_narrow=self._runner.is_narrow)


def _nothing(device: torch.device) -> DeviceSampling:
    none = torch.zeros(0, device=device)
    return DeviceSampling(NO_SAMPLING, none, SamplingState(SamplingNeeds(), none, none, none, none))
