"""The cost model of collectives: cases computed by hand, monotonicity, and a fit that recovers its
parameters."""

from __future__ import annotations

from typing import Any

import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.layouts import link_costs
from tests.planted import planted

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)


def check_one_level(module: Any) -> None:
    """alpha 3, beta 2: four ranks, 100 bytes."""
    link = module.Link(3.0, 2.0)
    assert link.all_reduce(4, 100) == 2 * 3 * 3 + 2 * 3 / 4 * 100 * 2  # 318, by a ring; 603 if all read all
    assert link.all_reduce(4, 1) == 3 + 3 * 1 * 2  # 9, all read all; 21 by a ring
    assert link.all_gather(4, 100) == 3 * 3 + 3 / 4 * 100 * 2
    assert link.all_to_all(8, 100) == 3 * 3 + 7 / 8 * 100 * 2
    assert link.all_to_all(6, 0) == 3 * 3
    assert link.broadcast(5, 100) == 3 * (3 + 100 * 2)
    costs = (link.all_reduce, link.all_gather, link.all_to_all, link.broadcast)
    assert all(cost(1, 100) == 0 for cost in costs), "one rank has nobody to wait for"


def check_two_levels(module: Any) -> None:
    """Four ranks on each of two hosts: alpha 1 and beta 1 inside, 10 and 5 between."""
    both = module.Links(module.Link(1.0, 1.0), module.Link(10.0, 5.0), 4)
    assert both.levels(8) == (4, 2) and both.levels(2) == (2, 1)
    assert both.all_reduce(8, 800) == 2 * (3 + 600) + min(2 * 10 + 200 * 5, 10 + 200 * 5)
    assert both.all_gather(8, 800) == (10 + 100 * 5) + (3 + 600)
    assert both.all_to_all(8, 800) == (10 + 400 * 5) + (2 + 600)
    assert both.all_to_all(8, 800, 80) == (10 + 40 * 5) + (2 + 600)
    assert both.all_reduce(4, 800) == both.inside.all_reduce(4, 800)


def check_fit(module: Any) -> None:
    """A fit recovers a link's parameters; noise makes neither of them negative."""
    for alpha, beta in ((1e-5, 1e-9), (3e-4, 9e-10), (0.0, 1e-10), (2e-6, 0.0)):
        seconds = [2 * alpha + 1.5 * size * beta for size in SIZES]
        found = module.fitted(SIZES, seconds, 2, 1.5)
        assert found.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
        assert found.beta == pytest.approx(beta, rel=1e-6, abs=1e-18)
    falling = module.fitted(SIZES, [5e-6, 4e-6, 3e-6, 2e-6, 1e-6], 1, 1)
    steep = module.fitted(SIZES, [1e-9 * size * size for size in SIZES], 1, 1)
    assert falling.beta == 0 and steep.alpha == 0
    # The other one fits best alone: by sums of 1 / seconds or size / seconds, and of their squares.
    rates, parts = [1 / each for each in (5e-6, 4e-6, 3e-6, 2e-6, 1e-6)], [1e9 / size for size in SIZES]
    assert falling.alpha == pytest.approx(sum(rates) / sum(each * each for each in rates))
    assert steep.beta == pytest.approx(sum(parts) / sum(each * each for each in parts))


@pytest.mark.parametrize("check", [check_one_level, check_two_levels, check_fit])
def test_costs_are_those_that_are_worked_out_by_hand(check: Any) -> None:
    check(link_costs)


@pytest.mark.parametrize(
    ("check", "sound", "defect"),
    [
        (check_one_level, "2 * (n - 1) * self.alpha + 2", "2 * n * self.alpha + 2"),
        (check_one_level, "2 * (n - 1) / n * m", "(n - 1) / n * m"),
        (check_one_level, "min(ring, one_shot)", "ring"),
        (check_one_level, "min(ring, one_shot)", "max(ring, one_shot)"),
        (check_one_level, "ceil(log2(n)) * self.alpha + (n - 1)", "log2(n) * self.alpha + (n - 1)"),
        (check_one_level, "(n - 1) * self.alpha + (n - 1) / n", "self.alpha + (n - 1) / n"),
        (check_one_level, "* (self.alpha + m * self.beta)", "* self.alpha + m * self.beta"),
        (check_two_levels, "self.between.all_reduce(hosts, m / local)", "self.between.all_reduce(hosts, m)"),
        (check_two_levels, "2 * self.inside.all_gather(local, m)", "self.inside.all_gather(local, m)"),
        (check_two_levels, "self.between.all_gather(hosts, m / local)", "self.between.all_gather(hosts, m)"),
        (check_two_levels, "m if m_between is None else m_between", "m"),
        (check_fit, "(a * bb - b * ab) / determinant", "(a * bb - b * aa) / determinant"),
        (check_fit, "if alpha < 0:", "if alpha < -1:"),
        (check_fit, "if beta >= 0 else", "if beta >= -1 else"),
        (check_fit, "Link(0.0, b / bb)", "Link(0.0, beta)"),
        (check_fit, "Link(a / aa, 0.0)", "Link(alpha, 0.0)"),
    ],
)
def test_a_wrong_formula_is_caught(check: Any, sound: str, defect: str) -> None:
    with pytest.raises(AssertionError):
        check(planted(link_costs, sound, defect))


def test_times_of_two_processes_that_sum_over_loopback_are_fitted() -> None:
    """Medians measured once for 4 KB, 64 KB, 1 MB and 4 MB: about 0.3 ms and 1.1 GB/s."""
    found = link_costs.fitted([4096, 65536, 1 << 20, 1 << 22], [316e-6, 333e-6, 1.7e-3, 3.9e-3], 1, 1)
    assert found.alpha == pytest.approx(0.31e-3, rel=0.1) and 1 / found.beta == pytest.approx(1.1e9, rel=0.2)


def test_costs_grow_with_bytes_and_with_ranks() -> None:
    both = link_costs.Links(link_costs.Link(2e-6, 1 / 400e9), link_costs.Link(1e-5, 1 / 50e9), 8)
    for cost in (both.all_reduce, both.all_gather, both.all_to_all):
        for n in (2, 4, 8, 16, 32, 64):
            by_size = [cost(n, size) for size in SIZES]
            assert by_size == sorted(by_size)
        for size in SIZES:
            by_ranks = [cost(n, size) for n in (1, 2, 4, 8, 16, 32)]
            assert by_ranks == sorted(by_ranks)


def test_a_group_that_fills_a_part_of_a_host_is_refused() -> None:
    both = link_costs.Links(link_costs.Link(1, 1), link_costs.Link(1, 1), 8)
    with pytest.raises(ValueError, match="12 ranks do not fill hosts of 8"):
        both.levels(12)


def test_one_size_is_no_line() -> None:
    with pytest.raises(ConfigError, match="1 sizes were measured"):
        link_costs.fitted([8, 8], [1.0, 1.1], 1, 1)
