"""Verification that is exact in distribution, not in tokens.

Draft tokens are drawn from the draft's distributions with separate noise, and accepted or replaced
so that the output has the target's distribution. By token: accept X with min(1, p(X) / q(X)), else
draw from (p - q)+ (arXiv 2211.17192). By block: the longest prefix accepted by its own random
number (arXiv 2403.10444), which accepts at least the same number of tokens.

These are the two optional rules of acceptance, `rejection` and `block`; the default, `coupled`, is
in `verify_worker.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.speculative.drafter import NONE, DraftRows, DrawDraft
from sglcore.runtime.speculative.speculation_choice import BLOCK, REJECTION
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker, VerifiedRows
from sglcore.sampling.gumbel_race import row_keys
from sglcore.sampling.logprobs import logprobs_of
from sglcore.sampling.sampler import Sampler, SamplingState
from sglcore.sampling.state import SampledTokens

DRAFTS, COINS = 0x2545F491, 0x6C078965
"""Constants that make the noise of draft tokens, acceptance and target draws independent."""
COIN_BITS = 24


@dataclass(frozen=True, slots=True)
class Chain:
    """Draft tokens of B requests with roots at `lengths` int32[B].

    `tokens` int32[B, k]; `offered` bool[B, k]: may be accepted (False after the first False).
    `probs` float32[B, k, V] are the distributions they were drawn from; None: they were certain.
    """

    tokens: Tensor
    offered: Tensor
    lengths: Tensor
    probs: Tensor | None = None

    def probs_at(self, place: int | Tensor, vocab_size: int) -> Tensor:
        """Return float32[B, V]: the distribution of draft token number `place`.

        `place` is int64[B, 1], or one number for all. Zeros where no token is offered.
        """
        last = self.tokens.shape[1] - 1
        places = torch.as_tensor(place, device=self.tokens.device).expand(len(self.tokens), 1)
        within = places.clamp(max=last)
        if self.probs is None:
            token = self.tokens.gather(1, within).clamp_(min=0).long()
            probs = torch.zeros(len(token), vocab_size, device=token.device).scatter_(1, token, 1.0)
        else:
            probs = self.probs.gather(1, within[:, :, None].expand(-1, -1, vocab_size))[:, 0]
        return probs * (self.offered.gather(1, within) & (places <= last))


class Rejection:
    """The acceptance rule `rejection`, token by token: it draws draft tokens with their
    distributions, and verifies them.

    Depends only on the requests' seeds, lengths and distributions; no host reads.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def drafting(self, state: SamplingState, slots: Tensor, lengths: Tensor, draft_probs: Tensor) -> DrawDraft:
        """Return a function that draws a draft token for each of R requests, and stores their
        distributions in draft_probs[slots, depth - 1].

        `slots` (request slots) and `lengths` (places of the roots) are int32[R], `draft_probs`
        float32[slots + 1, k, V].
        """
        words = step_words(state.seed_words, lengths, DRAFTS)

        def draw(logits: Tensor, depth: int) -> Tensor:
            own = replace(state, seed_words=words, positions=lengths + depth)
            draft_probs[slots, depth - 1] = self.sampler.probabilities(logits, own)
            return self.sampler.sample(logits, own).token_ids

        return draw

    def verify(self, logits: Tensor, state: SamplingState, chain: Chain) -> tuple[Tensor, Tensor, Tensor]:
        """Return the number of accepted draft tokens, the token after them, and if it is bad.

        int32[B], int32[B], bool[B], from processed logits float[B, k + 1, V] and the requests'
        state.
        """
        coins = draw_coins(state.seed_words, chain.lengths, chain.tokens.shape[1])
        accepted, share = self._accepted(logits, state, chain, coins)
        places = accepted[:, None].long()
        probs = self.sampler.probabilities(
            logits.gather(1, places[:, :, None].expand(-1, -1, logits.shape[2]))[:, 0], state
        )
        rest = self._rest(probs, chain.probs_at(places, probs.shape[1]), share)
        weights = torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)
        return accepted, *self.sampler.draw_by_weight(weights, state.seed_words, chain.lengths + accepted + 1)

    def _accepted(self, logits: Tensor, state: SamplingState, chain: Chain, coins: Tensor) -> tuple[Tensor, Tensor]:
        """Return the accepted draft tokens int32[B] and a scale float32[B].

        The scale applies to the target's distribution where the accepted tokens end.
        """
        taken = chain.offered.clone()
        for place in range(taken.shape[1]):
            target, draft = self._of_token(self.sampler.probabilities(logits[:, place], state), chain, place)
            taken[:, place] &= coins[:, place] * draft < target
        accepted = taken.to(torch.int32).cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
        return accepted, torch.ones_like(coins[:, 0])

    def _rest(self, target: Tensor, draft: Tensor, share: Tensor) -> Tensor:
        """Return float32[B, V]: the excess of the scaled target distribution over the draft's."""
        return (share[:, None] * target - draft).clamp_(min=0)

    def _of_token(self, probs: Tensor, chain: Chain, place: int) -> tuple[Tensor, Tensor]:
        """Return both distributions' probability of draft token number `place`, float32[B] each."""
        token = chain.tokens[:, place, None].clamp(min=0).long()
        return probs.gather(1, token)[:, 0], chain.probs_at(place, probs.shape[1]).gather(1, token)[:, 0]


