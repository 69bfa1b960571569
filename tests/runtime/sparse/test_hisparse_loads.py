"""The rows that decode steps miss are copied on a stream of their own: for the layer that chose
while it projects, for the layers that read the same choice while those before them compute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ci.lanes import Lane
from sglcore.runtime.hisparse import hisparse_coordinator, hisparse_loads
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.runtime.hisparse.hisparse_loads import Loads, without_newest
from sglcore.runtime.hisparse.hisparse_shape import SwapShape
from sglcore.runtime.hisparse.hisparse_staging import Copies
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.kv_rows import KeptRows, Place
from sglcore.runtime.memory.pools import ReqToTokenPool

PAGE, PAGES, TOP_K, SLOTS, STEPS = 4, 6, 3, (2, 1, 0), 8
GROUPS = MappingProxyType({1: (1, 2, 3), 4: (4,)})
"""The layers that read the choice of each indexer. The last row of a step is padding."""
COPY, WORK = 3, 10
"""Milliseconds of the simulated device: for the copies of a layer, and for its computation."""


@pytest.fixture
def device(lane: Lane) -> Iterator[torch.device]:
    """The device of the lane; with a simulated one, an unexpected fault fails the test."""
    module = sys.modules.get("sglcore_sim")
    found = None if module is None else module.current()
    if found is None:
        yield torch.device("cpu")
        return
    found.reset()
    yield torch.device(f"{found.kind.torch_name}:0")
    assert not found.faults


class Step:
    """Decode steps of layers that store a row, choose, and read, over rows on the device, which
    plain torch can copy."""

    def __init__(self, device: torch.device, *, beside: bool = True, times: tuple[int, int] = (0, 0)) -> None:
        """`beside`: the copies have a stream of their own, where there are streams. `times`:
        milliseconds of the copies of a layer and of its work."""
        self.device, self.times = device, times
        module = sys.modules.get("sglcore_sim")
        self.sim = None if module is None else module.current()
        self.pool = ReqToTokenPool(2, (PAGES - 1) * PAGE, PAGE, str(device))
        pages = torch.randperm(2 * PAGES, generator=torch.Generator().manual_seed(1)).view(2, PAGES).int() + 1
        self.pool.page_table[1:] = pages.to(device)
        rows = (2 * PAGES + 1) * PAGE
        layers = [layer for group in GROUPS.values() for layer in group]
        self.stores = {layer: (torch.arange(rows * 2).view(rows, 2) + 1e4 * layer).to(device) for layer in layers}
        shape = SwapShape(
            names=dict.fromkeys(layers, "latent"),
            indexers=tuple(GROUPS),
            kept=KeptRows(2, torch.float32, Place.HOST_PAGES),
            top_k=TOP_K,
            buffer_rows=TOP_K + 1,
            page_size=PAGE,
            pages=PAGES,
            rooms=1 + (beside and device.type != "cpu"),
        )
        cells: Any = SimpleNamespace(rows=lambda layer, name: self.stores[layer])
        kernels = KernelTable().replace(copy_rows=self.copy)
        self.hisparse = HiSparseCoordinator(shape, self.pool, cells, kernels)
        self.slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)

    def copy(self, source: Tensor, target: Tensor, loads: Tensor, counts: Tensor) -> None:
        """`copy_rows` as a kernel that touches the rows that it copies, and no other."""
        if self.sim is None:
            KernelTable().copy_rows(source, target, loads, counts)
            return
        inside = torch.arange(loads.shape[2], device=loads.device) < counts.unsqueeze(1)
        # Row 0 is where padding stores; row 1 of page 0 is unused.
        taken, given = (
            loads[0].masked_fill(~inside, 1).flatten().long(),
            loads[1].masked_fill(~inside, 0).flatten().long(),
        )
        self.sim.busy(self.times[0])

        def run() -> None:
            target[given] = source[taken]

        self.sim.launch("copy_rows", run, reads=[(source, taken), loads, counts], writes=[(target, given)])

    def work(self) -> None:
        """What a layer computes."""
        if self.sim is not None:
            self.sim.busy(self.times[1])

    def run(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each layer the rows that it reads, and those that its store has. The layers
        that choose read the newest row in every second step."""
        lens = torch.tensor([9 + step, 12 + step, 1], dtype=torch.int32, device=self.device)
        places = self.places(lens - 1)
        for layer, readers in GROUPS.items():
            rows, loads, chosen = torch.empty(0), None, torch.empty(0)
            for reader in readers:
                if loads is not None:
                    self.hisparse.before_store(reader, loads)
                self.store(reader, places, step)
                if reader == layer:
                    chosen = self.chosen(lens, step + layer)
                    rows, loads = self.hisparse.swap_in(layer, chosen, self.slots, places)
                self.work()
                assert loads is not None
                buffer = self.hisparse.load(reader, loads)
                is_real = (chosen >= 0)[:2, :, None]
                where = self.places(chosen.clamp(min=0).T).T
                yield buffer[rows.clamp(min=0)[:2].long()] * is_real, self.stores[reader][where[:2]] * is_real

    def places(self, entries: Tensor) -> Tensor:
        """Return the rows of the pool of entries [..., B]."""
        entries, slots = entries.long(), self.slots.long().expand(entries.shape)
        return self.pool.page_table[slots, entries // PAGE].long() * PAGE + entries % PAGE

    def store(self, layer: int, places: Tensor, step: int) -> None:
        """Store the row of each request."""
        store, made = self.stores[layer], torch.full((len(SLOTS), 2), 1e6 * layer + step, device=self.device)

        def run() -> None:
            store[places] = made

        if self.sim is None:
            run()
        else:
            self.sim.launch("store", run, reads=[made, places], writes=[(store, places)])

    def chosen(self, lens: Tensor, seed: int) -> Tensor:
        """Return int32 [B, K]: different entries of each request."""
        older = (torch.arange(1, TOP_K + 1, device=self.device) * (seed + 1)).expand(len(SLOTS), -1) % (lens - 1)[
            :, None
        ].clamp(min=1)
        first = torch.where(torch.tensor(seed % 2 == 0, device=self.device), lens - 1, lens - 2).clamp(min=0)
        both = torch.cat((older[:, 1:], first[:, None]), 1)
        same = (both[:, :, None] == both[:, None, :]).tril(-1).any(2)
        return both.masked_fill(same, -1).int()


def check(device: torch.device) -> None:
    """Compare what all layers of all steps read with what was stored. All is read at the end, so
    that the host waits for nothing in between."""
    step = Step(device)
    found = [(read.clone(), right.clone()) for number in range(STEPS) for read, right in step.run(number)]
    for read, right in found:
        assert torch.equal(read.cpu(), right.cpu())


@pytest.mark.needs("device")
def test_every_layer_reads_what_was_stored(device: torch.device) -> None:
    check(device)


def copies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies do not wait for the choice, nor for who reads the buffers."""
    monkeypatch.setattr(hisparse_loads, "follow", lambda copying, other: None)


def reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers do not wait for their copies."""
    monkeypatch.setattr(hisparse_loads, "wait_for_loads", lambda reading, done: None)


def stores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later layer does not wait for copies that read the rows among which it stores."""
    monkeypatch.setattr(hisparse_loads.LoadStream, "before_store", lambda self, layer_id, loads: None)


@pytest.mark.needs("streams", "simulator")
@pytest.mark.parametrize("defect", [copies_at_once, reads_at_once, stores_at_once], ids=lambda each: each.__name__)
def test_a_wait_that_is_missing_is_a_race(
    defect: Callable[[pytest.MonkeyPatch], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with sys.modules["sglcore_sim"].current().expect("race"):
        check(device)


def forgets_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later layers never get the row that the step stores."""
    split = hisparse_loads.without_newest

    def without(copies: Copies, places: Tensor) -> Loads:
        found = split(copies, places)
        return replace(found, newest=Copies(copies.loads[:, :, :1], found.all[0].counts * 0))

    monkeypatch.setattr(hisparse_coordinator, "without_newest", without)


def copies_the_newest_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later layers get that row as it was before."""
    forgets_the_newest(monkeypatch)
    without = hisparse_coordinator.without_newest
    monkeypatch.setattr(
        hisparse_coordinator, "without_newest", lambda copies, places: replace(without(copies, places), older=copies)
    )


@pytest.mark.needs("streams", "simulator")
@pytest.mark.parametrize("defect", [forgets_the_newest, copies_the_newest_ahead], ids=lambda each: each.__name__)
def test_a_newest_row_that_later_layers_do_not_get_is_caught(
    defect: Callable[[pytest.MonkeyPatch], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        check(device)


@pytest.mark.needs("host")
def test_only_the_newest_row_is_left_for_later_and_no_row_is_copied_twice() -> None:
    """Missed first, in the middle, last and alone, and not missed at all."""
    cases = (
        ([5, 6, 7], 3, 5),
        ([6, 5, 7], 3, 5),
        ([6, 7, 5], 3, 5),
        ([5, -1, -1], 1, 5),
        ([6, 7, -1], 2, 5),
        ([-1] * 3, 0, 5),
    )
    taken = torch.tensor([rows for rows, _, _ in cases], dtype=torch.int32)
    counts = torch.tensor([count for _, count, _ in cases], dtype=torch.int32)
    found = without_newest(
        Copies(torch.stack((taken, taken + 100)), counts), torch.tensor([place for *_, place in cases])
    )
    assert found.older is not None and found.newest is not None
    for row, (rows, count, place) in enumerate(cases):
        has = place in rows
        older, left = int(found.older.counts[row]), int(found.newest.counts[row])
        assert (older, left) == (count - has, int(has))
        assert sorted(found.older.loads[0, row, :older].tolist()) == sorted(set(rows) - {place, -1})
        assert (found.older.loads[1, row, :older] == found.older.loads[0, row, :older] + 100).all()
        assert found.newest.loads[:, row, :left].flatten().tolist() == [place, place + 100] * has


def milliseconds(device: torch.device, *, beside: bool) -> float:
    """Return the simulated time of one step, in which nothing but copies and work takes time."""
    from sglcore_sim.clocks import Speeds, virtual_time

    step = Step(device, beside=beside, times=(COPY, WORK))
    stream: Any = step.hisparse._loads._stream
    assert step.sim is not None
    with virtual_time(step.sim, Speeds(flops=1e30, bandwidth=1e30, start=0, launch=0)) as clock:
        if beside:
            clock.share(stream, 0.0)
        for _ in step.run(0):
            pass
        torch.accelerator.synchronize()
        return clock.now * 1e3


@pytest.mark.needs("streams", "simulator")
def test_copies_run_while_layers_compute(device: torch.device) -> None:
    """On the stream of the layers each copy adds its time. On its own, the copies of older rows
    add none; what remains are the newest rows of the layers without an indexer."""
    layers = sum(map(len, GROUPS.values()))
    assert milliseconds(device, beside=False) == pytest.approx(layers * (COPY + WORK))
    later = layers - len(GROUPS)
    assert milliseconds(device, beside=True) == pytest.approx(layers * WORK + later * COPY)
