"""Random traces on a worker with window pages, which fails where a list does not hold exactly the
prefix tokens that the window sees. Schedulers with one planted bug must be caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from sglcore.schedule.batch_builder import BatchBuilder, Chunk
from sglcore.schedule.cache.prefix_cache import Node
from sglcore.schedule.cache.request_pages import Holder, Memory
from sglcore.schedule.cache.window_pages import WindowList, Windows
from sglcore.schedule.request import Request
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.schedule.trace import Trace, check_caught, plant, play, with_windows
from tests.schedule.traces.test_state_traces import draw as draw_conversations

RARE = (2019, 2025, 2050, 2079, 2131, 2236, 3398)
"""Seeds of rare events: donated pages, and kept window pages that are never published."""
SEEDS = (*RARE, *range(2000, 2300))


def draw(seed: int) -> Trace:
    """A trace with a sliding window; most late requests continue the text of an earlier one, and
    some keep a state too."""
    trace, rnd = draw_conversations(seed), Random(seed)
    limits = trace.limits if rnd.random() < 0.2 else replace(trace.limits, keeps_state=False, num_snapshots=0)
    return replace(trace, limits=with_windows(rnd, limits))


def test_the_traces_reach_what_they_are_meant_to_reach() -> None:
    names = ("hits", "evicted", "lost with pages", "retracted", "overlapped", "long", "states")
    seen = dict.fromkeys(names, 0)
    for seed in range(40):
        print("seed", seed)
        outcome = play(draw(seed))
        stats, limits = outcome.scheduler.stats(), outcome.trace.limits
        seen["hits"] += stats.hit_tokens > 0
        seen["evicted"] += stats.evicted_window_pages > 0
        seen["lost with pages"] += stats.evicted_pages > 0
        seen["retracted"] += stats.retractions > 0
        seen["overlapped"] += outcome.worker.most_in_flight > 1 and stats.hit_tokens > 0
        seen["long"] += limits.num_window_pages < limits.max_model_len // limits.page_size
        seen["states"] += stats.snapshot_hits > 0
    assert min(seen.values()) >= 3, seen


@pytest.mark.parametrize("seed", RARE)
def test_what_is_rare_ends_as_if_every_request_had_run_alone(seed: int) -> None:
    play(draw(seed))


class Silent(Windows):
    """Without an audit: the worker must notice the bug."""

    def audit(self, holders, nodes) -> None:
        """Do nothing."""


class FreesAPageEarly(Silent):
    def first_seen(self, pages: int) -> int:
        return max(0, pages * self._page_size - self._seen + self._page_size) // self._page_size


class SeesATokenLess(Silent):
    """The window is one token too short: it misses its oldest token."""

    def first_seen(self, pages: int) -> int:
        return max(0, pages * self._page_size - self._seen + 1) // self._page_size


class FreesAPageLate(Windows):
    def slide(self, held: WindowList, cells: int) -> bool:
        return super().slide(held, cells - self._page_size)


class NeverSlidesRows(RunningRequests):
    """Decode rows keep all window pages."""

    def _slide_rows(self, rows: list[int]) -> None:
        """Do nothing."""


class KeepsTheEntry(Silent):
    """A node keeps naming an evicted window page."""

    def evict(self) -> None:
        node = self._nodes[next(iter(self._unused))]
        page = node.window_page
        super().evict()
        node.window_page = page

    def restore(self, held: WindowList, path: Sequence[Node], ends: set[int]) -> None:
        for node in path[self.first_seen(len(path)) :]:
            self._nodes.setdefault(node.window_page, node)
        super().restore(held, path, ends)


class SharesWithAHole(Silent):
    """Checks the last window page only; earlier ones may be missing."""

    def reachable(self, path: Sequence[Node]) -> int:
        return next((depth for depth in range(len(path), 0, -1) if path[depth - 1].window_page), 0)

    def restore(self, held: WindowList, path: Sequence[Node], ends: set[int]) -> None:
        super().restore(held, path, ends)
        held.pages = [page or 1 for page in held.pages]


class GivesAUsedPageAway(Silent):
    """A node's window page counts as unused as soon as one of its users drops it."""

    def _drop(self, page: int) -> None:
        super()._drop(page)
        if page in self._nodes:
            self._unused[page] = 0


class ForgetsUsers(Silent):
    """A prefix hit does not lock its window pages."""

    def restore(self, held: WindowList, path: Sequence[Node], ends: set[int]) -> None:
        super().restore(held, path, ends)
        for node in path[held.first :]:
            self._unused[node.window_page] = 0


class CountsNoUsers(Windows):
    def restore(self, held: WindowList, path: Sequence[Node], ends: set[int]) -> None:
        super().restore(held, path, ends)
        for node in path[held.first :]:
            node.window_users -= 1


class KeepsUsedPagesAmongTheUnused(Windows):
    def restore(self, held: WindowList, path: Sequence[Node], ends: set[int]) -> None:
        super().restore(held, path, ends)
        self._unused.update(dict.fromkeys(held.pages, 0))


class ForgetsWhatItKeeps(Windows):
    def slide(self, held: WindowList, cells: int) -> bool:
        kept = self.kept
        has_slid = super().slide(held, cells)
        self.kept = kept
        return has_slid


