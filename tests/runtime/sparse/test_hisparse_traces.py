"""The rows that slots keep on the device with hisparse, over random traces of choices, against a
cache for each slot kept as a list by hand."""

from __future__ import annotations

import random

import pytest
import torch

from sglcore.runtime.kernels.table import KernelTable
from tests.kernels.test_reference_hisparse import Cache, filled_up, ints

TABLE = KernelTable()
SLOTS, PAGES, PER_PAGE, STEPS = 401, 9, 2, 12
ENTRIES = PAGES * PER_PAGE


@pytest.mark.parametrize("seed", range(25))
def test_ten_thousand_slots_keep_what_caches_kept_by_hand_keep(seed: int) -> None:
    """Ten thousand slots over all seeds; each slot chooses in some of the steps."""
    rnd = random.Random(seed)
    count = rnd.randint(1, 7)
    places = count + rnd.choice((0, 1, 5))
    held, order = ints(SLOTS, places, value=-1), torch.arange(places, dtype=torch.int32).repeat(SLOTS, 1)
    where = torch.randint(-3, places + 3, (SLOTS, ENTRIES + 1), dtype=torch.int32)
    table = torch.randperm(SLOTS * PAGES).view(SLOTS, PAGES).int()
    pages, caches = table.tolist(), [Cache([(place, -1) for place in range(places)]) for _ in range(SLOTS)]
    for _ in range(STEPS):
        gone = rnd.sample(range(1, SLOTS), SLOTS // 10)
        held[gone] = -1
        for slot in gone:
            caches[slot].lines = [(place, -1) for place, _ in caches[slot].lines]
        slots = rnd.sample(range(1, SLOTS), rnd.randint(0, SLOTS - 1)) + [0] * rnd.randint(0, 2)
        rnd.shuffle(slots)
        picked = [rnd.sample(range(ENTRIES), rnd.randint(0, count)) for _ in slots]
        chosen = torch.tensor([filled_up(each, count) for each in picked], dtype=torch.int32).view(len(slots), count)
        rows, loads, counts = ints(len(slots), count), ints(2, len(slots), count), ints(len(slots))
        given = chosen, torch.tensor(slots, dtype=torch.int32), table, PER_PAGE, held, order, where
        TABLE.swap_in(*given, rows, loads, counts)
        taken, put = loads.tolist()
        found = zip(slots, picked, rows.tolist(), taken, put, counts.tolist(), strict=True)
        for slot, entries, row, sources, targets, loaded in found:
            cache = caches[slot]
            read = cache.read(entries if slot else [])
            assert row == filled_up([slot * places + place for place in read], count)
            wanted = [pages[slot][entry // PER_PAGE] * PER_PAGE + entry % PER_PAGE for _, entry in cache.loaded]
            assert sources == filled_up(wanted, count) and loaded == len(wanted)
            assert targets == filled_up([slot * places + place for place, _ in cache.loaded], count)
        for cache, line, has in zip(caches, order.tolist(), held.tolist(), strict=True):
            assert line == [place for place, _ in cache.lines]
            assert [has[place] for place, _ in cache.lines] == [entry for _, entry in cache.lines]
