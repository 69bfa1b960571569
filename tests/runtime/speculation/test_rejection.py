"""Verification that keeps the distribution exactly: the rules by enumeration in rational numbers,
the code against them, and the counts of many draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, product
from random import Random

import pytest
import torch
from torch import Tensor

from sglcore.runtime.speculative import rejection
from sglcore.runtime.speculative.rejection import BlockRejection, Chain, Rejection
from sglcore.sampling.gumbel_race import gumbel_noise, row_keys
from sglcore.sampling.noise import ONE
from sglcore.sampling.params_batch import SamplingNeeds
from sglcore.sampling.sampler import Sampler, SamplingState

Distribution = tuple[Fraction, ...]
Context = tuple[int, ...]
RULES = {"rejection": Rejection, "block": BlockRejection}


def rest(target: Distribution, draft: Distribution, share: Fraction) -> Distribution:
    """The residual: max(share * target - draft, 0), not normalised."""
    return tuple(max(share * p - q, Fraction(0)) for p, q in zip(target, draft, strict=True))


def resampled(target: Distribution, draft: Distribution, share: Fraction) -> Distribution:
    """A planted defect: resamples from the target's distribution unchanged."""
    return target


def unclamped(target: Distribution, draft: Distribution, share: Fraction) -> Distribution:
    """A planted defect: the absolute difference |share * target - draft|."""
    return tuple(abs(share * p - q) for p, q in zip(target, draft, strict=True))


def chances(
    rule: str, targets: Sequence[Distribution], drafts: Sequence[Distribution], tokens: Context
) -> list[tuple[Fraction, Fraction]]:
    """For each number of draft tokens from 1 on: the acceptance probability of its coin, and the
    factor that scales the target distribution after it."""
    share, found = Fraction(1), list[tuple[Fraction, Fraction]]()
    for place, token in enumerate(tokens):
        ratio = targets[place][token] / drafts[place][token]
        share = min(Fraction(1), share * ratio)
        if rule == "rejection":
            found.append((min(Fraction(1), ratio), Fraction(1)))
        elif place + 1 == len(tokens):
            found.append((share, share))
        else:
            left = sum(rest(targets[place + 1], drafts[place + 1], share), Fraction(0))
            found.append((left / (left + 1 - share) if left else Fraction(0), share))
    return found


def endings(
    rule: str,
    targets: Sequence[Distribution],
    drafts: Sequence[Distribution],
    tokens: Context,
    left: Callable[..., Distribution] = rest,
) -> Iterator[tuple[int, Fraction, Distribution]]:
    """Yield (accepted draft tokens, their probability, distribution of the token after them)."""
    coins = chances(rule, targets, drafts, tokens)
    shares = [Fraction(1), *(share for _, share in coins)]
    for accepted in range(len(tokens) + 1):
        if rule == "rejection":
            likely = product_of(coin for coin, _ in coins[:accepted])
            likely *= 1 - coins[accepted][0] if accepted < len(tokens) else 1
        else:
            likely = product_of(1 - coin for coin, _ in coins[accepted:])
            likely *= coins[accepted - 1][0] if accepted else 1
        if likely:
            whole = accepted == len(tokens)
            distribution = targets[accepted] if whole else left(targets[accepted], drafts[accepted], shares[accepted])
            yield accepted, likely, tuple(each / sum(distribution) for each in distribution)


def product_of(factors: Iterator[Fraction]) -> Fraction:
    found = Fraction(1)
    for factor in factors:
        found *= factor
    return found


def random_distributions(rnd: Random, size: int) -> Callable[[Context], Distribution]:
    """A random distribution of the next token for each context, all different."""
    known: dict[Context, Distribution] = {}

    def distribution(context: Context) -> Distribution:
        if context not in known:
            weights = [rnd.randint(1, 12) ** 2 for _ in range(size)]
            known[context] = tuple(Fraction(weight, sum(weights)) for weight in weights)
        return known[context]

    return distribution


