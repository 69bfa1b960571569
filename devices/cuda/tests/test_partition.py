"""Partitions of a GPU: streams of green contexts, and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda import green_contexts

from sglcore.core.errors import ConfigError
from sglcore_cuda import sm_partition as parts
from sglcore_cuda.capability import read_capability
from sglcore_cuda.sm_partition import MULTIPLE, partition

DEVICE = torch.device("cuda:0")

pytestmark = pytest.mark.needs("partition")


def test_a_part_is_a_stream_of_its_own_that_runs_work_and_can_be_waited_for() -> None:
    found = partition(DEVICE)
    assert found.units == read_capability(DEVICE).multiprocessors and found.multiple == MULTIPLE
    one, other = found.stream(MULTIPLE), found.stream(MULTIPLE)
    assert one != other
    for stream in (one, other):
        with stream:
            assert torch.accelerator.current_stream(DEVICE) == stream
            made = torch.ones(4, device=DEVICE) * 2
        current = torch.accelerator.current_stream(DEVICE)
        assert current != stream
        current.wait_stream(stream)
        assert made.tolist() == [2.0] * 4


@pytest.mark.needs("partition", "simulator")
def test_its_kernels_keep_to_as_many_multiprocessors_as_were_asked_for(sim: Any) -> None:
    found = partition(DEVICE)
    for units in (MULTIPLE, 5 * MULTIPLE):
        stream = found.stream(units)
        assert sim.parts[0, stream.stream_id] == units


def test_more_than_there_are_is_refused_in_words() -> None:
    found = partition(DEVICE)
    with pytest.raises(ConfigError, match="the driver cannot create a green context: Invalid number of SMs"):
        found.stream(found.units + 1)


def test_a_torch_without_green_contexts_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(green_contexts, "SUPPORTED", False)
    with pytest.raises(ConfigError, match=r"torch .* has no green contexts; install a build for CUDA 12\.8 or later"):
        partition(DEVICE)


@pytest.mark.needs("partition", "simulator")
def test_a_context_is_made_once_for_each_gpu_and_number_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context is cached, because its streams end with it. Uses numbers of units that no other
    test uses."""
    made = list[tuple[int, int]]()

    def create(num_sms: int, device_id: int) -> Any:
        made.append((device_id, num_sms))
        return SimpleNamespace(Stream=lambda: torch.cuda.Stream(0))

    monkeypatch.setattr(green_contexts.GreenContext, "create", create)
    monkeypatch.setattr(parts, "read_capability", lambda device: SimpleNamespace(multiprocessors=132))
    for index, units in ((0, 104), (0, 104), (1, 104), (0, 112)):
        parts.partition(torch.device("cuda", index)).stream(units)
    assert made == [(0, 104), (1, 104), (0, 112)]
