"""Pages of all tokens and window pages that share memory: they are handed out once, from both ends,
until nothing is left, and the counts say what fits."""

from __future__ import annotations

from itertools import count as numbers

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcore.schedule.cache.shared_pages import FullEnd, Room, SharedPages, WindowEnd


def test_both_kinds_begin_at_opposite_ends_and_meet() -> None:
    shared = SharedPages(6, 1, 0)
    assert (shared.take_pages(2), shared.take_windows(3)) == ([1, 2], [6, 5, 4])
    assert shared.take_pages(1) == [3]
    with pytest.raises(IndexError, match="1 pages wanted, 0 are free"):
        shared.take_pages(1)
    with pytest.raises(IndexError, match="1 window pages wanted, 0 are free"):
        shared.take_windows(1)
    shared.give_windows([5])
    assert shared.take_pages(1) == [5], "a page changes its kind"


def test_a_window_page_is_a_whole_block_and_the_first_block_is_never_taken() -> None:
    shared = SharedPages(11, 3, 0)
    assert (shared.num_blocks, shared.num_pages) == (3, 9)
    assert (shared.take_pages(4), shared.take_windows(1)) == ([3, 4, 5, 6], [9])
    assert not shared.is_free(0, 1) and shared.is_free(2, 0) and not shared.is_free(3, 0)
    shared.give_pages([6])
    assert shared.is_free(0, 1) and shared.take_windows(1) == [6]
    assert SharedPages(13, 3, 0).num_pages == 9, "what is left of a block stays unused"


@pytest.mark.parametrize("reserved", [0, 1])
def test_scattered_pages_leave_no_room_for_windows_unless_blocks_are_reserved(reserved: int) -> None:
    """Three requests take pages in turn, and one of them keeps its own."""
    shared = SharedPages(11, 3, reserved)
    taken = shared.take_pages(6 if reserved else 9)
    shared.give_pages([page for page in taken if page % 3])
    assert [page for page in range(3, 12) if page not in shared.free_pages()] == [3, 6, 9][: 3 - reserved]
    assert shared.is_free(0, 1) == bool(reserved)


def test_reserved_blocks_stay_whole() -> None:
    """Two pages in two blocks: a third block is for window pages only, whichever it is."""
    shared = SharedPages(7, 2, 1)
    taken = shared.take_pages(4)
    assert not shared.is_free(1, 0) and shared.is_free(0, 1)
    shared.give_pages([taken[0], taken[2]])
    assert shared.is_free(2, 1) and not shared.is_free(3, 0)
    assert shared.take_windows(1) == [6]
    assert sorted(shared.take_pages(2)) == [taken[0], taken[2]]


def test_what_is_evictable_counts_as_room_of_either_kind() -> None:
    shared = SharedPages(5, 2, 0)
    pages, windows = shared.take_pages(2), shared.take_windows(1)
    assert not shared.will_fit(1, 0)
    for page in pages:
        shared.leave_page(page)
    assert shared.will_fit(0, 1) and shared.will_fit(2, 0) and not shared.will_fit(1, 1)
    shared.leave_window(windows[0])
    assert shared.will_fit(2, 1) and not shared.will_fit(3, 1)
    assert not shared.is_free(1, 0)
    assert shared.fits_after(1, 1, pages[:1], []) and not shared.fits_after(2, 1, pages[:1], [])
    assert shared.fits_after(2, 0, [], windows) and not shared.fits_after(0, 2, [], windows)


def test_pages_in_flight_may_come_back_as_either_kind() -> None:
    shared = SharedPages(4, 1, 0)
    shared.take_pages(2)
    shared.take_windows(2)
    assert not shared.will_fit(1, 0) and shared.will_fit(1, 0, 1) and shared.will_fit(1, 1, 1, 1)
    assert not shared.will_fit(2, 1, 1, 1)


