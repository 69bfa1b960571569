"""When micro-batches are faster: the cost model of a layer, at its edges and by enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from sglcore.runtime.overlap.interleave import pause, take_turns
from sglcore.runtime.overlap.micro_batch_cost import STAGGERS, Affine, LayerCost, in_turns

US = 1e-6


def cost(fixed: float, each: float, alpha: float, beta: float) -> LayerCost:
    return LayerCost(Affine(fixed, each), Affine(alpha, beta))


def test_halves_take_the_longer_of_computing_and_waiting() -> None:
    layer = cost(0.0, 1 * US, 0.0, 1 * US)
    assert layer.whole(100) == pytest.approx(200 * US)
    assert layer.halves(100) == pytest.approx(100 * US)
    assert layer.hideable(100) == pytest.approx(100 * US)


def test_what_is_there_for_any_number_of_rows_is_paid_twice() -> None:
    layer = cost(50 * US, 0.5 * US, 0.0, 0.1 * US)
    assert layer.share(100) == pytest.approx(0.5)
    assert layer.whole(100) == pytest.approx(110 * US)
    assert layer.halves(100) == pytest.approx(150 * US)
    assert layer.least_rows(100) is None


def test_the_whole_is_faster_where_messages_cost_more_than_rows() -> None:
    layer = cost(0.0, 0.1 * US, 100 * US, 0.0)
    assert layer.least_rows(512) is None


def test_from_some_number_of_rows_on_halves_are_faster() -> None:
    layer = cost(20 * US, 1 * US, 60 * US, 0.1 * US)
    found = layer.least_rows(2048)
    assert found == 64
    assert layer.halves(64) < layer.whole(64) and layer.halves(32) >= layer.whole(32)


def test_the_least_is_a_power_of_two_from_which_on_all_are_faster() -> None:
    rng = np.random.default_rng(4)
    for _ in range(10_000):
        layer, most = cost(*rng.random(4) * (100 * US, US, 100 * US, US)), int(rng.integers(1, 5000))
        found = layer.least_rows(most)
        powers = [1 << place for place in range(1, 13) if 1 << place <= most]
        faster = [rows for rows in powers if layer.halves(rows) < layer.whole(rows)]
        if found is None:
            assert not powers or powers[-1] not in faster
        else:
            assert found in powers and all(rows in faster for rows in powers if rows >= found)


def test_what_halves_save_is_what_they_hide_less_what_is_paid_twice() -> None:
    rng = np.random.default_rng(5)
    for _ in range(1000):
        layer, rows = cost(*rng.random(4) * US), int(rng.integers(2, 5000))
        twice = layer.compute.fixed + layer.waiting.fixed
        assert layer.whole(rows) + twice - layer.hideable(rows) == pytest.approx(layer.halves(rows))


def test_a_line_through_two_measurements_has_no_number_below_zero() -> None:
    line = Affine.through((10, 3.0), (110, 4.0))
    assert (line.fixed, line.each) == (pytest.approx(2.9), pytest.approx(0.01))
    assert Affine.through((10, 4.0), (110, 3.0)) == Affine(3.0, 0.0)
    assert Affine.through((10, 1.0), (20, 5.0)).fixed == 0.0


class Played:
    """Two micro-batches run by the driver, on a device and a link that only add up time."""

    def __init__(self, pieces: list[tuple[float, float]]) -> None:
        self.pieces, self.device, self.link = pieces, 0.0, 0.0

    def half(self) -> float:
        for computing, waiting in self.pieces:
            self.device += computing
            self.link = arrives = max(self.link, self.device) + waiting
            pause()
            self.device = max(self.device, arrives)
        return self.device

    def seconds(self, stagger: int) -> float:
        return max(take_turns(self.half, self.half, stagger))


def test_the_model_of_turns_is_what_the_driver_does() -> None:
    rng = np.random.default_rng(6)
    for _ in range(2000):
        pieces = [(float(c), float(w)) for c, w in rng.random((int(rng.integers(1, 9)), 2))]
        computing, waiting = (2 * sum(each) for each in zip(*pieces, strict=True))
        for stagger in STAGGERS:
            found = in_turns(pieces, stagger)
            assert found == pytest.approx(Played(pieces).seconds(stagger))
            assert max(computing, waiting) <= found + 1e-9 <= computing + waiting + 2e-9


def test_the_first_half_is_ahead_where_that_pairs_unlike_pieces() -> None:
    """A long wait after a short piece is hidden by the other micro-batch's long piece."""
    unlike = LayerCost(Affine(0.0, 1 * US), Affine(0.0, 1 * US), ((0.3, 0.0), (0.6, 0.3), (0.1, 0.7)))
    times = [in_turns(unlike.pieces(50, 24), stagger) for stagger in STAGGERS]
    assert unlike.stagger(100, 24) == 1 and times[1] < 0.9 * times[0]
    assert unlike.halves(100) == pytest.approx(times[1] / 24, rel=0.05)
    assert LayerCost(Affine(0.0, 1 * US), Affine(0.0, 1 * US)).stagger(100, 24) == 0, "the fewest that are as good"


TABLE = {
    0.0: {0.25: 1.27, 0.5: 1.51, 1.0: 1.45, 2.0: 1.28},
    0.2: {0.25: 1.06, 0.5: 1.26, 1.0: 1.38, 2.0: 1.24},
    0.5: {0.25: 0.85, 0.5: 1.01, 1.0: 1.28, 2.0: 1.19},
}
"""{share of computation that does not shrink with the rows: {waits relative to computation: speedup
of micro-batches}}, in 60 layers with other piece sizes."""


@pytest.mark.parametrize("share", TABLE)
def test_halves_are_faster_and_slower_where_they_are_for_pieces_of_any_size(share: float) -> None:
    for waits, wanted in TABLE[share].items():
        parts = (0.4, 0.5), (0.6, 0.5)
        layer = LayerCost(Affine(share * 100 * US, (1 - share) * US), Affine(0.0, waits * US), parts)
        best = min(in_turns(layer.pieces(50, 60), stagger) for stagger in STAGGERS)
        found = 60 * layer.whole(100) / best
        assert (found > 1) == (wanted > 1) or abs(wanted - 1) < 0.05
        assert found == pytest.approx(wanted, rel=0.3)
