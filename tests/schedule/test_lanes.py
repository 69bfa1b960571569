"""How much of a prompt runs between two decode steps: total functions, and what follows from what was measured."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from sglcore.schedule.lanes import Fixed, Pace, layers_now
from sglcore.schedule.overlap import BatchRecord
from sglcore.schedule.slicing import Slicing
from tests.schedule.fake_worker import make_limits

SLOTS = np.array([1, 2], dtype=np.int32)


def test_there_is_a_slice_whatever_the_numbers_are_as_long_as_a_layer_is_left() -> None:
    """In the engine that multiplexed prompts first, no case of a chain of thresholds bound the index below all of them."""
    rnd = Random(7)
    for _ in range(20_000):
        tokens, budget = rnd.choice([0, 1, rnd.randint(1, 10**6)]), rnd.choice([0, 1, rnd.randint(-5, 10**8)])
        total = rnd.randint(0, 200)
        done = rnd.randint(0, total + 2)
        layers = layers_now(tokens, budget, done, total)
        assert layers == 0 if done >= total else 1 <= layers <= total - done
        assert layers <= layers_now(tokens, budget + 1, done, total), "more budget, fewer layers"
        assert layers >= layers_now(tokens + 1, budget, done, total), "more tokens, more layers"


@pytest.mark.parametrize(
    ("tokens", "budget", "done", "total", "wanted"),
    [(100, 1000, 0, 32, 10), (100, 1000, 28, 32, 4), (2000, 1000, 5, 32, 1), (0, 64, 0, 32, 32), (7, 7, 32, 32, 0)],
)
def test_a_slice_has_what_its_budget_holds(tokens: int, budget: int, done: int, total: int, wanted: int) -> None:
    assert layers_now(tokens, budget, done, total) == wanted


def test_a_slice_takes_a_share_of_a_decode_step() -> None:
    pace = Pace()
    assert pace.budget == pace.tokens(2048) == Pace.LEAST_TOKENS
    pace.saw_decode(0.010)
    assert pace.budget == Pace.LEAST_TOKENS, "nothing is known of slices yet"
    pace.saw_slice(64, 1, 64 * 1e-6)
    assert pace.budget == 7000 and pace.tokens(2048) == 2048 and pace.tokens(9000) == 7000


def test_what_is_measured_last_counts_most_and_one_measure_does_not_decide() -> None:
    pace = Pace()
    pace.saw_decode(0.010)
    pace.saw_decode(0.020)
    assert pace.decode_seconds == pytest.approx(0.013)
    for _ in range(40):
        pace.saw_decode(0.020)
    assert pace.decode_seconds == pytest.approx(0.020, rel=1e-4)


def test_a_chunk_has_no_fewer_tokens_than_pay_for_reading_a_layer() -> None:
    pace = Pace(decode_seconds=0.001, token_layer_seconds=0.001)
    assert pace.budget == 1 and pace.tokens(2048) == Pace.LEAST_TOKENS and pace.tokens(5) == 5


def test_a_budget_that_was_asked_for_stays_as_it_is() -> None:
    pace = Fixed(500)
    pace.saw_decode(9.0)
    pace.saw_slice(1, 1, 9.0)
    assert pace.budget == 500 and pace.tokens(2048) == 2048


def test_steps_of_decode_rows_and_slices_are_learned_from_and_others_are_not() -> None:
    slicing = Slicing(make_limits(sliced_layers=4))
    assert isinstance(slicing.pace, Pace)
    slicing.observe(BatchRecord(1, [], SLOTS, seconds=0.5))
    slicing.observe(BatchRecord(2, [], SLOTS, spans=[(0, 5)], seconds=7.0))
    slicing.observe(BatchRecord(3, [], SLOTS, spans=[(0, 50)], layers=(1, 3), sliced_tokens=50, seconds=0.1))
    slicing.observe(BatchRecord(4, [], SLOTS))
    assert (slicing.pace.decode_seconds, slicing.pace.token_layer_seconds) == (0.5, 0.001)
