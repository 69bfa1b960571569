"""A group's operations give the documented results, by the back end and through shared memory;
ranks that disagree are reported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel import collectives
from tests.parallel.collectives import CASES, Body, every_operation, made, many_in_a_row, on_ranks


@pytest.mark.parametrize(("size", "shared"), [(2, False), (3, False), (2, True), (3, True)])
def test_every_operation_gives_what_it_says_on_every_rank(size: int, shared: bool, tmp_path: Path) -> None:
    found = on_ranks(size, tmp_path, every_operation, shared=shared)
    for seed, (shape, dtype) in enumerate(CASES):
        brought = [made(rank, seed, shape, dtype) for rank in range(size)]
        tall = [made(rank, seed + 50, (size * 2, 3), dtype) for rank in range(size)]
        total = torch.stack([each.double() for each in brought]).sum(0)
        bound = 0.5 if dtype is torch.bfloat16 else 1e-4
        for rank in range(size):
            summed, gathered, said, *others = found[rank][seed]
            torch.testing.assert_close(summed.double(), total, atol=bound, rtol=0.0)
            assert torch.equal(summed, found[0][seed][0]), "ranks have different sums"
            assert torch.equal(gathered, torch.stack(brought))
            assert torch.equal(said, brought[-1])
            if others:
                rows = torch.stack([each.double() for each in tall]).sum(0)[rank * 2 : rank * 2 + 2]
                torch.testing.assert_close(others[0].double(), rows, atol=bound, rtol=0.0)
                assert torch.equal(others[1], torch.cat([each[rank * 2 : rank * 2 + 2] for each in tall]))
    ragged, least = [rank[-2][0] for rank in found], [int(rank[-1][0]) for rank in found]
    assert ragged[0][:, 0].tolist() == [float(rank) for rank in range(size) for _ in range(rank + 1)]
    assert all(not len(rows) for rows in ragged[1:])
    assert least == [10 - size + 1] * size


def wanted_in_a_row(size: int) -> list[list[float]]:
    rng, found = np.random.default_rng(3), []
    for turn in range(300):
        count, late = int(rng.integers(1, 40)), int(rng.integers(size))
        one = turn * (size * (size + 1) // 2 if turn % 2 else late + 1)
        found.append([float(one)] * count)
    return found


def test_a_late_rank_is_waited_for_each_time(tmp_path: Path) -> None:
    assert on_ranks(3, tmp_path, many_in_a_row, shared=True) == [wanted_in_a_row(3)] * 3


@pytest.mark.parametrize(("care", "is_right"), [({}, True), ({"waits": False}, False), ({"places": 1}, False)])
def test_a_group_that_reads_too_soon_or_writes_too_soon_is_caught(
    care: dict[str, Any], is_right: bool, tmp_path: Path
) -> None:
    found = on_ranks(3, tmp_path, partial(collectives.carelessly, **care), shared=True)
    assert (found == [wanted_in_a_row(3)] * 3) is is_right


@pytest.mark.parametrize("size", [2, 3])
def test_a_recorded_step_holds_what_goes_round(size: int, tmp_path: Path) -> None:
    for rank in on_ranks(size, tmp_path, collectives.recorded, shared=True):
        for replayed, eager in rank:
            assert torch.equal(replayed, eager) and replayed.any()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (collectives.wrong_shape, "1: all_reduce of torch.float32 [4], and another rank is not"),
        (collectives.wrong_operation, "1: all_reduce of torch.float32 [4], and another rank is not"),
        (collectives.with_holes, "is not contiguous"),
    ],
)
def test_with_checks_ranks_that_disagree_are_told_rather_than_mixed_up(body: Body, said: str, tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, body, checks=True)
    assert all("CollectiveError" in each for each in found)
    assert said in found[0] and said.rpartition(", ")[2] in found[1], "each says so itself"


def test_parts_of_a_group_have_memory_of_their_own(tmp_path: Path) -> None:
    for name in ("first", "then"):
        (tmp_path / name).mkdir()
    first, second, third, fourth = on_ranks(4, tmp_path / "first", collectives.memories, shared=True)
    assert first[0] == second[0] != third[0] == fourth[0] and first[1] == third[1] != second[1] == fourth[1]
    assert len({*first, *second, *third, *fourth}) == 4
    found = on_ranks(4, tmp_path / "then", collectives.in_parts, shared=True)
    assert found == [[wanted] * 20 for wanted in ([3.0, 5.0], [3.0, 10.0], [12.0, 5.0], [12.0, 10.0])]


def test_a_tensor_with_holes_is_refused_by_shared_memory_too(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, collectives.with_holes, shared=True)
    assert all("view size is not compatible" in each for each in found)
