"""The reference of the HiSparse entries. Plain torch without a host read."""

from __future__ import annotations

import torch
from torch import Tensor


def swap_in(
    chosen: Tensor,
    slots: Tensor,
    table: Tensor,
    rows_per_page: int,
    held: Tensor,
    order: Tensor,
    where: Tensor,
    rows: Tensor,
    loads: Tensor,
    counts: Tensor,
) -> None:
    """Reference of `KernelTable.swap_in`: update the LRU cache of each request in place: the tables
    `held` (the entry in each place), `order` (the places, least recently used first) and `where`
    (the place of each entry). Write the device rows of the `chosen` entries to `rows` (-1: none
    chosen), and the copies from the host that they need to `loads` and `counts`. Slot 0 is padding.
    """
    places, count = held.shape[1], chosen.shape[1]
    is_real = (chosen >= 0) & (slots > 0).unsqueeze(1)
    own, line = slots.long(), order[slots.long()].long()
    nobody = where.shape[1] - 1
    ids = chosen.long().masked_fill(~is_real, nobody)
    place = where[own.unsqueeze(1), ids].long().clamp(0, places - 1)
    is_hit = is_real & (held[own].gather(1, place) == chosen)
    is_miss, marked = is_real & ~is_hit, torch.zeros_like(line, dtype=torch.bool)
    marked = _with_spare(marked).scatter(1, place.masked_fill(~is_hit, places), True)[:, :places]
    is_used = marked.gather(1, line)
    line = line.gather(1, is_used.int().argsort(dim=1, stable=True))
    rank = is_miss.cumsum(1) - 1
    place = torch.where(is_hit, place, line.gather(1, rank.clamp(0, places - 1)))
    missed = is_miss.sum(1, keepdim=True)

    unused, index = places - is_used.sum(1, keepdim=True), torch.arange(places, device=line.device).expand_as(line)
    later = torch.where(index < missed, unused - missed + index, torch.where(index < unused, index - missed, index))
    order[own] = torch.zeros_like(line).scatter(1, later, line).int()
    new = _with_spare(held[own]).scatter(1, place.masked_fill(~is_miss, places), chosen)
    held[own] = new[:, :places]
    kept = where[own, nobody].unsqueeze(1).expand_as(chosen)
    where[own.unsqueeze(1), ids.masked_fill(~is_miss, nobody)] = torch.where(is_miss, place.int(), kept)

    at = own.unsqueeze(1) * places + place
    rows.copy_(at.masked_fill(~is_real, -1))
    page = (ids.masked_fill(~is_miss, 0) // rows_per_page).clamp(max=table.shape[1] - 1)
    source = table[own.unsqueeze(1), page].long() * rows_per_page + ids % rows_per_page
    to = rank.masked_fill(~is_miss, count)
    for kind, found in enumerate((source, at)):
        line = torch.full_like(chosen, -1)
        loads[kind].copy_(_with_spare(line).scatter(1, to, found.int())[:, :count])
    counts.copy_(missed[:, 0])


def _with_spare(lines: Tensor) -> Tensor:
    """Return `lines` [B, N] with a column added at the end, as a target for entries that are not to
    be written.
    """
    return torch.cat((lines, lines[:, :1]), dim=1)


def copy_rows(source: Tensor, target: Tensor, loads: Tensor, counts: Tensor) -> None:
    """Reference of `KernelTable.copy_rows`: copy row loads[0, b, i] of `source` to row loads[1, b,
    i] of `target` for i < counts[b]. Loads that are not counted copy row 0 to row 0, which is
    reserved.
    """
    inside = torch.arange(loads.shape[2], device=loads.device) < counts.unsqueeze(1)
    taken, given = loads.masked_fill(~inside, 0).long().flatten(1).unbind(0)
    target[given] = source[taken]
