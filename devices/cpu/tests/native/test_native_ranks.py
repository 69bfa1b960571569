"""Ranks exchange tensors in shared memory: every rank gets all parts and the same sum, for all
instruction sets and sizes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from devices.cpu.tests.native.far import FarLibrary
from sglcore_cpu.native import Engine, Library
from sglcore_cpu.rank_meeting import Meeting, memory_size

MOST = 4096
COUNTS = (1, 15, 16, 257, MOST // 4, MOST // 2 + 3, 3 * MOST)
"""Numbers of elements: a few, a full buffer, and several pieces."""


def parts(dtype: torch.dtype, count: int, ranks: int) -> list[Tensor]:
    """Return a tensor for each rank, with numbers of many magnitudes, infinity and NaN."""
    found = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    found[0] *= 10.0 ** torch.randint(-30, 30, (count,), generator=torch.Generator().manual_seed(9))
    found[0][0] = float("inf")
    found[-1][-1] = float("nan")
    return [each.to(dtype) for each in found]


def meetings(engine: Engine, library: Library | FarLibrary, ranks: int) -> tuple[Tensor, list[Meeting]]:
    """Return the shared memory, and a `Meeting` for each rank. Each has its own engine, because the
    ranks wait for each other."""
    if isinstance(library, FarLibrary):
        pytest.skip("calls go to another process, which does not have this one's memory")
    memory = torch.zeros(memory_size(ranks, MOST), dtype=torch.uint8)
    engines = [library.engine(engine.instruction_set, 1) for _ in range(ranks)]
    return memory, [Meeting(each, memory.data_ptr(), rank, ranks, MOST) for rank, each in enumerate(engines)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_that_of_float32_in_the_order_of_ranks(
    engine: Engine, library: Library | FarLibrary, dtype: torch.dtype, ranks: int
) -> None:
    _memory, met = meetings(engine, library, ranks)
    with ThreadPoolExecutor(ranks) as threads:
        for count in COUNTS:
            brought = parts(dtype, count, ranks)
            total = brought[0].float()
            for part in brought[1:]:
                total = total + part.float()
            found = [part.clone() for part in brought]
            list(threads.map(lambda pair: pair[0].sum(pair[1]), zip(met, found, strict=True)))
            for each in found:
                torch.testing.assert_close(each, total.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_everybody_has_what_everybody_brought(engine: Engine, library: Library | FarLibrary) -> None:
    memory, met = meetings(engine, library, 3)
    with ThreadPoolExecutor(3) as threads:
        for turn in range(4):
            brought = [torch.full((5 + turn,), float(rank + turn)) for rank in range(3)]
            halves = list(threads.map(lambda pair: pair[0].exchange(pair[1]), zip(met, brought, strict=True)))
            assert halves == [(turn + 1) % 2] * 3
            for rank, part in enumerate(brought):
                place = met[0].place(rank, halves[0])
                assert torch.equal(memory[place : place + part.nbytes].view(torch.float32), part)
