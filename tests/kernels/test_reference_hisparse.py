"""KV entries in host memory, in torch, compared with a cache written by hand as a list."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from sglcore.runtime.kernels.table import KernelTable

TABLE = KernelTable()
SLOTS, PAGES, PER_PAGE = 5, 9, 2
ENTRIES = PAGES * PER_PAGE


@dataclass
class Cache:
    """The cache of a request slot as (place, entry), least recently used first."""

    lines: list[tuple[int, int]]
    loaded: list[tuple[int, int]] = field(default_factory=list)

    def read(self, chosen: list[int]) -> list[int]:
        """Return the place of each chosen entry; `loaded` holds the (place, entry) pairs copied
        in."""
        used = [line for line in self.lines if line[1] in chosen]
        unused = [line for line in self.lines if line[1] not in chosen]
        places, self.loaded = {entry: place for place, entry in used}, []
        for entry in chosen:
            if entry not in places:
                places[entry] = unused.pop(0)[0]
                self.loaded.append((places[entry], entry))
        self.lines = unused + self.loaded + used
        return [places[entry] for entry in chosen]


def ints(*shape: int, value: int = -7) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32)


def filled_up(values: list[int], size: int) -> list[int]:
    return values + [-1] * (size - len(values))


@pytest.mark.parametrize("seed", range(25))
def test_entries_come_and_go_as_in_a_cache_kept_by_hand(seed: int) -> None:
    """Runs ten thousand choices over all seeds."""
    rnd = random.Random(seed)
    count = rnd.randint(1, 7)
    places = count + rnd.choice((0, 1, 5))
    held, order = ints(SLOTS, places, value=-1), torch.arange(places, dtype=torch.int32).repeat(SLOTS, 1)
    where = torch.randint(-3, places + 3, (SLOTS, ENTRIES + 1), dtype=torch.int32)
    table = torch.randperm(SLOTS * PAGES).view(SLOTS, PAGES).int()
    caches = {slot: Cache([(place, -1) for place in range(places)]) for slot in range(SLOTS)}
    for _ in range(150):
        if rnd.random() < 0.1:
            gone = rnd.randrange(1, SLOTS)
            held[gone] = -1
            caches[gone].lines = [(place, -1) for place, _ in caches[gone].lines]
        slots = rnd.sample(range(1, SLOTS), rnd.randint(0, SLOTS - 1)) + [0] * rnd.randint(0, 2)
        rnd.shuffle(slots)
        picked = [rnd.sample(range(ENTRIES), rnd.randint(0, count)) for _ in slots]
        chosen = torch.tensor([filled_up(each, count) for each in picked], dtype=torch.int32).view(len(slots), count)
        rows, loads, counts = ints(len(slots), count), ints(2, len(slots), count), ints(len(slots))
        given = chosen, torch.tensor(slots, dtype=torch.int32), table, PER_PAGE, held, order, where
        TABLE.swap_in(*given, rows, loads, counts)
        for row, slot in enumerate(slots):
            cache, entries = caches[slot], picked[row] if slot else []
            found = cache.read(entries)
            assert rows[row].tolist() == filled_up([slot * places + place for place in found], count)
            pages = [int(table[slot, entry // PER_PAGE]) * PER_PAGE + entry % PER_PAGE for _, entry in cache.loaded]
            assert loads[0, row].tolist() == filled_up(pages, count)
            assert loads[1, row].tolist() == filled_up([slot * places + place for place, _ in cache.loaded], count)
            assert counts[row] == len(cache.loaded)
            assert order[slot].tolist() == [place for place, _ in cache.lines]
            assert [int(held[slot, place]) for place, _ in cache.lines] == [entry for _, entry in cache.lines]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_rows_are_copied_bit_for_bit_and_no_other(dtype: torch.dtype) -> None:
    source = torch.randint(0, 250, (9, 3)).to(dtype)
    if dtype.is_floating_point:
        source[4] = torch.nan
    target, wanted = torch.zeros(7, 3, dtype=dtype), torch.zeros(7, 3, dtype=dtype)
    loads = torch.tensor([[[4, 5, -1], [6, 8, 7]], [[1, 2, -1], [5, 6, 3]]], dtype=torch.int32)
    TABLE.copy_rows(source, target, loads, torch.tensor([2, 1], dtype=torch.int32))
    for taken, given in ((4, 1), (5, 2), (6, 5), (0, 0)):
        wanted[given] = source[taken]
    assert torch.equal(target.view(torch.uint8), wanted.view(torch.uint8))
