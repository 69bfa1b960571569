"""Helpers for libraries of paged attention: page rows, page lists, KV slot lists, and their
offsets.

Everything is computed on the device without a wait. Lengths come from both sides of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.worker.schedule_batch import offsets_of

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.memory.pools import ReqToTokenPool


def padded_lengths(batch: ForwardBatch, rows: int) -> NDArray[np.int32]:
    """Return the host's sequence lengths int32[rows]; padding rows have length 1."""
    lengths = batch.seq_lens_cpu
    assert lengths is not None
    padded = np.ones(rows, np.int32)
    count = min(len(lengths), rows)
    padded[:count] = lengths[:count]
    return padded


def offsets(counts: NDArray[np.int32]) -> Tensor:
    """Return row starts and the end of the last row: int32[B + 1] of counts int32[B]; on the
    host.
    """
    return torch.from_numpy(offsets_of(counts))


def device_offsets(counts: Tensor) -> Tensor:
    """Return `offsets` of counts int32[B], computed on the device."""
    ends = counts.new_zeros(counts.shape[0] + 1)
    torch.cumsum(counts, 0, dtype=torch.int32, out=ends[1:])
    return ends


def page_counts(seq_lens: Tensor, page_size: int) -> Tensor:
    """Return the number of pages of each row: int32[B] of seq_lens int32[B]."""
    return (seq_lens + (page_size - 1)) // page_size


def page_list(pool: ReqToTokenPool, slots: Tensor, starts: Tensor, total: int) -> Tensor:
    """Return the pages of all rows, concatenated: int32[total].

    `starts` int32[B + 1] counts pages; `total` is its last value, known on the host.
    """
    row, column = _places(starts, total)
    return pool.page_table[slots[row], column]


def cell_list(pool: ReqToTokenPool, slots: Tensor, starts: Tensor, total: int) -> Tensor:
    """Return the KV slots of all rows' tokens, concatenated: int32[total].

    `starts` int32[B + 1] counts tokens; `total` is its last value, known on the host.
    """
    row, column = _places(starts, total)
    pages = pool.page_table[slots[row], column // pool.page_size]
    return pages * pool.page_size + column % pool.page_size


def _places(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return row and column of each entry of a concatenated list: int32[total] each.

    `starts` are the row offsets.
    """
    place = torch.arange(total, dtype=torch.int32, device=starts.device)
    row = torch.searchsorted(starts[1:], place, right=True, out_int32=True)
    return row, place - starts[row]


@dataclass(frozen=True, slots=True)
class PageLists:
    """A batch as page lists.

    `pages` int32[total] on the device are the pages of all rows, concatenated. `host_starts`
    int32[B + 1], the offsets of the rows in `pages`, and `host_last_lengths` int32[B], the tokens
    in each row's last page, are on the host, pinned; `starts` and `last_lengths` are the same on
    the device.
    """

    host_starts: Tensor
    host_last_lengths: Tensor
    starts: Tensor
    last_lengths: Tensor
    pages: Tensor


def page_lists(pool: ReqToTokenPool, batch: ForwardBatch, rows: int) -> PageLists:
    """Return the lists for `rows` rows, padding included.

    Host and device lists are each computed from the lengths on their side, so nothing is copied.
    """
    lengths, size = padded_lengths(batch, rows), pool.page_size
    on_device, slots = batch.seq_lens[:rows], batch.req_pool_indices[:rows]
    host_starts = offsets((lengths + (size - 1)) // size)
    starts = device_offsets(page_counts(on_device, size))
    pages = page_list(pool, slots, starts, int(host_starts[-1]))
    host_last = torch.from_numpy((lengths - 1) % size + 1)
    return PageLists(pinned(host_starts, pages), pinned(host_last, pages), starts, (on_device - 1) % size + 1, pages)


def pinned(host: Tensor, like: Tensor) -> Tensor:
    """Return a host tensor in pinned memory, so that a copy to the device does not wait.

    Returns `host` itself if `like` is on the host.
    """
    return host if like.device.type == "cpu" else host.pin_memory()


def page_rows(pool: ReqToTokenPool, slots: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the page-table rows of slots, int32[B, pages per request]; in `out` if given."""
    return torch.index_select(pool.page_table, 0, slots, out=out)


def as_pages(cells: Tensor, page_size: int) -> Tensor:
    """View KV slots [cells, kv_heads, dim] as pages [pages, page_size, kv_heads, dim]."""
    return cells.view(-1, page_size, cells.shape[1], cells.shape[2])


def with_padding(out: Tensor, q: Tensor) -> Tensor:
    """Pad results [n, heads, dim] with zero rows to q's shape [T, heads * dim]."""
    missing = q.shape[0] - out.shape[0]
    if missing:
        out = torch.cat((out, out.new_zeros(missing, *out.shape[1:])))
    return out.view(q.shape)


def window_left(window: int | None) -> int:
    """Return how many tokens before itself a query sees, as libraries take it; -1: all."""
    return -1 if window is None else window - 1