def text_distribution(
    rule: str,
    target: Callable[[Context], Distribution],
    draft: Callable[[Context], Distribution],
    left: Callable[..., Distribution],
    tokens: int = 4,
) -> dict[Context, Fraction]:
    """The probability of each text of `tokens` tokens over a vocabulary of 3, with two draft tokens
    per step."""
    found = dict[Context, Fraction]()
    open_texts: dict[Context, Fraction] = {(): Fraction(1)}
    while open_texts:
        context, likely = open_texts.popitem()
        for first, second in product(range(3), repeat=2):
            drafts = (draft(context), draft((*context, first)))
            targets = (target(context), target((*context, first)), target((*context, first, second)))
            proposed = likely * drafts[0][first] * drafts[1][second]
            for accepted, chance, distribution in endings(rule, targets, drafts, (first, second), left):
                for token, share in enumerate(distribution):
                    text = (*context, *(first, second)[:accepted], token)
                    into = found if len(text) >= tokens else open_texts
                    text = text[:tokens]
                    into[text] = into.get(text, Fraction(0)) + proposed * chance * share
    return found


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("left", [rest, resampled, unclamped])
def test_texts_have_the_distribution_of_the_target(rule: str, left: Callable[..., Distribution]) -> None:
    for seed in range(2 if left is rest else 1):
        rnd = Random(seed)
        target, draft = random_distributions(rnd, 3), random_distributions(rnd, 3)
        found = text_distribution(rule, target, draft, left)
        wanted = {
            text: product_of(target(text[:place])[token] for place, token in enumerate(text))
            for text in product(range(3), repeat=4)
        }
        assert (found == wanted) == (left is rest)


