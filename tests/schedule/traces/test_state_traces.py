"""Random traces of requests with recurrent states; the worker fails if a forward continues from
another state than its prefix's. Schedulers with one planted bug must be caught."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import MappingProxyType

import numpy as np
import pytest

from sglcore.schedule.batch_builder import BatchBuilder, Chunk
from sglcore.schedule.cache.prefix_cache import Node, PrefixCache
from sglcore.schedule.cache.request_pages import Holder, Memory
from sglcore.schedule.cache.state_snapshots import SavedStates, Snapshots
from sglcore.schedule.request import Ints, Request
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.schedule.fake_worker import Truth, make_params
from tests.schedule.trace import Trace, check_caught, draw_trace, plant, play

SEEDS = range(1000, 1300)


def draw(seed: int) -> Trace:
    """A trace in which requests keep a state and share prefixes: most late requests continue the
    text of an earlier one."""
    rnd = Random(seed)
    trace = draw_trace(rnd)
    truth = Truth(trace.limits.vocab_size)
    early = [request for _, request in trace.arrivals if request.task == "generate"]
    for index, request in enumerate(early[:4]):
        most = trace.limits.max_model_len - 2
        known = truth.tokens(request, min(len(request.prompt_ids) + rnd.randint(0, 12), most))
        prompt = np.array([*known, rnd.randint(0, 2)], dtype=np.int32)
        late = Request(f"late{index}", prompt, make_params(rnd.choice([2, 9, None])), seed=request.seed)
        trace.arrivals.append((rnd.randint(10, 40), late))
    places = rnd.choice([1, 2, 3, 6, 20])
    limits = replace(trace.limits, keeps_state=True, num_snapshots=places, window=0, num_window_pages=0)
    return replace(trace, prefix_cache=True, limits=limits)


def test_the_traces_reach_what_they_are_meant_to_reach() -> None:
    seen = dict.fromkeys(("hits", "evicted", "lost with pages", "retracted and restored", "full", "overlapped"), 0)
    for seed in range(60):
        print("seed", seed)
        outcome = play(draw(seed))
        stats = outcome.scheduler.stats()
        seen["hits"] += stats.snapshot_hits > 0
        seen["evicted"] += stats.evicted_snapshots > 0
        seen["lost with pages"] += stats.evicted_pages > 0
        seen["retracted and restored"] += stats.retractions > 0 and stats.snapshot_hits > 0
        seen["full"] += stats.free_snapshots == 0
        seen["overlapped"] += outcome.worker.most_in_flight > 1 and stats.snapshot_hits > 0
    assert min(seen.values()) >= 3, seen


class LeavesTheSlotAsItIs(BatchBuilder):
    """A new request starts with the state that the last request left in the slot."""

    def build(self, step: int, rows, chosen, chunks: list[Chunk], collected: int, saves=None) -> ScheduleBatch:
        batch = super().build(step, rows, chosen, chunks, collected, saves)
        if batch.state_from is not None:
            batch.state_from[batch.state_from == 0] = -1
        return batch


class RestoresAtEachChunk(BatchBuilder):
    """A later chunk restores the state of the first chunk again."""

    def build(self, step: int, rows, chosen, chunks: list[Chunk], collected: int, saves=None) -> ScheduleBatch:
        batch = super().build(step, rows, chosen, chunks, collected, saves)
        if batch.state_from is not None:
            batch.state_from[len(chosen) :] = [request.held.states.restored for request, _ in chunks]
        return batch


class SavesAgainInTheNextStep(BatchBuilder):
    """A steady batch repeats the state arrays of an earlier step, so that the snapshot includes
    more tokens."""

    def build_decode(self, step: int, rows, collected: int, saves: Ints | None = None) -> ScheduleBatch:
        before = self._steady
        kept = (None, None) if before is None else (before.state_from, before.state_to)
        batch = super().build_decode(step, rows, collected, saves)
        if batch is before and saves is None:
            batch.state_from, batch.state_to = kept
        return batch


class SavesATokenLate(RunningRequests):
    """Saves a state one token late, with the first token of the next page."""

    def save_states(self, chosen: np.ndarray | None) -> Ints | None:
        rows, size = self.rows, self._limits.page_size
        chosen = np.arange(len(rows.requests)) if chosen is None else chosen
        places = np.zeros(len(chosen), dtype=np.int32)
        for index in np.flatnonzero((rows.seq_lens[chosen] - 1) % size == 0):
            row = chosen[index]
            places[index] = self.memory.save(rows.requests[row], int(rows.seq_lens[row]) - 1)
        return places if places.any() else None


class PublishesSnapshotsBeforeCollect(Scheduler):
    """A snapshot is published as soon as its copy is planned."""

    def _advance_chunks(self, record: BatchRecord, chunks: list[tuple[Request, int]]) -> None:
        super()._advance_chunks(record, chunks)
        size = self.limits.page_size
        for request, _ in chunks:
            self.running.memory._publish_snapshots(request, request.held.num_cells // size, leaving=False)


class SharesPagesWithoutAState(Memory):
    """A shared prefix ends with the last shared page, whether it has a state or not."""

    def _shareable(self, path: list[Node]) -> int:
        return len(path)

    def _ends(self, request: Holder, known: list[Node]) -> set[int]:
        return set()


class PublishesWhatFailed(Memory):
    """Snapshots of a failed step stay."""

    def release(self, request: Holder, cells: int) -> None:
        if not cells:
            self._publish_snapshots(request, request.held.num_cells // self.page_size, leaving=True)
        super().release(request, cells)


class PublishesOneNodeUp(Memory):
    """A snapshot is published at the node one page earlier."""

    def _path(self, request: Holder, first: int, end: int) -> list[Node | None]:
        return super()._path(request, max(first - 1, 0), max(end - 1, 1))


class KeepsWhatWasEvicted(Snapshots):
    """A node keeps naming an evicted snapshot."""

    def _take(self) -> int:
        node = next(iter(self._nodes.values()), None)
        place = super()._take()
        if node is not None and place not in self._nodes and not node.snapshot:
            node.snapshot = place
        return place

    def audit(self, holders, nodes) -> None:
        """Do nothing: the worker must notice the bug."""


class RenewsWhatItPublished(Snapshots):
    """A published snapshot also stays the request's spare, and is handed out again."""

    def publish(self, saved: SavedStates, end: int, node: Node) -> None:
        place = saved.places[end]
        super().publish(saved, end, node)
        if node.snapshot == place:
            saved.places[end] = place
            saved.spare = end

    def release(self, saved: SavedStates) -> None:
        saved.places = {end: place for end, place in saved.places.items() if place not in self._nodes}
        super().release(saved)

    def audit(self, holders, nodes) -> None:
        """Do nothing: the worker must notice the bug."""


