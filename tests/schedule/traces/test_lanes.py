"""How much of a prompt runs between two decode steps: functions defined for all inputs, and
estimates from measurements."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from sglcore.schedule.layered_prefill.slice_choice import Slicing
from sglcore.schedule.layered_prefill.slice_pace import Fixed, Pace, layers_now
from sglcore.schedule.steps_in_flight import BatchRecord
from tests.schedule.fake_worker import make_limits

SLOTS = np.array([1, 2], dtype=np.int32)


def test_there_is_a_slice_whatever_the_numbers_are_as_long_as_a_layer_is_left() -> None:
    """The first engine with multiplexed prefill chose by a chain of thresholds, and an input below
    all of them left the index unbound."""
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


def known(decode: float = 0.010, **layers: float) -> Pace:
    """A pace with these measurements: `t64=0.001` is a layer over 64 tokens that takes 0.001 s."""
    pace = Pace()
    pace.saw_decode(decode)
    for name, seconds in layers.items():
        pace.saw_slice(int(name[1:]), 1, seconds)
    return pace


def test_as_long_as_nothing_is_known_a_slice_is_as_small_as_one_can_be() -> None:
    pace = Pace()
    assert pace.tokens(2048) == pace.budget(64) == Pace.LEAST_TOKENS
    pace.saw_decode(0.010)
    assert pace.tokens(2048) == pace.budget(64) == Pace.LEAST_TOKENS, "nothing is known of slices yet"
    assert known().budget(0) == 1 and known(t64=0.00099).budget(0) == 7


def test_a_slice_takes_a_share_of_a_decode_step() -> None:
    pace = known(t512=0.00099)
    assert pace.budget(512) == 7 * 512 and layers_now(512, pace.budget(512), 0, 32) == 7
    assert known(t512=0.008).budget(512) == 512, "one layer at least"


def test_a_chunk_has_as_many_tokens_as_one_layer_can_take_in_a_slice() -> None:
    assert known(t64=0.001).tokens(2048) == 128, "twice as many are tried"
    assert known(t64=0.001, t128=0.004).tokens(2048) == 256
    assert known(t64=0.001, t128=0.004, t256=0.009).tokens(2048) == 128, "and found too long"
    assert known(t64=0.009, t128=0.012).tokens(2048) == 64 and known(t64=0.009).tokens(5) == 5
    assert known(t64=0.009, t128=0.010).tokens(2048) == 256, "a launch is longer than a step, whatever it is of"
    assert known(t64=0.001, t128=0.001).tokens(200) == 200
    assert known(t2048=0.001).tokens(2048) == Pace.LEAST_TOKENS, "the least there is, from which it climbs"


def test_what_a_layer_takes_is_bounded_by_fewer_tokens_and_by_more() -> None:
    pace = known(t64=0.001, t1024=0.003)
    assert [pace.seconds_of(tokens) for tokens in (64, 100, 128, 129, 512, 1024, 4096)] == pytest.approx(
        [0.001, 0.002, 0.002, 0.003, 0.003, 0.003, 0.012]
    )
    assert pace.seconds_of(3) == 0.001 and Pace().seconds_of(64) == 0


def test_what_is_measured_last_counts_most_and_one_measure_does_not_decide() -> None:
    pace = known(decode=0.010)
    pace.saw_decode(0.020)
    assert pace.decode_seconds == pytest.approx(0.013)
    for _ in range(40):
        pace.saw_decode(0.020)
        pace.saw_slice(64, 3, 0.006)
    assert pace.decode_seconds == pytest.approx(0.020, rel=1e-4)
    assert pace.seconds_of(64) == pytest.approx(0.002, rel=1e-4)


def test_what_a_step_takes_alone_is_asked_again_after_some_slices() -> None:
    pace = Pace()
    assert pace.wants_quiet
    pace.saw_decode(0.010)
    for _ in range(Pace.LASTS):
        assert not pace.wants_quiet
        pace.saw_slice(64, 1, 0.001)
    assert pace.wants_quiet
    pace.saw_decode(0.010)
    assert not pace.wants_quiet and not Fixed(9).wants_quiet


def test_what_can_not_be_is_forgotten_when_a_step_is_asked_again() -> None:
    """Twice the tokens take at most twice the time plus noise; a longer measurement included
    compile time and is dropped."""
    pace = known(decode=0.010, s64=0.001, s128=0.0039, s256=0.300, s1024=9.0)
    pace.saw_decode(0.010)
    assert set(pace.layer_seconds) == {64, 128, 1024} and pace.tokens(2048) == 256, (
        "1024 has no half to be compared with"
    )


def test_a_slice_that_is_hidden_costs_a_little() -> None:
    pace = known(decode=0.010)
    pace.saw_slice(64, 4, -0.003)
    assert pace.seconds_of(64) == pytest.approx(0.0001 / 4)


def test_a_budget_that_was_asked_for_stays_as_it_is() -> None:
    pace = Fixed(500)
    pace.saw_decode(9.0)
    pace.saw_slice(1, 1, 9.0)
    assert pace.budget(7) == 500 and pace.tokens(2048) == 2048


def test_where_each_step_takes_its_own_time_a_step_behind_a_slice_is_not_counted() -> None:
    slicing = Slicing(make_limits(sliced_layers=4))
    assert isinstance(slicing.pace, Pace)
    slicing.observe(BatchRecord(1, [], SLOTS, seconds=0.5))
    slicing.observe(BatchRecord(2, [], SLOTS, spans=[(0, 5)], seconds=7.0))
    slicing.observe(BatchRecord(3, [], SLOTS, spans=[(0, 50)], layers=(1, 3), sliced_tokens=50, seconds=0.1))
    slicing.observe(BatchRecord(4, [], SLOTS, seconds=0.9))
    slicing.observe(BatchRecord(5, [], SLOTS))
    assert (slicing.pace.decode_seconds, slicing.pace.layer_seconds) == (0.5, {64: 0.05})
    slicing.observe(BatchRecord(6, [], SLOTS, seconds=0.9))
    assert slicing.pace.decode_seconds == pytest.approx(0.62), "the step before was one of decode rows too"


def test_where_the_worker_runs_ahead_a_slice_costs_what_its_decode_step_took_longer() -> None:
    slicing = Slicing(make_limits(sliced_layers=4, runs_ahead=True))
    assert isinstance(slicing.pace, Pace)
    slice_of = {"spans": [(0, 50)], "layers": (1, 3), "sliced_tokens": 50, "seconds": 0.1}
    for step, ended in ((1, 10.0), (2, 10.5), (3, 11.0)):
        slicing.observe(BatchRecord(step, [], SLOTS, seconds=0.1, ended=ended))
    slicing.observe(BatchRecord(4, [], SLOTS, ended=11.1, **slice_of))
    slicing.observe(BatchRecord(5, [], SLOTS, seconds=0.1, ended=11.7))
    assert slicing.pace.decode_seconds == 0.5 and slicing.pace.layer_seconds[64] == pytest.approx(0.1)
    slicing.observe(BatchRecord(6, [], SLOTS, spans=[(0, 5)], seconds=0.1, ended=13.0))
    slicing.observe(BatchRecord(7, [], SLOTS, seconds=0.1, ended=19.0))
    assert slicing.pace.decode_seconds == 0.5, "a whole prompt came between"
    known = dict(slicing.pace.layer_seconds)
    for step in (8, 9):
        slicing.observe(BatchRecord(step, [], SLOTS, ended=19.1, **slice_of))
    slicing.observe(BatchRecord(10, [], SLOTS, seconds=0.1, ended=23.0))
    assert slicing.pace.layer_seconds == known, "two slices came between"


def test_the_pace_finds_what_hides_beside_a_step_whatever_a_layer_costs() -> None:
    """With a launch cost and a cost per token: after a few chunks a slice stays within its share,
    and chunks are as large as that allows."""
    for launch, token in ((0.0002, 1e-8), (0.00001, 2e-6), (0.0005, 1e-6), (0.00001, 1e-4)):
        pace, cost = known(decode=0.010), Cost(launch, token)
        for _ in range(12):
            tokens = pace.tokens(2048)
            layers = layers_now(tokens, pace.budget(tokens), 0, 32)
            pace.saw_slice(tokens, layers, cost.of(tokens) * layers)
        tokens = pace.tokens(2048)
        layers = layers_now(tokens, pace.budget(tokens), 0, 32)
        assert cost.of(tokens) * layers <= 0.0071 or (tokens, layers) == (Pace.LEAST_TOKENS, 1)
        assert tokens == 2048 or cost.of(2 * tokens) > 0.0035


@dataclass(frozen=True)
class Cost:
    """Seconds of a layer: a launch and a time per token."""

    launch: float
    token: float

    def of(self, tokens: int) -> float:
        """Seconds over `tokens` tokens."""
        return self.launch + self.token * tokens
