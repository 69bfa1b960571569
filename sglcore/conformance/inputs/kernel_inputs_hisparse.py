"""Test inputs for the entries that keep KV rows in host memory, as in `kernel_inputs.py`, for
requests that chose rows before."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.conformance.inputs.kernel_inputs import Draw, Inputs

SLOTS, PAGES, PER_PAGE = 40, 6, 4
ENTRIES = PAGES * PER_PAGE


def _filled(drawn: Draw, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return held, order and where, int32 each, for all slots: each slot holds some entries in some
    of `places` places (held [slots, places], -1: free), used in any order; `where` [slots, entries
    + 1] still names places of entries that are no longer held."""
    held = torch.full((SLOTS, places), -1, dtype=torch.int32, device="cpu")
    order, where = torch.empty_like(held), drawn.ints(-3, places + 4, SLOTS, ENTRIES + 1)
    for slot in range(SLOTS):
        count = int(drawn.ints(0, places + 1, 1))
        taken = drawn.permutation(places)[:count]
        ids = drawn.permutation(ENTRIES)[:count].int()
        held[slot, taken], where[slot, ids.long()] = ids, taken.int()
        order[slot] = drawn.permutation(places).int()
    return held, order, where


def swap_in(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.swap_in`, for `tokens` rows drawn from `drawn`:
    places for exactly the chosen entries, and for more; rows that choose all, a few and no entries;
    padding. `strided` has no effect."""
    for count, places in ((5, 5), (7, 12)):
        slots = (drawn.permutation(SLOTS - 1)[:tokens] + 1).to(torch.int32)
        slots[tokens // 2 : tokens // 2 + 1] = 0
        chosen = torch.full((tokens, count), -1, dtype=torch.int32, device="cpu")
        for row in range(tokens):
            some = int(drawn.ints(0, count + 1, 1)) if row % 2 else count
            chosen[row, :some] = drawn.permutation(ENTRIES)[:some].int()
        table = (drawn.permutation(SLOTS * PAGES) + 1).view(SLOTS, PAGES).int()
        out = [
            torch.full(size, -7, dtype=torch.int32, device="cpu")
            for size in ((tokens, count), (2, tokens, count), (tokens,))
        ]
        yield chosen, slots, table, PER_PAGE, *_filled(drawn, places), *out


def copy_rows(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.copy_rows`, for `tokens` rows drawn from `drawn`:
    rows that can be copied in units of four bytes, of two and of one; for each request some of its
    copies, none and all. `strided` has no effect."""
    for size, dtype in ((24, None), (5, None), (9, torch.uint8)):
        count = 6
        source = drawn.values(SLOTS, size) if dtype is None else drawn.ints(0, 256, SLOTS, size).to(dtype)
        target = torch.zeros(tokens * count + 1, size, dtype=source.dtype, device="cpu")
        target[0] = source[0]
        given = (drawn.permutation(tokens * count) + 1).view(tokens, count).int()
        counts = drawn.ints(0, count + 1, tokens)
        yield source, target, torch.stack((drawn.ints(0, SLOTS, tokens, count), given)), counts
