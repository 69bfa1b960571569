"""The page pool on its own."""

from __future__ import annotations

import pytest

from sglcore.schedule.cache.free_pages import PagePool


def test_pages_run_from_one_so_that_page_zero_stays_with_padding() -> None:
    assert sorted(PagePool(5).take(5)) == [1, 2, 3, 4, 5]


def test_taking_more_than_there_is_takes_nothing() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(IndexError, match="2 pages wanted, 1 are free"):
        pool.take(2)
    assert pool.free == 1


def test_taking_none_takes_none() -> None:
    pool = PagePool(3)
    assert pool.take(0) == []
    assert pool.free == 3


def test_pages_given_back_can_be_taken_again() -> None:
    pool = PagePool(3)
    taken = pool.take(3)
    pool.give(taken[:2])
    assert sorted(pool.take(2)) == sorted(taken[:2])
    assert pool.free_pages() == frozenset()
