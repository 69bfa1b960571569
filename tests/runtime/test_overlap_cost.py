"""When halves are faster: the model of a layer, at its edges and by enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from sglcore.runtime.overlap.cost import Affine, LayerCost

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
