"""What libraries of paged attention want of a batch, computed on the device without a wait: rows of pages, lists of pages
or cells one request after another, and where each request's begin. Lengths come from both sides of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import offsets_of

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.memory.pools import ReqToTokenPool


def padded_lengths(batch: ForwardBatch, rows: int) -> NDArray[np.int32]:
    """The host's sequence lengths int32[rows]; rows beyond the batch have the length 1 that padding shows."""
    lengths = batch.seq_lens_cpu
    assert lengths is not None
    padded = np.ones(rows, np.int32)
    count = min(len(lengths), rows)
    padded[:count] = lengths[:count]
    return padded


def offsets(counts: NDArray[np.int32]) -> Tensor:
    """Where each row begins, and the end of the last: int32[B + 1] of counts int32[B], on the host."""
    return torch.from_numpy(offsets_of(counts))


def device_offsets(counts: Tensor) -> Tensor:
    """The same of counts int32[B] on the device."""
    ends = counts.new_zeros(counts.shape[0] + 1)
    torch.cumsum(counts, 0, dtype=torch.int32, out=ends[1:])
    return ends


def page_counts(seq_lens: Tensor, page_size: int) -> Tensor:
    """Pages that hold each row's tokens: int32[B] of int32[B]."""
    return (seq_lens + (page_size - 1)) // page_size


def page_list(pool: ReqToTokenPool, slots: Tensor, starts: Tensor, total: int) -> Tensor:
    """The pages of every row, one row after another: int32[total]. `starts` int32[B + 1] counts pages; `total` is its
    last value, which the host knows."""
    row, column = _places(starts, total)
    return pool.page_table[slots[row], column]


def cell_list(pool: ReqToTokenPool, slots: Tensor, starts: Tensor, total: int) -> Tensor:
    """The cells of every row's tokens, one row after another: int32[total]. `starts` int32[B + 1] counts tokens."""
    row, column = _places(starts, total)
    pages = pool.page_table[slots[row], column // pool.page_size]
    return pages * pool.page_size + column % pool.page_size


def _places(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Row and column of each entry of a list whose rows begin at `starts`: int32[total] each."""
    place = torch.arange(total, dtype=torch.int32, device=starts.device)
    row = torch.searchsorted(starts[1:], place, right=True, out_int32=True)
    return row, place - starts[row]


@dataclass(frozen=True, slots=True)
class PageLists:
    """A batch as lists of pages: offsets int32[B + 1] and tokens in each last page int32[B] on the host, pinned; the same
    two on the device, and the pages int32[total]."""

    host_starts: Tensor
    host_last_lengths: Tensor
    starts: Tensor
    last_lengths: Tensor
    pages: Tensor


def page_lists(pool: ReqToTokenPool, batch: ForwardBatch, rows: int) -> PageLists:
    """Lists for `rows` rows, of which those beyond the batch are padding. Each side is worked out from the lengths that it
    has, so nothing is copied."""
    lengths, size = padded_lengths(batch, rows), pool.page_size
    on_device, slots = batch.seq_lens[:rows], batch.req_pool_indices[:rows]
    host_starts = offsets((lengths + (size - 1)) // size)
    starts = device_offsets(page_counts(on_device, size))
    pages = page_list(pool, slots, starts, int(host_starts[-1]))
    host_last = torch.from_numpy((lengths - 1) % size + 1)
    return PageLists(pinned(host_starts, pages), pinned(host_last, pages), starts, (on_device - 1) % size + 1, pages)


def pinned(host: Tensor, like: Tensor) -> Tensor:
    """A host tensor in memory from which the device of `like` copies without a wait; itself, if that is the host."""
    return host if like.device.type == "cpu" else host.pin_memory()


def page_rows(pool: ReqToTokenPool, slots: Tensor, out: Tensor | None = None) -> Tensor:
    """The page table's rows of some slots: int32[B, pages per request]; written into `out` if it is given."""
    return torch.index_select(pool.page_table, 0, slots, out=out)


def as_pages(cells: Tensor, page_size: int) -> Tensor:
    """Cells [cells, kv_heads, dim] as pages [pages, page_size, kv_heads, dim]; a view."""
    return cells.view(-1, page_size, cells.shape[1], cells.shape[2])


def with_padding(out: Tensor, q: Tensor) -> Tensor:
    """Results [n, heads, dim] of the first n lines as a tensor of q's shape [T, heads * dim], the other lines zero."""
    missing = q.shape[0] - out.shape[0]
    if missing:
        out = torch.cat((out, out.new_zeros(missing, *out.shape[1:])))
    return out.view(q.shape)


def window_left(window: int | None) -> int:
    """Tokens before itself that a query sees, as libraries count them; -1 for all."""
    return -1 if window is None else window - 1