class LosesPagesOfWhoLeaves(Windows):
    def release(self, held: WindowList) -> None:
        held.pages = held.pages[1:]
        super().release(held)


class LosesKeptPages(Windows):
    def release(self, held: WindowList) -> None:
        self.kept -= len(held.kept)
        held.kept.clear()
        super().release(held)


class LosesPagesOfEvictedNodes(Windows):
    def withdraw(self, nodes) -> None:
        for node in nodes:
            self._nodes.pop(node.window_page, None)
            self._unused.pop(node.window_page, None)


class FreesPagesOfDuplicates(Silent):
    """A node that leaves the cache frees its window page, even if a request has it in its list."""

    def withdraw(self, nodes) -> None:
        for node in nodes:
            if node.window_page:
                del self._nodes[node.window_page]
                self._unused.pop(node.window_page, None)
                self._pool.give([node.window_page])


class PublishesBeforeCollect(Scheduler):
    def _advance_chunks(self, record: BatchRecord, chunks: list[tuple[Request, int]]) -> None:
        super()._advance_chunks(record, chunks)
        for request, _ in chunks:
            self.running.memory.publish(request, request.held.num_cells)


class PublishesWhatFailed(Memory):
    def release(self, request: Holder, cells: int) -> None:
        if not cells and request.held.node is not None:
            self._publish_windows(request, request.held.num_cells // self.page_size)
        super().release(request, cells)


class PublishesIncompletePages(Memory):
    def _publish_windows(self, request: Holder, full: int) -> None:
        super()._publish_windows(request, min(full + 1, len(request.held.pages)))


class PublishesOneNodeUp(Memory):
    def _path(self, request: Holder, first: int, end: int) -> list[Node | None]:
        return super()._path(request, max(first - 1, 0), max(end - 1, 0))


class StartsAPageOff(BatchBuilder):
    def _add_windows(self, batch: ScheduleBatch, rows, chosen, extended) -> None:
        super()._add_windows(batch, rows, chosen, extended)
        assert batch.window_starts is not None
        batch.window_starts += self._page_size * (batch.window_starts > 0)


class SendsNoListAfterADrop(BatchBuilder):
    """Sends a list only if the row's list grew."""

    def build(self, step: int, rows, chosen, chunks: list[Chunk], collected: int, saves=None) -> ScheduleBatch:
        rows.sent_window_starts[chosen] = rows.window_starts[chosen]
        for request, _ in chunks:
            request.run.sent_window_first = request.held.windows.first
        return super().build(step, rows, chosen, chunks, collected, saves)


class KeepsTheListOfBefore(BatchBuilder):
    """A steady batch repeats the lists of an earlier step."""

    def build_decode(self, step: int, rows, collected: int, saves=None) -> ScheduleBatch:
        before = self._steady
        kept = (None, None) if before is None else (before.window_offsets, before.window_pages)
        batch = super().build_decode(step, rows, collected, saves)
        if batch is before and batch.window_pages is None:
            batch.window_offsets, batch.window_pages = kept
        return batch


class SendsNoListsToSteadyRows(BatchBuilder):
    def build_decode(self, step: int, rows, collected: int, saves=None) -> ScheduleBatch:
        batch = super().build_decode(step, rows, collected, saves)
        batch.window_offsets = batch.window_pages = None
        return batch


BUILDER, RUNNING, MEMORY, WINDOWS = "_builder", "running", "running.memory", "running.memory.windows"
MUTANTS = (
    (FreesAPageEarly, WINDOWS, "sees from"),
    (SeesATokenLess, WINDOWS, "sees from"),
    (FreesAPageLate, WINDOWS, "are dead"),
    (NeverSlidesRows, RUNNING, "are dead"),
    (KeepsTheEntry, WINDOWS, "another request's tokens"),
    (SharesWithAHole, WINDOWS, "another request's tokens"),
    (GivesAUsedPageAway, WINDOWS, "another request's tokens"),
    (ForgetsUsers, WINDOWS, "another request's tokens"),
    (CountsNoUsers, WINDOWS, "window pages' users are"),
    (KeepsUsedPagesAmongTheUnused, WINDOWS, "unused window pages"),
    (ForgetsWhatItKeeps, WINDOWS, "window pages are kept"),
    (LosesPagesOfWhoLeaves, WINDOWS, "lost or held twice"),
    (LosesKeptPages, WINDOWS, "lost or held twice"),
    (LosesPagesOfEvictedNodes, WINDOWS, "lost or held twice"),
    (FreesPagesOfDuplicates, WINDOWS, "another request's tokens"),
    (PublishesBeforeCollect, "", "before its writer is collected"),
    (PublishesWhatFailed, MEMORY, "another request's tokens"),
    (PublishesIncompletePages, MEMORY, ""),
    (PublishesOneNodeUp, MEMORY, "another request's tokens"),
    (StartsAPageOff, BUILDER, "window pages"),
    (SendsNoListAfterADrop, BUILDER, "the device's list begins"),
    (KeepsTheListOfBefore, BUILDER, "a window list that the device has"),
    (SendsNoListsToSteadyRows, BUILDER, "window pages"),
)


@pytest.mark.parametrize(("kind", "path", "message"), MUTANTS)
def test_a_planted_bug_is_caught_by_some_trace(kind: type, path: str, message: str) -> None:
    check_caught(draw, SEEDS, plant(kind, path), message)
