"""In prefill with hisparse, rows go to the device one layer and a few requests at a time while
others are read: no room is read before it is filled, or refilled before it is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ci.lanes import Lane
from sglcore.runtime.hisparse import hisparse_staging
from sglcore.runtime.hisparse.hisparse_staging import StagingRooms, plan_parts
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import ReqToTokenPool

PAGE, PER_PAGE, MOST, LAYERS = 8, 2, 4, 3
BEFORE, LENGTHS, SLOTS = (9, 0, 16, 3), (7, 5, 1, 12), (3, 1, 4, 2)
"""Of each request: tokens before the step, tokens in the step, and slot."""


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


def stream_of(device: torch.device) -> torch.Stream | None:
    """The stream of the copies; None on the host."""
    return None if device.type == "cpu" else torch.Stream(device)


def table_of(device: torch.device) -> ReqToTokenPool:
    """A page table with the pages of slots in random order."""
    pool = ReqToTokenPool(4, (MOST - 1) * PAGE, PAGE, str(device))
    pages = torch.randperm(5 * MOST, generator=torch.Generator().manual_seed(1)).view(5, MOST).int()
    pool.page_table.copy_(pages)
    return pool


def batch_of(device: torch.device) -> Any:
    """A prefill batch with the fields that staging reads."""
    ends, lengths = np.array(BEFORE, np.int32) + np.array(LENGTHS, np.int32), np.array(LENGTHS, np.int32)
    on_device = {
        "seq_lens": ends,
        "extend_seq_lens": lengths,
        "req_pool_indices": np.array(SLOTS, np.int32),
    }
    tensors = {name: torch.from_numpy(values).to(device) for name, values in on_device.items()}
    return SimpleNamespace(**tensors, seq_lens_cpu=ends, extend_seq_lens_cpu=lengths, num_tokens=int(lengths.sum()))


def stores_of(device: torch.device) -> dict[int, Tensor]:
    """The rows of each layer, all different; on the device, so that plain torch can copy them."""
    rows = 5 * MOST * PER_PAGE
    return {layer: (torch.arange(rows * 3).view(rows, 3) + 1000.0 * layer).to(device) for layer in range(1, LAYERS + 1)}


def read_all(device: torch.device, steps: int = 2) -> list[Tensor]:
    """For each step, layer and part: the rows of all its tokens' requests, read from the staging
    room, [tokens, entries, 3]."""
    pool, stores, found = table_of(device), stores_of(device), []
    rooms = StagingRooms(stores, (MOST + 1) * PER_PAGE, device, KernelTable().copy_rows, stream_of(device))
    entries = torch.arange((MOST - 1) * PER_PAGE, device=device)
    for _ in range(steps):
        staged = plan_parts(batch_of(device), pool, PER_PAGE, rooms)
        assert len(staged.parts) > 1
        rooms.begin(staged)
        for layer in stores:
            for tokens, room in staged.read(layer):
                pages = staged.table[staged.owners[tokens].long()][:, entries // PER_PAGE].long()
                rows = (pages * PER_PAGE + entries % PER_PAGE).clamp(max=len(room) - 1)
                found.append(room[rows])
    return [each.cpu() for each in found]


def wanted(steps: int = 2) -> list[Tensor]:
    """The same rows from the stores; NaN after a request's last page."""
    pool, stores = table_of(torch.device("cpu")), stores_of(torch.device("cpu"))
    entries, owners = torch.arange((MOST - 1) * PER_PAGE), np.repeat(np.arange(len(SLOTS)), LENGTHS)
    found = []
    for store in stores.values():
        for owner in owners:
            pages = pool.page_table[SLOTS[owner]][entries // PER_PAGE].long()
            rows = store[pages * PER_PAGE + entries % PER_PAGE]
            last = -(-(BEFORE[owner] + LENGTHS[owner]) // PAGE) * PER_PAGE
            found.append(rows.masked_fill((entries >= last).unsqueeze(1), torch.nan))
    return found * steps


def check(found: list[Tensor]) -> None:
    """Compare all rows of each request with the stored ones."""
    one_by_one = [row for part in found for row in part]
    for row, right in zip(one_by_one, wanted(), strict=True):
        is_there = ~right.isnan()
        assert torch.equal(row[is_there], right[is_there])


@pytest.mark.needs("device")
def test_each_part_is_whole_where_its_plan_says(device: torch.device) -> None:
    """Two steps, three layers, and requests that begin, that continue within a page and that
    continue after one."""
    check(read_all(device))


def reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads do not wait for the copies."""
    monkeypatch.setattr(hisparse_staging, "wait_for", lambda waiting, other: None)


def fills_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go to a room that is still being read."""
    monkeypatch.setattr(hisparse_staging, "follow", lambda copying, other: None)


@pytest.mark.needs("streams", "simulator")
@pytest.mark.parametrize("defect", [reads_at_once, fills_at_once], ids=lambda each: each.__name__)
def test_a_wait_that_is_missing_is_a_race(
    defect: Callable[[pytest.MonkeyPatch], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with sys.modules["sglcore_sim"].current().expect("race"):
        read_all(device)


@pytest.mark.needs("streams", "simulator")
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "when the host has waited"])
def test_a_host_row_that_is_freed_under_a_copy_is_a_fault(device: torch.device, waits: bool) -> None:
    """Row copies are kernels; torch does not keep pinned memory alive for them."""
    sim = sys.modules["sglcore_sim"].current()

    def copy_rows(source: Tensor, target: Tensor, loads: Tensor, counts: Tensor) -> None:
        sim.launch("copy_rows", lambda: None, reads=[source, loads, counts], writes=[target])

    stores = {layer: store.cpu().pin_memory() for layer, store in stores_of(device).items()}
    rooms = StagingRooms(stores, (MOST + 1) * PER_PAGE, device, copy_rows, stream_of(device))
    rooms.begin(plan_parts(batch_of(device), table_of(device), PER_PAGE, rooms))
    if waits:
        torch.accelerator.synchronize()
    with nullcontext() if waits else sim.expect("pinned_freed"):
        del rooms
        stores.clear()
        torch.accelerator.synchronize()


@pytest.mark.needs("host")
def test_a_part_that_is_read_as_another_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = hisparse_staging._PageRows.copies
    monkeypatch.setattr(hisparse_staging._PageRows, "copies", lambda rows, begin, *more: copies(rows, begin * 0, *more))
    with pytest.raises(AssertionError):
        check(read_all(torch.device("cpu")))