class GivesTheSpareAwayEarly(Snapshots):
    """The spare's snapshot is free as soon as it is written."""

    def save(self, saved: SavedStates, end: int) -> int:
        place = super().save(saved, end)
        if place and end == saved.spare:
            self._free.append(place)
        return place

    def audit(self, holders, nodes) -> None:
        """Do nothing: the worker must notice the bug."""


class LosesPlacesOfEvictedPages(Snapshots):
    def withdraw(self, nodes) -> None:
        for node in nodes:
            self._nodes.pop(node.snapshot, None)


class LosesPlacesOfWhoLeaves(Snapshots):
    def release(self, saved: SavedStates) -> None:
        saved.places.clear()
        super().release(saved)


class ForgetsTheCutsOfBefore(Snapshots):
    """Chunks are shortened again and again to end at a snapshot for which there is no room."""

    def shorten(self, saved: SavedStates, start: int, count: int) -> int:
        ends = [end for end in saved.cuts if end <= start + count]
        return min(ends) - start if ends else count

    def save(self, saved: SavedStates, end: int) -> int:
        if end in saved.cuts and not self._free and not self._nodes:
            return 0
        return super().save(saved, end)


class LosesReplacedPages(PrefixCache):
    def replace(self, node: Node, page: int) -> int:
        return super().replace(node, page) and page


BUILDER, RUNNING, MEMORY = "_builder", "running", "running.memory"
SNAPSHOTS, CACHE = "running.memory.snapshots", "running.memory.cache"
MUTANTS = (
    (LeavesTheSlotAsItIs, BUILDER, "the state of"),
    (RestoresAtEachChunk, BUILDER, "the state of"),
    (SavesAgainInTheNextStep, BUILDER, "the state of"),
    (SavesATokenLate, RUNNING, "the state of"),
    (PublishesSnapshotsBeforeCollect, "", "the state of"),
    (SharesPagesWithoutAState, MEMORY, "the state of"),
    (PublishesWhatFailed, MEMORY, "the state of"),
    (PublishesOneNodeUp, MEMORY, "the state of"),
    (KeepsWhatWasEvicted, SNAPSHOTS, "the state of"),
    (RenewsWhatItPublished, SNAPSHOTS, "the state of"),
    (GivesTheSpareAwayEarly, SNAPSHOTS, "the state of"),
    (LosesPlacesOfEvictedPages, SNAPSHOTS, "snapshots lost"),
    (LosesPlacesOfWhoLeaves, SNAPSHOTS, "snapshots lost"),
    (ForgetsTheCutsOfBefore, SNAPSHOTS, ""),
    (LosesReplacedPages, CACHE, "distinct pages"),
)


NEAREST = MappingProxyType(
    {
        SavesAgainInTheNextStep: 1032,
        PublishesSnapshotsBeforeCollect: 1106,
        PublishesWhatFailed: 1164,
    }
)
"""Seeds that caught bugs which most seeds miss. They are tried first, then all others."""


@pytest.mark.parametrize(("kind", "path", "message"), MUTANTS)
def test_a_planted_bug_is_caught_by_some_trace(kind: type, path: str, message: str) -> None:
    check_caught(draw, SEEDS, plant(kind, path), message, NEAREST.get(kind))