def test_the_two_ends_are_views_of_one_memory() -> None:
    shared = SharedPages(8, 2, 1)
    full, windows = FullEnd(shared), WindowEnd(shared)
    assert (full.num_pages, full.free, windows.num_pages, windows.free) == (6, 4, 3, 3)
    (window,) = windows.take(1)
    (page,) = full.take(1)
    assert (full.free, windows.free) == (3, 1)
    assert full.free_pages() == {3, 4, 5} and windows.free_pages() == {4} and (page, window) == (2, 6)
    full.give([page])
    windows.give([window])
    assert (full.free, windows.free) == (4, 3)


def fits(shared: SharedPages, owners: dict[int, str], pages: int, windows: int, reserved: int) -> bool:
    """Whether so much fits, by trying every number of blocks for pages. `owners` of taken pages."""
    blocks = [
        [owners.get(page, "") for page in shared.pages_of(b * shared.unit)] for b in range(1, shared.num_blocks + 1)
    ]
    whole, full = sum(not any(block) for block in blocks), sum("full" in block for block in blocks)
    holes = sum(block.count("") for block in blocks if "full" in block)
    more = [n for n in range(whole - windows + 1) if full + n <= shared.num_blocks - reserved]
    return bool(more) and pages <= holes + shared.unit * max(more)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 2), st.data())
def test_the_counts_are_those_of_the_blocks(unit: int, blocks: int, reserved: int, data: st.DataObject) -> None:
    """Random takes, releases and evictable pages against a list of owners."""
    shared, owners = SharedPages(unit * (blocks + 1) - 1, unit, reserved), dict[int, str]()
    pages, windows, idle, idle_windows = list[int](), list[int](), list[int](), list[int]()
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["page", "window", "give", "give window", "leave", "leave window", "use"])):
            case "page" if shared.is_free(1, 0):
                pages += shared.take_pages(1)
            case "window" if shared.is_free(0, 1):
                windows += shared.take_windows(1)
            case "give" if pages:
                shared.give_pages([pages.pop(data.draw(st.integers(0, len(pages) - 1)))])
            case "give window" if windows:
                shared.give_windows([windows.pop(data.draw(st.integers(0, len(windows) - 1)))])
            case "leave" if pages:
                idle.append(pages.pop(data.draw(st.integers(0, len(pages) - 1))))
                shared.leave_page(idle[-1])
            case "leave window" if windows:
                idle_windows.append(windows.pop())
                shared.leave_window(idle_windows[-1])
            case "use" if idle:
                pages.append(idle.pop())
                shared.use_page(pages[-1])
            case _:
                continue
        shared.audit(pages, idle, windows, idle_windows)
        for wanted, held in (
            (shared.will_fit, (pages, windows)),
            (shared.is_free, (pages + idle, windows + idle_windows)),
        ):
            owners = dict.fromkeys(held[0], "full")
            owners |= {page: "window" for window in held[1] for page in shared.pages_of(window)}
            for count, whole in ((1, 0), (0, 1), (1, 1), (unit, 1), (2 * unit + 1, 0), (1, 3)):
                assert wanted(count, whole) == fits(shared, owners, count, whole, min(reserved, blocks)), (count, whole)
        pairs = shared.open.pairs(shared.unit)
        assert next(n for n in numbers() if not shared.will_fit(n + 1, n + 1)) == pairs


@pytest.mark.parametrize(
    ("taken", "windows", "count", "helps"), [(0, 0, 1, False), (15, 2, 1, False), (15, 3, 3, True), (15, 5, 1, True)]
)
def test_a_window_page_helps_only_where_blocks_are_short(taken: int, windows: int, count: int, helps: bool) -> None:
    """Ten blocks of three pages; five of them never have pages of all tokens."""
    shared = SharedPages(32, 3, 5)
    shared.take_pages(taken)
    shared.take_windows(windows)
    before = shared.free.most(count, 3) if shared.free.blocks >= count else -1
    assert shared.helps_window(count) is helps
    more = Room(shared.free.pages + 3, shared.free.blocks + 1, shared.free.growth)
    assert (more.blocks >= count > shared.free.blocks or more.most(count, 3) > before) is helps