def make_state(seeds: int, seed: int = 0) -> SamplingState:
    """Requests with seeds of their own, drawn at temperature 1."""
    words = torch.randint(-(2**31), 2**31, (seeds, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.int64)
    none = torch.zeros(seeds, dtype=torch.int32)
    needs = SamplingNeeds(all_greedy=False, any_greedy=False)
    return SamplingState(needs, none, words.to(torch.int32), torch.full((seeds,), float(ONE)), none.bool())


@pytest.mark.parametrize("rule", list(RULES))
def test_the_code_accepts_and_replaces_by_the_rule(rule: str) -> None:
    rnd, verified = Random(7), RULES[rule](Sampler(3, "cpu"))
    for _ in range(5):
        distribution = random_distributions(rnd, 3)
        targets, drafts = (
            [distribution((0, place)) for place in range(3)],
            [distribution((1, place)) for place in range(2)],
        )
        for tokens in product(range(3), repeat=2):
            coins = chances(rule, targets, drafts, tokens)
            logits = torch.tensor([[[float(p) for p in target] for target in targets]]).log().expand(9, -1, -1)
            draft_probs = torch.tensor([[[float(q) for q in draft] for draft in drafts]]).expand(9, -1, -1)
            # Each coin falls just below, far below and just above its acceptance probability.
            falls = [[float(coin) - 1e-3, float(coin) / 2, min(float(coin) + 1e-3, 1 - 1e-6)] for coin, _ in coins]
            given = torch.tensor(list(product(*falls)))
            chain = Chain(
                torch.tensor([tokens] * 9), torch.ones(9, 2, dtype=torch.bool), torch.zeros(9).int(), draft_probs
            )
            accepted, share = verified._accepted(logits, make_state(9), chain, given)
            says = given < torch.tensor([float(coin) for coin, _ in coins])
            by_token = says.int().cumprod(1).sum(1)
            wanted = by_token if rule == "rejection" else torch.where(says[:, 1], 2, says[:, 0].int())
            assert accepted.tolist() == wanted.tolist()
            shares = [1.0, *(float(each) for _, each in coins)]
            torch.testing.assert_close(
                share, torch.tensor([shares[each] for each in wanted.tolist()]), atol=1e-4, rtol=0
            )


SIZE, TEXT = 8, 3


def count_texts(rule: Rejection, count: int, proposals: int = 2, is_certain: bool = False) -> tuple[Tensor, Tensor]:
    """The observed and the expected number of each text of three tokens among `count` texts; each
    token depends on the one before. `is_certain`: the likeliest token is drafted, without a
    distribution; every third text has only the first draft token or none."""
    random = torch.Generator().manual_seed(3)
    target, draft = (torch.randn(2, SIZE, SIZE, generator=random) * 1.2).unbind()
    state, rows = make_state(count), torch.arange(count)
    roots, lengths = torch.zeros(count, dtype=torch.int32), torch.ones(count, dtype=torch.int32)
    texts = torch.zeros(count, TEXT + proposals + 1, dtype=torch.int32)
    while int(lengths.min()) <= TEXT:
        draft_probs, before, drawn = torch.zeros(count, proposals, SIZE), roots, list[Tensor]()
        draw = rule.drafting(state, rows, lengths, draft_probs)
        for depth in range(1, proposals + 1):
            before = draft[before].argmax(-1).int() if is_certain else draw(draft[before], depth)
            drawn.append(before)
        tokens = torch.stack(drawn, 1)
        offered = torch.ones_like(tokens, dtype=torch.bool)
        if is_certain:
            offered[::3, 1], offered[::6, 0] = False, False
        chain = Chain(tokens, offered, lengths, None if is_certain else draft_probs)
        logits = target[torch.cat([roots[:, None], tokens], 1)]
        accepted, last, bad = rule.verify(logits, state, chain)
        assert not bad.any()
        begin = (lengths - 1).clamp(max=TEXT)[:, None].long()
        run = torch.cat([tokens, last[:, None]], 1).scatter(1, accepted[:, None].long(), last[:, None])
        texts.scatter_(1, begin + torch.arange(proposals + 1), run)
        roots, lengths = last, lengths + accepted + 1
    distribution = target.softmax(-1).double()
    wanted = distribution[0][:, None, None] * distribution[:, :, None] * distribution[None]
    index = (texts[:, 0].long() * SIZE + texts[:, 1]) * SIZE + texts[:, 2]
    return torch.bincount(index, minlength=SIZE**3).double(), wanted.flatten() * count


def p_value(counts: Tensor, wanted: Tensor) -> float:
    """p-value of the chi-square test; texts with fewer than five expected occurrences are
    pooled."""
    rare = wanted < 5
    counts, wanted = (torch.cat([each[~rare], each[rare].sum()[None]]) for each in (counts, wanted))
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("is_certain", [False, True])
def test_texts_are_drawn_by_the_distribution_of_the_target(rule: str, is_certain: bool) -> None:
    """A correct rule fails with a probability of one in a million."""
    assert p_value(*count_texts(RULES[rule](Sampler(SIZE, "cpu")), 200_000, is_certain=is_certain)) > 1e-6


def resample_from_target(rule: Rejection, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "_rest", lambda target, draft, share: target)


def no_clamp(rule: Rejection, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "_rest", lambda target, draft, share: (share[:, None] * target - draft).abs())


def bonus_from_draft(rule: Rejection, patch: pytest.MonkeyPatch) -> None:
    rests = rule._rest

    def rest_or_draft(target: Tensor, draft: Tensor, share: Tensor) -> Tensor:
        # After the last draft token there is no draft distribution: a shifted target distribution
        # stands for it.
        return torch.where(draft.sum(-1, keepdim=True) > 0, rests(target, draft, share), target.roll(1, -1))

    patch.setattr(rule, "_rest", rest_or_draft)


def noise_of_the_target(rule: Rejection, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection, "step_words", lambda words, lengths, domain: words)


def coins_of_the_proposals(rule: Rejection, patch: pytest.MonkeyPatch) -> None:
    def coins(seed_words: Tensor, lengths: Tensor, count: int) -> Tensor:
        words, tables = rejection.step_words(seed_words, lengths, rejection.DRAFTS), rule.sampler.tables
        keys = [row_keys(words, lengths + place) for place in range(1, count + 1)]
        drawn = [gumbel_noise(each, tables.hashed_ids[:1], tables.gumbel)[:, 0] / ONE for each in keys]
        return torch.stack([(-(-noise).exp()).exp() for noise in drawn], 1)

    patch.setattr(rejection, "draw_coins", coins)


def noise_that_outlives_its_step(rule: Rejection, patch: pytest.MonkeyPatch) -> None:
    real = rejection.step_words
    patch.setattr(rejection, "step_words", lambda words, lengths, domain: real(words, torch.ones_like(lengths), domain))


MUTANTS = [
    *product(RULES, (resample_from_target, no_clamp, bonus_from_draft, noise_of_the_target, coins_of_the_proposals)),
    # In block verification, the cut depends on the coins and draft tokens after it.
    ("block", noise_that_outlives_its_step),
]


def test_proposals_coins_and_draws_of_the_target_have_noise_of_their_own() -> None:
    words, lengths = make_state(64).seed_words, torch.arange(64, dtype=torch.int32)
    noises = [rejection.step_words(words, lengths, domain) for domain in (rejection.DRAFTS, rejection.COINS)]
    for one, other in combinations([words, row_keys(words, lengths), *noises], 2):
        assert not (one == other).all(1).any()


@pytest.mark.parametrize("rule", list(RULES))
def test_certain_proposals_that_are_accepted_by_a_distribution_change_it(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest token is drafted, but tested as if it had been drawn from a distribution over
    several tokens."""
    distribution = Chain.probs_at
    monkeypatch.setattr(Chain, "probs_at", lambda chain, place, size: distribution(chain, place, size) / 2)
    assert p_value(*count_texts(RULES[rule](Sampler(SIZE, "cpu")), 60_000, is_certain=True)) < 1e-9


@pytest.mark.parametrize(("rule", "mutant"), MUTANTS)
def test_a_defect_changes_the_distribution(
    rule: str, mutant: Callable[[Rejection, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RULES[rule](Sampler(SIZE, "cpu"))
    mutant(broken, monkeypatch)
    assert p_value(*count_texts(broken, 60_000)) < 1e-9