class BlockRejection(Rejection):
    """The acceptance rule `block`: the longest prefix that its own random number accepts. In
    `_accepted`, `share` is the probability that a prefix is accepted.
    """

    def _accepted(self, logits: Tensor, state: SamplingState, chain: Chain, coins: Tensor) -> tuple[Tensor, Tensor]:
        count = chain.offered.sum(1, dtype=torch.int32)
        share = kept = torch.ones_like(coins[:, 0])
        accepted = torch.zeros_like(count)
        for place in range(chain.tokens.shape[1]):
            probs = self.sampler.probabilities(logits[:, place], state)
            if place:
                rest = self._rest(probs, chain.probs_at(place, probs.shape[1]), share).sum(-1)
                taken = (coins[:, place - 1] * (rest + 1 - share) < rest) & (place < count)
                accepted, kept = accepted.masked_fill(taken, place), torch.where(taken, share, kept)
            target, draft = self._of_token(probs, chain, place)
            share = torch.where(place < count, (share * target / draft).clamp(max=1.0), share)
            taken = (coins[:, place] < share) & (count == place + 1)
            accepted, kept = accepted.masked_fill(taken, place + 1), torch.where(taken, share, kept)
        return accepted, kept


RULES: Mapping[str, type[Rejection]] = MappingProxyType({REJECTION: Rejection, BLOCK: BlockRejection})
"""Rules by their configuration value."""


