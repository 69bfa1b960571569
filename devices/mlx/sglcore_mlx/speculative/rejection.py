"""Acceptance rules that keep the distribution of texts, not each token: `rejection` (Leviathan and
others, arXiv 2211.17192) and `block` (Sun and others, arXiv 2403.10444). The results are those of
sglcore/runtime/speculative/rejection.py, with the same random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from sglcore.sampling.state import SampledTokens
from sglcore.step.emitting_rows import RowPlan, plan_rows
from sglcore.step.sampling_arrays import SamplingInputs
from sglcore.step.step_output import StepOutput
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.sampling.logprobs import logprobs_of
from sglcore_mlx.sampling.race import row_keys
from sglcore_mlx.sampling.sampler import Sampler
from sglcore_mlx.sampling.state import SamplingState
from sglcore_mlx.speculative.choice import BLOCK, REJECTION
from sglcore_mlx.speculative.draft_stepper import DraftStepper
from sglcore_mlx.speculative.drafter import Draw
from sglcore_mlx.speculative.stepper import Forwarded, SpeculativeStepper, Verified
from sglcore_mlx.speculative.verify import NONE, Placed, Runs

DRAFTS, COINS = 0x2545F491, 0x6C078965
"""Constants that make the noise of draft tokens, acceptance and target draws independent."""
COIN_BITS = 24


@dataclass(frozen=True, slots=True)
class Chain:
    """Draft tokens of B requests with roots at `lengths` int32[B]. `tokens` int32[B, k]; `offered`
    bool[B, k]: may be accepted (False after the first False). `probs` float32[B, k, V]: the
    distributions they were drawn from; None: they were certain."""

    tokens: mx.array
    offered: mx.array
    lengths: mx.array
    probs: mx.array | None = None

    def probs_at(self, place: mx.array, vocab_size: int) -> mx.array:
        """Return float32[B, V]: the distribution of draft token number `place` int32[B]; zeros
        where no token is offered."""
        last, rows = self.tokens.shape[1] - 1, mx.arange(self.tokens.shape[0])
        within = mx.minimum(place, last)
        if self.probs is None:
            probs = (mx.arange(vocab_size)[None] == self.tokens[rows, within][:, None]).astype(mx.float32)
        else:
            probs = self.probs[rows, within]
        return probs * (self.offered[rows, within] & (place <= last))[:, None]


class Rejection:
    """The rule `rejection`, token by token. Depends only on the requests' seeds, lengths and
    distributions. Queues only."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def verify(self, logits: mx.array, state: SamplingState, chain: Chain) -> tuple[mx.array, mx.array, mx.array]:
        """Return the number of accepted draft tokens int32[B], the token after them int32[B], and
        whether it is bad bool[B], from processed logits float32[B, k + 1, V] and the requests'
        state."""
        coins = draw_coins(state.seed_words, chain.lengths, chain.tokens.shape[1])
        accepted, share = self._accepted(logits, state, chain, coins)
        probs = self.sampler.probabilities(logits[mx.arange(logits.shape[0]), accepted], state)
        rest = self._rest(probs, chain.probs_at(accepted, probs.shape[1]), share)
        weights = mx.where(rest.sum(axis=-1, keepdims=True) > 0, rest, probs)
        tokens, bad = self.sampler.draw_by_weight(weights, state.seed_words, chain.lengths + accepted + 1)
        return accepted, tokens, bad

    def _accepted(
        self, logits: mx.array, state: SamplingState, chain: Chain, coins: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the accepted draft tokens int32[B], and a factor float32[B] of the target's
        distribution where they end."""
        taken: list[mx.array] = []
        for place in range(chain.tokens.shape[1]):
            target, draft = self._of_token(self.sampler.probabilities(logits[:, place], state), chain, place)
            taken.append(chain.offered[:, place] & (coins[:, place] * draft < target))
        accepted = mx.cumprod(mx.stack(taken, axis=1).astype(mx.int32), axis=1).sum(axis=1)
        return accepted.astype(mx.int32), mx.ones_like(coins[:, 0])

    def _rest(self, target: mx.array, draft: mx.array, share: mx.array) -> mx.array:
        """Return float32[B, V]: how much the scaled target distribution exceeds the draft's."""
        return mx.maximum(share[:, None] * target - draft, 0)

    def _draft_probs_at(self, chain: Chain, place: int, vocab_size: int) -> mx.array:
        return chain.probs_at(mx.full(chain.lengths.shape, place, mx.int32), vocab_size)

    def _of_token(self, probs: mx.array, chain: Chain, place: int) -> tuple[mx.array, mx.array]:
        """Return both distributions' probability of draft token number `place`, float32[B] each."""
        token = mx.maximum(chain.tokens[:, place, None], 0)
        both = probs, self._draft_probs_at(chain, place, probs.shape[1])
        target, draft = (mx.take_along_axis(each, token, axis=1)[:, 0] for each in both)
        return target, draft


class BlockRejection(Rejection):
    """The rule `block`: the longest prefix that its own random number accepts. In `_accepted`,
    `share` is the probability that a prefix is accepted."""

    def _accepted(
        self, logits: mx.array, state: SamplingState, chain: Chain, coins: mx.array
    ) -> tuple[mx.array, mx.array]:
        count = chain.offered.astype(mx.int32).sum(axis=1)
        share = kept = mx.ones_like(coins[:, 0])
        accepted = mx.zeros_like(count)
        for place in range(chain.tokens.shape[1]):
            probs = self.sampler.probabilities(logits[:, place], state)
            if place:
                rest = self._rest(probs, self._draft_probs_at(chain, place, probs.shape[1]), share).sum(axis=-1)
                taken = (coins[:, place - 1] * (rest + 1 - share) < rest) & (place < count)
                accepted, kept = mx.where(taken, place, accepted), mx.where(taken, share, kept)
            target, draft = self._of_token(probs, chain, place)
            share = mx.where(place < count, mx.minimum(share * target / draft, 1.0), share)
            taken = (coins[:, place] < share) & (count == place + 1)
            accepted, kept = mx.where(taken, place + 1, accepted), mx.where(taken, share, kept)
        return accepted.astype(mx.int32), kept


RULES: Mapping[str, type[Rejection]] = MappingProxyType({REJECTION: Rejection, BLOCK: BlockRejection})
"""Rules by their configuration value."""


class RejectionStepper(SpeculativeStepper):
    """Verifies with a rule that keeps the distribution. A draft token that a grammar forbids has
    probability 0 and is replaced like any rejected token."""

    def __init__(self, *given: Any, rule: str, **options: Any) -> None:
        """`given` and `options`: the arguments of the next class."""
        super().__init__(*given, **options)
        self.rule = RULES[rule](self._sampling.sampler)

    def _place(self, slots: mx.array, limits: mx.array, nodes: mx.array | None, width: int) -> Placed:
        return super()._place(slots, limits, None, width)

    def _decide(
        self,
        batch: ScheduleBatch,
        plan: RowPlan,
        found: Forwarded,
        inputs: SamplingInputs,
        arrived: Mapping[str, mx.array],
    ) -> Verified:
        rows, placed = found.rows, found.placed.first(found.rows.count)
        width = placed.ids.shape[1]
        if width == 1:
            return super()._decide(batch, plan, found, inputs, arrived)
        state = self._sampling.state_of_rows(batch, plan, inputs, arrived, self._state, found.ends)
        chain = self._offered(placed, rows.slots)
        logits = self.rule.sampler.process(found.logits, state).reshape(rows.count, width, -1)
        accepted, tokens, bad = self.rule.verify(logits, self._sampling.state_of_requests(width)(chain.lengths), chain)
        sampled = _sampled(chain, found.logits, state.needs.top_logprobs, accepted, tokens, bad)
        lengths = mx.minimum(chain.lengths + accepted + 1, mx.maximum(rows.limits, chain.lengths))
        self._drafts.lengths[rows.slots] = lengths
        self._state.last[rows.slots] = tokens
        counted = chain.offered.astype(mx.int32).sum(axis=1).astype(mx.int32)
        return Verified(found, plan, sampled, Runs(accepted, counted, tokens, lengths), width)

    def _offered(self, placed: Placed, slots: mx.array) -> Chain:
        """Return the draft tokens that a verification offers to the rule."""
        width = placed.ids.shape[1]
        proposals, draft_probs = self._drafts.proposals[slots][:, : width - 1], self._probs_of(width - 1)
        offered = (proposals >= 0) & placed.is_usable[:, 1:]
        if draft_probs is not None:
            # A draft with non-finite logits has drawn from no distribution.
            token = mx.maximum(proposals, 0)[:, :, None]
            offered = offered & (mx.take_along_axis(draft_probs, token, axis=2)[:, :, 0] > 0)
        offered = mx.cumprod(offered.astype(mx.int32), axis=1) > 0
        return Chain(proposals, offered, self._drafts.lengths[slots], draft_probs)

    def _probs_of(self, count: int) -> mx.array | None:
        """Return float32[B, count, V]: the distributions of the first `count` draft tokens of the
        step's requests; None: they are certain."""
        return None


class DraftRejectionStepper(RejectionStepper, DraftStepper):
    """A stepper with a draft model, which keeps the distributions of draft tokens until these are
    verified.

    They are kept in the array of the step that made them, with each slot's array and row, because a
    table of all slots would be copied by a step that reads and writes it."""

    def __init__(self, *given: Any, **options: Any) -> None:
        """As `RejectionStepper`, with the options of `DraftStepper`."""
        super().__init__(*given, **options)
        self._draft_probs: dict[int, tuple[mx.array, int]] = {}
        self._made: list[mx.array] = []
        self._slots = self._limits = np.zeros(0, np.int32)

    def _generate(self, batch: ScheduleBatch) -> StepOutput[mx.array]:
        assert batch.cell_limits is not None
        rows = plan_rows(batch)
        self._slots, self._limits = rows.select(batch.slots), rows.select(batch.cell_limits)
        return super()._generate(batch)

    def _probs_of(self, count: int) -> mx.array | None:
        held = [self._draft_probs[slot] for slot in self._slots.tolist()]
        found = [own[0][0][mx.array([row for _, row in own]), :count] for own in _runs(held)]
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _drawing(self, lengths: mx.array, width: int) -> Draw:
        state_at, draft_probs = self._sampling.state_of_requests(width), list[mx.array]()
        words = step_words(state_at(lengths).seed_words, lengths, DRAFTS)

        def draw(logits: mx.array, positions: mx.array) -> mx.array:
            own = replace(state_at(positions), seed_words=words)
            draft_probs.append(self.rule.sampler.probabilities(logits, own))
            return self.rule.sampler.sample(logits, own).token_ids

        self._made = draft_probs
        return draw

    def _store(self, slots: mx.array, *given: Any) -> None:
        self._made = []
        super()._store(slots, *given)
        if self._made:
            made, own = mx.stack(self._made, axis=1), self._slots.tolist()
            # Of an older array only the rows of other requests are kept.
            others = {
                slot: (probs[row : row + 1], 0) for slot, (probs, row) in self._draft_probs.items() if slot not in own
            }
            self._draft_probs = others | {slot: (made, row) for row, slot in enumerate(own)}
            self._drafts.draft_probs = [made, *(probs for probs, _ in others.values())]
            self._drop(slots)

    def _drop(self, slots: mx.array) -> None:
        """Drop draft tokens without a KV slot of their own: which they are depends on other
        requests."""
        steps = mx.arange(self._drafts.proposals.shape[1], dtype=mx.int32)[None]
        without = self._drafts.lengths[slots][:, None] + steps >= mx.array(self._limits)[:, None]
        self._drafts.proposals[slots] = mx.where(without, NONE, self._drafts.proposals[slots])


def _runs(held: Sequence[tuple[mx.array, int]]) -> list[list[tuple[mx.array, int]]]:
    """Return the runs of consecutive rows of one array."""
    return [list(own) for _, own in groupby(held, key=lambda each: id(each[0]))]


def _sampled(
    chain: Chain, logits: mx.array, top_n: int | None, last: mx.array, tokens: mx.array, bad: mx.array
) -> SampledTokens[mx.array]:
    """Return one result per row of logits: each request's draft tokens, with `tokens` int32[B] and
    `bad` bool[B] at index `last` int32[B], which is after the accepted ones."""
    proposals = mx.pad(mx.maximum(chain.tokens, 0), [(0, 0), (0, 1)])
    is_last = mx.arange(proposals.shape[1])[None] == last[:, None]
    every = mx.where(is_last, tokens[:, None], proposals).reshape(-1)
    bad_rows = (is_last & bad[:, None]).reshape(-1)
    return SampledTokens(every, bad_rows, None if top_n is None else logprobs_of(logits, every, top_n))


def step_words(seed_words: mx.array, lengths: mx.array, domain: int) -> mx.array:
    """Return seed words int32[B, 2] for noise that only the step with roots at lengths int32[B]
    uses, for one purpose: `domain` is DRAFTS or COINS. Rejected draft tokens must not influence the
    draws of the next step."""
    words = row_keys(seed_words, lengths)
    return (words ^ mx.array([domain, 0], mx.uint32)).view(mx.int32)


def draw_coins(seed_words: mx.array, lengths: mx.array, count: int) -> mx.array:
    """Return random numbers float32[B, count], uniform in [0, 1), which depend only on the
    requests' `seed_words` int32[B, 2], the places `lengths` int32[B] of their roots, and the
    index."""
    words = step_words(seed_words, lengths, COINS)
    drawn = mx.stack([row_keys(words, lengths + place)[:, 1] for place in range(1, count + 1)], axis=1)
    return (drawn >> (32 - COIN_BITS)).astype(mx.float32) * 2.0**-COIN_BITS
