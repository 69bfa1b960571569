"""Number of pages with hisparse: limited by both memories, after the device buffers of each request
and the staging rooms of prefill are subtracted."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.ledger import DecisionLedger
from sglcore.device.facts import Facts
from sglcore.runtime.hisparse.hisparse_bring_up import beside_buffers
from sglcore.runtime.hisparse.hisparse_shape import SwapShape
from sglcore.runtime.memory.kv_rows import KeptRows, Place
from sglcore.step.hisparse_config import HiSparseConfig
from sglcore.step.sizing import Geometry, MemoryBudget, MemorySizes, size_pools

PAGE, LONGEST, REQUESTS = 16, 160, 64
ON_DEVICE, ON_HOST = 1_000, 9_000
"""Bytes of a page in each memory."""
SHAPE = SwapShape(
    names=MappingProxyType({1: "latent"}),
    indexers=(1,),
    kept=KeptRows(100, torch.uint8, Place.HOST_PAGES),
    top_k=4,
    buffer_rows=8,
    page_size=PAGE,
    pages=LONGEST // PAGE,
    rooms=2,
)
BESIDE = SHAPE.room_bytes + (REQUESTS + 1) * SHAPE.slot_bytes


def sized(ratio: float, available: int, *, shares: bool) -> MemorySizes:
    """Sizes with hisparse on a device with its own memory or with shared host memory; all of
    `available` is used."""
    facts = Facts(tensor_device="cpu", shares_host_memory=shares)
    kept, budget = Geometry(ON_DEVICE, host_page=ON_HOST), MemoryBudget(available, available, "all", 1.0)
    kept, budget = beside_buffers(HiSparseConfig(host_to_device_ratio=ratio), SHAPE, facts, kept, budget)
    config = EngineConfig(max_requests=REQUESTS)
    given = {"context_len": LONGEST, "geometry": kept, "page_size": PAGE, "budget": budget, "ledger": DecisionLedger()}
    return size_pools(config, **given)


@pytest.mark.parametrize("ratio", [1, 2, 3.5])
def test_the_host_has_so_many_times_the_pages_that_the_device_would_have(ratio: float) -> None:
    assert sized(ratio, 400_000 + BESIDE, shares=False).num_pages == 40 * ratio


def test_the_device_has_no_more_pages_than_it_holds_the_keys_of() -> None:
    """The size of the host memory does not matter."""
    assert sized(100, 400_000 + BESIDE, shares=False).num_pages == 400


@pytest.mark.parametrize("ratio", [1, 2, 100])
def test_one_memory_of_both_is_not_taken_twice(ratio: float) -> None:
    available = 400_000 + BESIDE
    found = sized(ratio, available, shares=True)
    taken = found.num_bytes
    assert found.num_pages == 40
    assert taken["kv_bytes"] + taken["host_bytes"] + taken["state_bytes"] + SHAPE.room_bytes <= available


def test_staging_rooms_are_left_free_beside_pages() -> None:
    """One byte less gives one page less."""
    assert sized(1, 400_000 + BESIDE - 1, shares=False).num_pages == 39
