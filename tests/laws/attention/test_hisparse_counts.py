"""The reported hisparse counts are correct: entries chosen, found on the device and copied, and
steps that waited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from sglcore.runtime.hisparse.hisparse_caches import SlotCaches
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.runtime.hisparse.hisparse_shape import SwapShape
from sglcore.step.hisparse_config import SwapSizes
from sglcore.worker.swap_counts import SwapCounts
from tests.kernels.test_reference_hisparse import Cache
from tests.laws.attention.test_hisparse_laws import Case
from tests.laws.engine import TokenEngine, random_prompts

PROMPTS = random_prompts(4, (50, 9, 33, 21, 3))


@pytest.fixture(scope="module", params=["compressed", "shared"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp("hisparse"))


class Seen:
    """Counts what the coordinator of an eager engine does, in its own calls."""

    def __init__(self, hisparse: HiSparseCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = self.missed = self.copied = self.by_hand = 0
        self.steps = list[bool]()
        self._caches = dict[tuple[int, int], Cache]()
        self._hisparse, self._first = hisparse, hisparse.shape.indexers[0]
        self._swap_in, self._copy, self._plan = hisparse.swap_in, hisparse._loads._copy, hisparse.plan
        self._enter = hisparse.enter
        monkeypatch.setattr(hisparse, "enter", self.enter)
        monkeypatch.setattr(hisparse, "swap_in", self.swap_in)
        monkeypatch.setattr(hisparse, "plan", self.plan)
        monkeypatch.setattr(hisparse._loads, "_copy", self.copy)
        monkeypatch.setattr(hisparse._rooms, "_copy", self.copy)

    def plan(self, batch: Any) -> Any:
        self.steps.append(False)
        return self._plan(batch)

    def enter(self, slots: Any) -> None:
        self._enter(slots)
        self._caches = {key: cache for key, cache in self._caches.items() if key[1] not in slots.tolist()}

    def swap_in(self, layer_id: int, chosen: Any, slots: Any, places: Any, is_second: bool) -> Any:
        rows, loads = self._swap_in(layer_id, chosen, slots, places, is_second)
        for slot, entries in zip(slots.tolist(), chosen.tolist(), strict=True):
            empty = Cache([(place, -1) for place in range(self._hisparse.shape.buffer_rows)])
            cache = self._caches.setdefault((layer_id, slot), empty)
            cache.read([entry for entry in entries if entry >= 0])
            self.by_hand += len(cache.loaded)
        self.rows += int((chosen >= 0).sum())
        self.missed += sum(int(copies.counts.sum()) for copies in loads.all)
        return rows, loads

    def copy(self, source: Any, target: Any, loads: Any, counts: Any) -> None:
        self._copy(source, target, loads, counts)
        self.copied += int(counts.sum()) * source[0].nbytes
        self.steps[-1] |= int(counts.sum()) > 0

    @property
    def stored(self) -> int:
        """Bytes of host entries that are not NaN; page 0 is padding and not counted."""
        rows = [store[self._hisparse.shape.rows_per_page :] for store in self._hisparse._stores.values()]
        return sum(int((~each.isnan()).all(1).sum()) * each[0].nbytes for each in rows)

    @property
    def counts(self) -> SwapCounts:
        return SwapCounts(self.rows, self.rows - self.missed, self.copied, self.stored, sum(self.steps))


def counted(case: Case, monkeypatch: pytest.MonkeyPatch, rows: int) -> tuple[SwapCounts, SwapCounts]:
    """Run texts in chunks, some together, and return the reported and the observed counts. No page
    is evicted before the last text has its pages. A cache by hand for each indexer and request must
    miss the same number of entries."""
    engine = case.engine(rows, graph="off", max_requests=5)
    hisparse = engine.worker.runner.attn_backend.hisparse
    assert isinstance(hisparse, HiSparseCoordinator)
    seen = Seen(hisparse, monkeypatch)
    engine.run(PROMPTS, 9, stagger=1)
    assert seen.missed == seen.by_hand
    return engine.recorder.swaps, seen.counts


@pytest.mark.needs("host_rows", "host")
def test_what_is_told_is_what_happened(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four more places than chosen entries, where the eviction order matters, and with 200,
    where an entry is missing once."""
    few = counted(case, monkeypatch, case.top_k + 4)
    many = counted(case, monkeypatch, 200)
    assert few[0] == few[1] and many[0] == many[1]
    assert 0 < few[0].hits < many[0].hits < many[0].rows == few[0].rows
    assert few[0].stored == many[0].stored < many[0].loaded < few[0].loaded


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(kind, marks=pytest.mark.needs("host_rows", f"graphs.{kind}"))
        for kind in ("full", "breakable", "piecewise")
    ],
)
def test_graphs_tell_the_same(case: Case, graph: str) -> None:
    """Padding rows count nothing."""

    def told(engine: TokenEngine) -> SwapCounts:
        engine.run(PROMPTS, 9, stagger=2)
        return engine.recorder.swaps

    assert told(case.engine(case.top_k, graph=graph)) == told(case.engine(case.top_k, graph="off")) != SwapCounts()


@pytest.mark.needs("host_rows", "host")
def test_all_that_lies_on_the_device_is_counted_not_at_all(case: Case) -> None:
    engine = case.engine(case.top_k, graph="off", hisparse="off")
    engine.run(PROMPTS[:2], 3)
    assert engine.recorder.swaps == SwapCounts()


def forgets_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: does not count the misses of a batch's last request."""
    count = HiSparseCoordinator.count

    def counted(self: HiSparseCoordinator, batch: Any) -> Any:
        self.caches.missed[:, len(batch.slots) - 1] = 0
        return count(self, batch)

    monkeypatch.setattr(HiSparseCoordinator, "count", counted)


def counts_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: counts rows of an earlier, larger batch again."""
    monkeypatch.setattr(SlotCaches, "take_counts", lambda self: self.missed.sum(1))


def one_layer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: ignores copies for layers that share another layer's choice."""
    sizes: Any = SwapShape.sizes.fget  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(
        SwapShape, "sizes", property(lambda self: replace(found := sizes(self), layers=(1,) * len(found.layers)))
    )


def chooses_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: counts `top_k` entries even for texts that are shorter."""
    monkeypatch.setattr(SwapSizes, "chosen", lambda self, lens: len(self.layers) * self.top_k * len(lens))


def stores_prompts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: counts a chunk together with the tokens before it."""
    stored = SwapSizes.stored
    monkeypatch.setattr(
        SwapSizes, "stored", lambda self, batch: stored(self, replace(batch, prefix_lens=batch.prefix_lens * 0))
    )


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize(
    "defect",
    [forgets_the_last_row, counts_what_was_before, one_layer_each, chooses_of_all_tokens, stores_prompts_twice],
    ids=lambda each: each.__name__,
)
def test_a_count_that_is_wrong_is_caught(
    tmp_path: Any, defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("shared", tmp_path)
    defect(monkeypatch)
    told, seen = counted(case, monkeypatch, case.top_k)
    assert told != seen
