"""Tests that process-wide memory limits are set at start and restored at the end."""

from __future__ import annotations

from sglcore_mlx.residency import CACHE_SHARE, Residency


class Limit:
    """A process-wide limit; setting it returns the old value."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, value: int) -> int:
        before, self.value = self.value, value
        return before


def test_the_recommended_working_set_is_wired_and_given_back() -> None:
    wired, cache = Limit(0), Limit(77)
    residency = Residency({"max_recommended_working_set_size": 16 << 30}, wired, cache)
    assert (wired.value, cache.value) == (16 << 30, (16 << 30) // CACHE_SHARE)
    assert residency.row is not None and "16.00 GiB wired" in residency.row.effective
    residency.close()
    residency.close()
    assert (wired.value, cache.value) == (0, 77)


def test_two_workers_leave_nothing_behind_whichever_ends_first() -> None:
    for first in (0, 1):
        wired, cache = Limit(0), Limit(77)
        both = [Residency({"max_recommended_working_set_size": 1600}, wired, cache) for _ in range(2)]
        both[first].close()
        both[1 - first].close()
        assert (wired.value, cache.value) == (0, 77)


def test_without_an_apple_gpu_nothing_is_changed() -> None:
    wired, cache = Limit(0), Limit(77)
    residency = Residency({"device_name": "a processor"}, wired, cache)
    assert residency.row is None and (wired.value, cache.value) == (0, 77)
    residency.close()
    assert (wired.value, cache.value) == (0, 77)
