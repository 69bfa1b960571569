"""Requests on a worker where window pages share memory with the other pages: who is admitted, what
is evicted, and who is preempted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglcore.core.errors import ConfigError
from sglcore.schedule.cache.shared_pages import least_pages
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import compose, make_limits

WINDOW = 9
"""A token sees eight others: at most three pages of four tokens."""


def make_drive(pages: int, unit: int = 1, **given: Any) -> Drive:
    """A drive with pages of 4 tokens, numbered up to `pages`, in blocks of `unit`."""
    room = {"max_model_len": 64, "max_batch_tokens": 16, "max_requests": 8, "window": WINDOW}
    blocks = (pages + 1) // unit - 1
    return Drive(**{**room, "num_pages": pages, "window_unit": unit, "num_window_pages": blocks, **given})


def run_one(drive: Drive, rid: str, prompt: list[int], max_tokens: int = 1) -> Request:
    """Run a request from its beginning to its end."""
    request = drive.add(rid, prompt, max_tokens)
    drive.run()
    assert request.output_ids == drive.alone(request)
    return request


@pytest.mark.parametrize("unit", [1, 2, 3])
@pytest.mark.parametrize(("page_size", "window", "budget"), [(1, 1, 1), (4, 9, 16), (2, 40, 7), (16, 2, 3)])
def test_one_request_of_full_length_always_fits(unit: int, page_size: int, window: int, budget: int) -> None:
    sizes: dict[str, Any] = {"max_model_len": 96, "page_size": page_size, "window": window, "max_batch_tokens": budget}
    least = least_pages(make_limits(**sizes, window_unit=unit))
    drive = make_drive(least, unit, **sizes)
    for rid, prompt in (("a", [1] * 90), ("b", [*[1] * 70, 9]), ("c", [2] * 90)):
        run_one(drive, rid, prompt, 200)
    assert drive.scheduler.stats().retractions == 0
    with pytest.raises(ConfigError, match=f"share holds {least - 1} pages; .* needs {least}"):
        Scheduler(replace(drive.limits, num_pages=least - 1), compose=compose)


def test_pages_that_windows_leave_are_taken_by_a_long_text() -> None:
    """Of 26 pages a text of 64 tokens takes 16, and its windows 7 at most: a split into halves
    would not hold it."""
    drive = make_drive(26, prefix_cache=False)
    drive.add("long", [1] * 50, 14)
    most = 0
    while drive.loop.has_work:
        drive.step()
        most = max(most, len(drive.scheduler.requests["long"].held.pages) if drive.scheduler.requests else 0)
    assert most == 16
    assert drive.scheduler.stats().free_pages == 26


def test_the_page_used_least_recently_gives_way_whichever_kind_it_is() -> None:
    """Each text leaves three pages and one or two window pages. The second text makes room for the
    last one, the first was used since."""
    drive = make_drive(18, max_model_len=32)
    for first in (1, 2, 3, 1, 4):
        run_one(drive, f"{drive.scheduler.stats().steps}", [first] * 13, 2)
    stats = drive.scheduler.stats()
    assert (stats.evicted_pages, stats.evicted_window_pages) == (3, 0), "its window pages went with its pages"
    assert run_one(drive, "kept", [1] * 13).cached_tokens == 12
    assert run_one(drive, "gone", [2] * 13).cached_tokens == 0


def test_window_pages_are_evicted_alone_while_their_text_is_in_use() -> None:
    """A request that continues a cached text has passed the window pages at its beginning."""
    drive = make_drive(26)
    run_one(drive, "text", [1] * 21)
    long = drive.add("long", [*[1] * 20, *[2] * 20], 20)
    drive.step(4)
    memory = drive.scheduler.running.memory
    assert memory.windows.unused and memory.cache.oldest() is None
    other = drive.add("other", [5] * 40, 4)
    drive.run()
    stats = drive.scheduler.stats()
    assert long.cached_tokens == 20 and stats.evicted_window_pages > 0
    assert (long.output_ids, other.output_ids) == (drive.alone(long), drive.alone(other))


@pytest.mark.parametrize("unit", [1, 2])
def test_who_is_short_of_either_kind_takes_from_the_youngest(unit: int) -> None:
    drive = make_drive(24 + 16 * (unit - 1) + 7, unit, prefix_cache=False)
    requests = [drive.add(rid, 4, 56) for rid in "abcd"]
    drive.run()
    assert drive.scheduler.stats().retractions > 0
    assert drive.finishes() == ["a", "b", "c", "d"]
    assert all(request.output_ids == drive.alone(request) for request in requests)


@pytest.mark.parametrize(("spare", "is_admitted"), [(0, True), (1, False)])
def test_an_admission_leaves_a_page_of_each_kind_to_who_runs(spare: int, is_admitted: bool) -> None:
    """The next request takes all other pages, three of them as window pages, or one more than
    that."""
    drive = make_drive(34, max_model_len=96, prefix_cache=False)
    drive.add("old", 16, 30)
    drive.step(2)
    (old,) = drive.scheduler.running.rows.requests
    left = 34 - len(old.held.pages) - len(old.held.windows.pages)
    drive.add("new", [9] * (4 * (left - 2 - 3) + spare), 1)
    drive.step()
    assert ("new" in drive.worker.rids[2]) is is_admitted
    drive.run()


def test_statistics_count_the_pages_of_window_pages_once() -> None:
    drive = make_drive(59, 3)
    drive.add("a", [1] * 20, 8)
    drive.step(3)
    stats = drive.scheduler.stats()
    (request,) = drive.scheduler.requests.values()
    assert (stats.num_pages, stats.num_window_pages) == (57, 19)
    held = stats.num_pages - stats.free_pages - stats.cached_pages
    cached = drive.scheduler.running.memory.cache.num_pages
    own = [page for page in request.held.windows.pages if page not in drive.scheduler.running.memory.windows._nodes]
    assert held == len(request.held.pages) - cached + 3 * (len(own) + len(request.held.windows.kept))
    drive.run()
    stats = drive.scheduler.stats()
    assert stats.free_pages + stats.cached_pages == 57 and stats.cached_pages == stats.unused_cached_pages
    assert drive.scheduler.running.memory.flush() > 0
    assert drive.scheduler.stats().free_pages == 57
