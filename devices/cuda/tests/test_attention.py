"""The attention laws on this package's device, and the copies and waits of planning."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sglcore.runtime.attention.contract import Bucket
from sglcore_cuda import package  # noqa: F401
from sglcore_cuda.graphs import make_capture  # noqa: F401
from tests.attention.on_packages import *  # noqa: F403
from tests.attention.on_packages import DECODE, EXTEND, Placing


@pytest.mark.needs("simulator")
@pytest.mark.parametrize("is_pair", [True, False])
def test_a_plan_does_not_write_over_memory_that_the_one_before_is_still_copied_from(
    placing: Placing, is_pair: bool
) -> None:
    sim = importlib.import_module("sglcore_sim").current()
    first = placing.place(DECODE, "flashinfer", decode=True)
    other = placing.place([(9, 1), (4, 1), (1, 1), (44, 1)], "flashinfer", decode=True, seed=1)
    attention: Any = first.backend
    if not is_pair:
        attention._decode = (attention._decode[0],) * 2
    torch.accelerator.synchronize()
    with nullcontext() if is_pair else sim.expect("pinned_source_changed"):
        for batch in (first.batch, other.batch):
            attention.plan(batch)
        torch.accelerator.synchronize()


@pytest.mark.needs("simulator")
@pytest.mark.parametrize("is_prefill", [False, True])
def test_planning_waits_for_nothing(placing: Placing, is_prefill: bool) -> None:
    sim = importlib.import_module("sglcore_sim").current()
    for name in ("flashinfer", "flash_attention"):
        placed = placing.place(EXTEND if is_prefill else DECODE, name, decode=not is_prefill)
        placed.backend.plan(placed.batch)
        with sim.no_sync():
            placed.backend.plan(placed.batch)


@pytest.mark.needs("simulator")
@pytest.mark.parametrize(("name", "most"), [("flashinfer", 1), ("flash_attention", 0), ("triton", 0)])
def test_a_replay_is_planned_without_a_wait_and_with_at_most_one_copy(placing: Placing, name: str, most: int) -> None:
    sim = importlib.import_module("sglcore_sim").current()
    placed = placing.place(DECODE, name, decode=True)
    plan = placed.backend.capture_plan(Bucket(4, 4))
    placed.backend.refresh(plan, placed.batch)
    torch.accelerator.synchronize()
    before = sim.stats()["h2d_copies"]
    with sim.no_sync():
        placed.backend.refresh(plan, placed.batch)
    assert sim.stats()["h2d_copies"] - before <= most