class RejectionWorker(SpeculativeWorker):
    """Verifies with a rule that is exact in distribution.

    A draft token that a grammar forbids has probability 0 and is replaced like any rejected token.
    """

    def __init__(self, rule: type[Rejection], draft_probs: Tensor | None, *given: Any) -> None:
        """`draft_probs` float32[slots + 1, k, V] stores draft distributions; None for a drafter
        without any.

        `given` are the parameters of `SpeculativeWorker`.
        """
        self._draft_probs = draft_probs
        super().__init__(*given)
        self.rule = rule(self.sampling.sampler)

    def _place(self, staged: ForwardBatch, rows: VerifiedRows, nodes: Tensor | None) -> None:
        super()._place(staged, rows, None)

    def _decide(
        self, staged: ForwardBatch, rows: VerifiedRows, logits: Tensor, state: SamplingState
    ) -> tuple[SampledTokens[Tensor], Tensor]:
        width = logits.shape[0] // rows.slots.shape[0]
        if width == 1:
            return super()._decide(staged, rows, logits, state)
        proposals = self._proposals.index_select(0, rows.slots)[:, : width - 1]
        offered = (proposals >= 0) & (staged.req_pool_indices.view(-1, width)[:, 1:] != 0)
        draft_probs = (
            None if self._draft_probs is None else self._draft_probs.index_select(0, rows.slots)[:, : width - 1]
        )
        if draft_probs is not None:
            # A draft with non-finite logits has drawn from no distribution.
            offered &= draft_probs.gather(2, proposals.clamp(min=0)[:, :, None].long())[:, :, 0] > 0
        lengths = self._lengths.index_select(0, rows.slots)
        chain = Chain(proposals, offered.to(torch.int32).cumprod(1) > 0, lengths, draft_probs)
        processed = self.rule.sampler.process(logits, state).view(-1, width, logits.shape[1])
        accepted, tokens, bad = self.rule.verify(processed, self.draft_sampling.state_of_requests(width), chain)
        accepted, tokens = self.rule.sampler.decided(accepted, tokens)
        sampled = self._sampled(chain, logits, state.needs.top_logprobs, accepted[:, None].long(), tokens, bad)
        first = torch.arange(0, logits.shape[0], width, dtype=torch.int32, device=logits.device)
        ends = torch.minimum(lengths + accepted + 1, torch.maximum(rows.limits, lengths))
        self._lengths[rows.slots] = ends
        self._table.publish(rows.slots, tokens)
        return sampled, torch.stack([accepted, offered.sum(1, dtype=torch.int32), first + accepted, ends])

    def _sampled(
        self, chain: Chain, logits: Tensor, top_n: int | None, last: Tensor, tokens: Tensor, bad: Tensor
    ) -> SampledTokens[Tensor]:
        """Return one result per row of logits: each request's draft tokens, with `tokens` int32[B]
        and `bad` bool[B] at index `last` int64[B, 1], which is after the accepted ones.
        """
        proposals = torch.nn.functional.pad(chain.tokens.clamp(min=0), (0, 1))
        every = proposals.scatter(1, last, tokens[:, None]).view(-1)
        bad_rows = torch.zeros_like(proposals, dtype=torch.bool).scatter_(1, last, bad[:, None]).view(-1)
        is_narrow = self.runner.is_narrow
        logprobs = None if top_n is None else logprobs_of(logits, every, top_n, is_narrow=is_narrow)
        return SampledTokens(every, bad_rows, logprobs)

    def _drafting(self, width: int, slots: Tensor, lengths: Tensor) -> DrawDraft:
        if self._draft_probs is None:
            return super()._drafting(width, slots, lengths)
        return self.rule.drafting(self.draft_sampling.state_of_requests(width), slots, lengths, self._draft_probs)

    def _propose(self, rows: DraftRows) -> None:
        super()._propose(rows)
        if self._draft_probs is not None:
            # Draft tokens without a KV slot of their own depend on which other requests have none:
            # drop them.
            steps = torch.arange(self._proposals.shape[1], dtype=torch.int32, device=rows.limits.device)
            without = rows.lengths[:, None] + steps >= rows.limits[:, None]
            self._proposals[rows.slots] = self._proposals[rows.slots].masked_fill_(without, NONE)


def step_words(seed_words: Tensor, lengths: Tensor, domain: int) -> Tensor:
    """Return seed words int32[B, 2] for noise that only this step uses, for one purpose: `domain`
    is DRAFTS or COINS.

    The step has roots at lengths int32[B]. Rejected draft tokens must not influence the draws of
    the next step.
    """
    words = row_keys(seed_words, lengths)
    words[:, 0] ^= domain
    return words


def draw_coins(seed_words: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Return random numbers float32[B, count], uniform in [0, 1), which depend only on the
    requests' `seed_words` int32[B, 2], the places `lengths` int32[B] of their roots, and the index.
    """
    words = step_words(seed_words, lengths, COINS)
    drawn = torch.stack([row_keys(words, lengths + place)[:, 1] for place in range(1, count + 1)], 1)
    return ((drawn >> (32 - COIN_BITS)) & ((1 << COIN_BITS) - 1)).float() * 2.0**-COIN_BITS
