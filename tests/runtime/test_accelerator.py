"""The free memory of an accelerator is the driver's number: weights count as used, memory in
torch's cache does not."""

from __future__ import annotations

import pytest
import torch

from ci.lanes import Lane
from sglcore.device.discovery import discover
from sglcore.device.facts import Facts
from sglcore.device.package import resolve
from sglcore.runtime.memory.accelerator import DEFAULT_SHARE, device_memory
from sglcore.runtime.streams import make_streams

SIZE = 96 << 20


@pytest.fixture
def facts(lane: Lane) -> Facts:
    package = next(item.loaded() for item in discover() if item.name == lane.device)
    return resolve(package.facts, package.name)(0)


@pytest.mark.needs("accelerator")
def test_weights_are_taken_and_what_is_freed_is_free_again(facts: Facts) -> None:
    before = device_memory(facts, None)
    weights = torch.zeros(SIZE, dtype=torch.uint8, device=facts.tensor_device)
    during = device_memory(facts, weights)
    assert before.total == during.total >= before.available
    assert SIZE <= before.available - during.available < SIZE + (32 << 20)
    del weights
    assert device_memory(facts, None).available >= before.available - (4 << 20)


@pytest.mark.needs("accelerator")
def test_the_evidence_names_the_device_and_a_share_is_left_for_everything_else(facts: Facts) -> None:
    budget = device_memory(facts, None)
    assert facts.tensor_device in budget.evidence and budget.default_share == DEFAULT_SHARE < 1


@pytest.mark.needs("streams")
def test_an_engine_that_is_opened_again_takes_the_stream_of_the_one_that_was_closed(facts: Facts) -> None:
    first, second = make_streams(facts), make_streams(facts)
    assert first.forward != second.forward
    first.close()
    third = make_streams(facts)
    assert third.forward == first.forward
    second.close()
    third.close()
