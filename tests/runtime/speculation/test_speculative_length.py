"""How many draft tokens a step verifies, chosen by acceptance and by the cost of steps: in
simulated runs, and with lengths that change at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count, pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.step.draft_length import DWELL, TRIES, LengthController, Started, StepTimes, lengths_of
from sglcore.step.verification_rows import WideRows
from sglcore.worker.model_worker import BatchResult
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.laws.speculation.test_speculative_laws import engines, folder, plain, run
from tests.laws.speculation.texts import Ran, check_same

__all__ = ["engines", "folder", "plain"]

LENGTHS = (0, 1, 3, 4)
Cost = Callable[[int], float]


def simulate(
    made: LengthController, steps: int, rate: float, cost: Cost, requests: int = 1, seed: int = 0
) -> list[int]:
    """The draft lengths chosen in a simulated run. A draft token after accepted ones is accepted
    with probability `rate`; a step with n draft tokens takes cost(n) seconds."""
    rng, taken = np.random.default_rng(seed), []
    for _ in range(steps):
        tokens = made.tokens
        right = rng.random((requests, tokens)) < rate
        accepted = right.cumprod(1).sum(1).astype(np.int32)
        made.choose(requests)
        made.learn(requests, tokens, accepted, cost(tokens) if made.tokens == tokens else None)
        taken.append(tokens)
    return taken


def share(taken: list[int], tokens: int) -> float:
    return taken.count(tokens) / len(taken)


def test_a_start_changes_between_lengths_up_to_its_largest_or_keeps_the_one_asked_for() -> None:
    assert lengths_of(None, 4) == (0, 1, 3, 4)
    assert lengths_of(None, 7) == (0, 1, 3, 5, 7)
    assert lengths_of(6, 4) == (6,)
    assert set(simulate(LengthController((6,)), 50, 0.0, lambda tokens: 1 + tokens)) == {6}


@pytest.mark.parametrize("requests", [1, 6, 32])
@pytest.mark.parametrize(
    ("rate", "slope", "best"),
    [(0.95, 0.05, 4), (0.02, 0.3, 0), (0.45, 0.25, 1), (0.9, 1.2, 0), (0.0, 0.12, 0)],
)
def test_it_finds_the_length_with_the_most_tokens_a_second(requests: int, rate: float, slope: float, best: int) -> None:
    made = LengthController(LENGTHS)
    simulate(made, 64, rate, lambda tokens: 1 + slope * tokens, requests)
    taken = simulate(made, 512, rate, lambda tokens: 1 + slope * tokens, requests, seed=1)
    assert share(taken, best) > (0.55 if requests == 1 and best == 1 else 0.85), {n: share(taken, n) for n in LENGTHS}


def test_it_costs_little_where_nothing_is_right_and_comes_back_when_something_is() -> None:
    made = LengthController(LENGTHS)
    simulate(made, 64, 0.0, lambda tokens: 1 + 0.3 * tokens)
    taken = simulate(made, 1024, 0.0, lambda tokens: 1 + 0.3 * tokens)
    assert sum(1 + 0.3 * tokens for tokens in taken) < 1.05 * len(taken)
    taken = simulate(made, 512, 1.0, lambda tokens: 1 + 0.3 * tokens)
    assert share(taken[256:], 4) > 0.9


def test_two_steps_in_64_try_what_looked_too_dear() -> None:
    made = LengthController(LENGTHS)
    # With the prior alone (half of the draft tokens accepted), no draft would be tried again.
    simulate(made, 256, 0.0, lambda tokens: 1 + 0.45 * tokens)
    taken = simulate(made, 512, 1.0, lambda tokens: 1 + 0.45 * tokens)
    assert share(taken[256:], 4) > 0.9


def test_what_is_right_behind_right_ones_is_what_counts() -> None:
    made = LengthController((1, 7))
    simulate(made, 64, 0.8, lambda tokens: 1 + 0.15 * tokens, 8)
    assert share(simulate(made, 256, 0.8, lambda tokens: 1 + 0.15 * tokens, 8), 7) > 0.9


def test_what_a_step_waited_for_is_not_what_its_length_costs() -> None:
    made, steps = LengthController(LENGTHS), count()

    def cost(tokens: int) -> float:
        return (1 + 0.05 * tokens) * (20 if tokens == 4 and next(steps) % 5 == 0 else 1)

    simulate(made, 64, 0.95, cost, 4)
    assert share(simulate(made, 512, 0.95, cost, 4), 4) > 0.85


def test_no_length_gives_way_to_one_that_is_hardly_better() -> None:
    made = LengthController((1, 3))
    taken = simulate(made, 512, 1.0, lambda tokens: tokens + 1 if tokens == 1 else 1.03 * (tokens + 1))
    assert share(taken, 3) > 0.9


def test_what_is_right_of_few_requests_says_nothing_of_many() -> None:
    made = LengthController(LENGTHS)
    simulate(made, 128, 0.95, lambda tokens: 1 + 0.05 * tokens, requests=1)
    simulate(made, 128, 0.95, lambda tokens: 1 + 1.5 * tokens, requests=64)
    assert share(simulate(made, 128, 0.95, lambda tokens: 1 + 0.05 * tokens, requests=1), 4) > 0.9


def test_it_stays_with_a_length_for_some_steps() -> None:
    made, settled = LengthController(LENGTHS), list[int]()
    for step in range(800):
        simulate(made, 1, 0.02 if step // 60 % 2 else 0.95, lambda tokens: 1 + 0.2 * tokens, 4, seed=step)
        settled.append(made._settled)
    changes = [step for step, (one, other) in enumerate(pairwise(settled)) if one != other]
    assert len(changes) > 5
    assert DWELL == 8 and all(after - before >= 8 for before, after in pairwise(changes))


def test_no_length_is_narrower_than_what_was_proposed() -> None:
    assert [LengthController((3, 6)).fitting(tokens) for tokens in range(7)] == [0, 3, 3, 3, 6, 6, 6]


def test_every_other_length_is_tried_in_turn_for_two_steps_of_which_one_is_timed() -> None:
    made = LengthController(LENGTHS)
    simulate(made, 64, 0.0, lambda tokens: 1 + tokens)
    timed = list[int]()

    def cost(tokens: int) -> float:
        timed.append(tokens)
        return 1.0 + tokens

    taken = simulate(made, 6 * 64, 0.0, cost)
    tried = [tokens for tokens in taken if tokens]
    assert tried[::2] == tried[1::2] and [*map(tried.count, (1, 3, 4))] == [4, 4, 4]
    assert [tokens for tokens in timed if tokens] == tried[::2]


def test_each_length_is_tried_before_one_is_chosen_the_longest_first() -> None:
    made, tried = LengthController(LENGTHS), [0]
    taken = simulate(made, 12, 0.5, lambda tokens: 1 + tokens)
    for tokens in taken:
        tried += [tokens] * (tokens != tried[-1])
    assert tried[1:5] == [4, 3, 1, 0]
    assert all(taken.count(tokens) >= TRIES for tokens in LENGTHS)


class Learning(LengthController):
    """Records the steps reported to it."""

    def __init__(self) -> None:
        super().__init__(LENGTHS)
        self.told: list[tuple[int, int, list[int]]] = []

    def learn(self, requests: int, tokens: int, accepted: NDArray[np.int32], seconds: float | None) -> None:
        self.told.append((requests, tokens, accepted.tolist()))


def test_a_step_that_nobody_collected_is_passed_over() -> None:
    times, told = StepTimes(), Learning()
    for step in (3, 5, 6):
        times.begin(Started(step, 2, step - 2, 0.0, True))
    for step, counts in ((4, [1, 1]), (5, [1, 3]), (6, [5, 1]), (7, [1, 1])):
        offsets = np.cumsum([0, *counts], dtype=np.int32)
        times.end(BatchResult(step, offsets, np.zeros(sum(counts), np.int32), np.zeros(2, bool)), told)
    assert told.told == [(2, 3, [0, 2]), (2, 4, [4, 0])]


class AtRandom(LengthController):
    """Chooses a random length before each step."""

    def __init__(self) -> None:
        super().__init__(LENGTHS)
        self._random = random.Random(7)
        self.taken: set[int] = set()

    def choose(self, requests: int) -> None:
        self.tokens = self._random.choice(self.lengths)
        self.taken.add(self.tokens)


class StaleRows(SpeculativeWorker):
    """Mutant: a step never has more rows than the previous step of the same requests."""

    def _widened(self, batch: ScheduleBatch, width: int) -> WideRows:
        before, wide = self._wide, super()._widened(batch, width)
        widths = self.drafter.tokens + 2
        if before is None or before.number // widths != wide.number // widths:
            return wide
        return min(before, wide, key=lambda rows: rows.number)


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", ["guessing", "ngram"])
def test_lengths_that_change_at_random_change_no_text(engines, plain: Ran, drafter: str, overlap: bool) -> None:
    engine = engines(drafter, plain, overlap=overlap, graph="off")
    engine.worker.length = changing = AtRandom()
    check_same(run(engine), plain)
    assert changing.taken == set(LENGTHS)


@pytest.mark.needs("device")
def test_a_table_of_another_width_shows(engines, plain: Ran) -> None:
    engine = engines("guessing", plain, overlap=False, graph="off")
    engine.worker.length, engine.worker.__class__ = AtRandom(), StaleRows
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        check_same(run(engine), plain)
