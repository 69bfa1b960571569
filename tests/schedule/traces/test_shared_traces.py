"""Random traces on a worker with window pages that share memory with the others: it fails where a
page is read after the other kind has taken it. Schedulers with one planted bug must be caught."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.cache.shared_pages import SharedPages
from sglcore.schedule.cache.window_pages import Windows
from tests.schedule.trace import Trace, check_caught, plant, play, with_shared_pages
from tests.schedule.traces.test_slice_traces import by_slices
from tests.schedule.traces.test_state_traces import draw as draw_conversations

SEEDS = range(4000, 4300)


def draw(seed: int) -> Trace:
    """A trace with shared pages; most late requests continue the text of an earlier one. Some keep
    a state too, and some prompts run in slices of layers."""
    trace, rnd = draw_conversations(seed), Random(seed)
    limits = trace.limits if rnd.random() < 0.2 else replace(trace.limits, keeps_state=False, num_snapshots=0)
    trace = replace(trace, limits=with_shared_pages(rnd, limits))
    return by_slices(rnd, trace) if rnd.random() < 0.15 else trace


def test_the_traces_reach_what_they_are_meant_to_reach() -> None:
    names = ("hits", "evicted", "evicted windows", "retracted", "overlapped", "units", "states", "changed", "slices")
    seen = dict.fromkeys(names, 0)
    for seed in range(4000, 4060):
        print("seed", seed)
        kinds = Kinds()
        outcome = play(draw(seed), kinds.watch)
        stats, limits = outcome.scheduler.stats(), outcome.trace.limits
        seen["hits"] += stats.hit_tokens > 0
        seen["evicted"] += stats.evicted_pages > 0
        seen["evicted windows"] += stats.evicted_window_pages > 0
        seen["retracted"] += stats.retractions > 0
        seen["overlapped"] += outcome.worker.most_in_flight > 1 and stats.hit_tokens > 0
        seen["units"] += limits.window_unit > 1
        seen["states"] += stats.snapshot_hits > 0
        seen["slices"] += limits.sliced_layers > 0
        seen["changed"] += bool(kinds.pages & kinds.windows)
    assert min(seen.values()) >= 3, seen


class Kinds:
    """Records the pages that were taken as pages of all tokens, and in window pages."""

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.windows: set[int] = set()

    def watch(self, scheduler) -> None:
        """Watch a scheduler's shared pages."""
        shared = scheduler.running.memory.shared
        use_page, use_window = shared.use_page, shared.use_window

        def page(number: int) -> None:
            self.pages.add(number)
            use_page(number)

        def window(number: int) -> None:
            self.windows.update(shared.pages_of(number))
            use_window(number)

        shared.use_page, shared.use_window = page, window


class Silent(SharedPages):
    """Without an audit: the worker must notice the bug."""

    def audit(self, used, idle, windows, idle_windows) -> None:
        """Do nothing."""


class CountsOneKindAlone(SharedPages):
    """Whether window pages fit is asked as if there were no pages of all tokens."""

    def will_fit(self, pages: int, windows: int, back: int = 0, windows_back: int = 0) -> bool:
        return super().will_fit(pages, 0, back, windows_back)

    def is_free(self, pages: int, windows: int) -> bool:
        return super().is_free(pages, 0)


class IgnoresTheBorder(Silent):
    """Window pages come from the top, whether or not pages of all tokens have been there."""

    def take_windows(self, count: int) -> list[int]:
        held: set[int] = self.__dict__.setdefault("held", set())
        blocks = [block for block in range(self.num_blocks, 0, -1) if block not in held][:count]
        held.update(blocks)
        self._blocks = deque(block for block in self._blocks if block not in held)
        return [block * self.unit for block in blocks]

    def give_windows(self, windows: Sequence[int]) -> None:
        for window in windows:
            self.__dict__["held"].discard(window // self.unit)

    def use_window(self, window: int) -> None:
        """Do nothing."""

    def leave_window(self, window: int) -> None:
        """Do nothing."""


class TakesAPageNextToTheBlock(Silent):
    """A window page begins one page before its block."""

    def take_windows(self, count: int) -> list[int]:
        return [window - 1 for window in super().take_windows(count)]

    def give_windows(self, windows: Sequence[int]) -> None:
        super().give_windows([window + 1 for window in windows])

    def use_window(self, window: int) -> None:
        super().use_window(-(-window // self.unit) * self.unit)

    def leave_window(self, window: int) -> None:
        super().leave_window(-(-window // self.unit) * self.unit)


class TakesOnePageOfABlock(Silent):
    """The other pages of a window page stay free."""

    def take_windows(self, count: int) -> list[int]:
        taken = super().take_windows(count)
        for window in taken if self.unit > 1 else ():
            self._partial[window // self.unit] = list(range(window + 1, window + self.unit))
        return taken

    def give_windows(self, windows: Sequence[int]) -> None:
        for window in windows:
            self._partial.pop(window // self.unit, None)
        super().give_windows(windows)


class FreesWindowsTwice(SharedPages):
    def give_windows(self, windows: Sequence[int]) -> None:
        super().give_windows(windows)
        self._blocks.extend(window // self.unit for window in windows)


class FreesWindowsTwiceSilently(Silent, FreesWindowsTwice):
    """The same, without an audit."""


class LosesWindows(SharedPages):
    def give_windows(self, windows: Sequence[int]) -> None:
        super().give_windows(windows)
        for _ in windows:
            self._blocks.pop()


class FreesPagesAsWindows(Silent):
    """A block counts as whole as soon as one of its pages is free."""

    def _give_page(self, page: int) -> None:
        super()._give_page(page)
        block = page // self.unit
        if self._partial.pop(block, None):
            self._blocks.append(block)
            self.free.blocks += 1
            self.free.growth += 1


class ForgetsThatPagesAreUsed(SharedPages):
    """A prefix hit leaves the pages evictable."""

    def use_page(self, page: int) -> None:
        if self._used[page // self.unit] or self.unit > 1:
            super().use_page(page)


class AdmitsOverTheHit(SharedPages):
    """An admission does not see that its cached prefix is no longer evictable."""

    def fits_after(self, pages: int, windows: int, used: Sequence[int], used_windows: Sequence[int]) -> bool:
        return super().fits_after(pages, windows, (), ())


class AdmitsWithoutWindows(SharedPages):
    """An admission asks for pages of all tokens only."""

    def fits_after(self, pages: int, windows: int, used: Sequence[int], used_windows: Sequence[int]) -> bool:
        return super().fits_after(pages, 0, used, used_windows)


class EvictsWindowsAlone(Memory):
    """Room is made by eviction of window pages only."""

    def _make_room(self, count: int) -> None:
        assert self.shared is not None
        while not self.shared.is_free(count, count):
            assert self.windows.oldest is not None, "no window page is evictable"
            self.windows.evict()


class KeepsUnusedWindowsClosed(Windows):
    """A window page that no request uses any more does not become evictable."""

    def _drop(self, page: int) -> None:
        shared, self._shared = self._shared, None
        super()._drop(page)
        self._shared = shared


SHARED, MEMORY, WINDOWS = "running.memory.shared", "running.memory", "running.memory.windows"
MUTANTS = (
    (CountsOneKindAlone, SHARED, "window pages wanted"),
    (IgnoresTheBorder, SHARED, "another request's tokens"),
    (TakesAPageNextToTheBlock, SHARED, "half a unit"),
    (TakesOnePageOfABlock, SHARED, "another request's tokens"),
    (FreesWindowsTwice, SHARED, "lost or held twice"),
    (FreesWindowsTwiceSilently, SHARED, "another request's tokens"),
    (LosesWindows, SHARED, "lost or held twice"),
    (FreesPagesAsWindows, SHARED, "another request's tokens"),
    (ForgetsThatPagesAreUsed, SHARED, "the room is"),
    (AdmitsOverTheHit, SHARED, "are promised"),
    (AdmitsWithoutWindows, SHARED, "are promised"),
    (EvictsWindowsAlone, MEMORY, "no window page is evictable"),
    (KeepsUnusedWindowsClosed, WINDOWS, "the room is"),
)


@pytest.mark.parametrize(("kind", "path", "message"), MUTANTS)
def test_a_planted_bug_is_caught_by_some_trace(kind: type, path: str, message: str) -> None:
    check_caught(draw, SEEDS, plant(kind, path), message)
