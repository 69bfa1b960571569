"""The tokens of a batch one by one, as kernels over rows take them: worked out on the device, of any mode. Only how large
tensors must be comes from the host's lengths, where the host has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.rows import INDEX_KEYS

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.kernels.row_codec import RowCodec
    from sglcore.runtime.kernels.table import KernelTable

LOGITS = 1 << 26
"""Scores of an indexer that exist at a time."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """`slots` and `lens` int32 [T]: whose each token is, and how many tokens it sees with itself, which are `most` at most."""

    slots: Tensor
    lens: Tensor
    most: int

    @classmethod
    def of(cls, batch: ForwardBatch, most: int) -> Self:
        """Of a batch that is on the device, `most` where only that knows its lengths. Shares its tensors where each row is one
        token."""
        if batch.seq_lens_cpu is not None:
            most = int(batch.seq_lens_cpu.max(initial=1))
        if batch.extend_seq_lens is None:
            return cls(batch.req_pool_indices, batch.seq_lens, most)
        slots = torch.repeat_interleave(batch.req_pool_indices, batch.extend_seq_lens, output_size=batch.num_tokens)
        return cls(slots, batch.positions + 1, most)

    @classmethod
    def empty(cls, num_tokens: int, most: int, device: torch.device) -> Self:
        """Padding, at fixed addresses."""
        slots = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        return cls(slots, torch.ones_like(slots), most)

    def copy_(self, other: TokenRows) -> None:
        """Become another of as many tokens and no more to see, in place."""
        self.slots.copy_(other.slots)
        self.lens.copy_(other.lens)

    def part(self, place: int, count: int) -> TokenRows:
        """The `place`th of `count` parts of one size; a view."""
        size = len(self.slots) // count
        rows = slice(place * size, (place + 1) * size)
        return TokenRows(self.slots[rows], self.lens[rows], self.most)


class RequestRows(NamedTuple):
    """A batch by request, int32 [B] each, as the kernel table's `compress_plan` takes it: the tokens [starts, starts + lengths)
    are the last of seq_lens in `slots`; token b where both are None."""

    slots: Tensor
    seq_lens: Tensor
    lengths: Tensor | None
    starts: Tensor | None

    @classmethod
    def of(cls, batch: ForwardBatch) -> Self:
        """Of a batch that is on the device. Requests of slot 0 have no token; padding may stand behind the last."""
        width = batch.width
        if width is None:
            return cls(batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens, batch.extend_start_loc)
        rows = batch.batch_size // width * width
        owners = batch.req_pool_indices[:rows].view(-1, width)
        lengths = (owners > 0).sum(1, dtype=torch.int32)
        starts = torch.arange(0, rows, width, dtype=torch.int32, device=owners.device)
        return cls(owners[:, 0].contiguous(), batch.seq_lens[:rows:width] + lengths - 1, lengths, starts)


def later_steps(view: ForwardBatch, count: int) -> tuple[ForwardBatch, list[ForwardBatch]]:
    """A decode batch and the `count` - 1 after it, each with one token more: as rows of one batch, one behind the other, and each
    by itself; tensors are shared. Where their tokens are stored is left open; requests have their pages."""
    assert view.extend_seq_lens is None
    values = {name: value for name in _ADVANCING if (value := getattr(view, name)) is not None}
    steps = torch.arange(count, dtype=torch.int32, device=view.seq_lens.device).unsqueeze(1)
    further = {name: value + steps for name, value in values.items()}
    lengths = view.seq_lens_cpu
    if lengths is not None:
        further["seq_lens_cpu"] = lengths + np.arange(count, dtype=np.int32)[:, None]
    further["req_pool_indices"] = view.req_pool_indices.expand(count, view.batch_size)
    made = partial(replace, view, out_cache_loc=None, window_cache_loc=None, plan_record=None)
    rows = count * view.batch_size
    whole = made(batch_size=rows, num_tokens=rows, **{name: each.reshape(-1) for name, each in further.items()})
    return whole, [made(**{name: each[step] for name, each in further.items()}) for step in range(count)]


_ADVANCING = ("seq_lens", "positions", "window_seq_lens", "window_positions")
"""What grows by one with each token."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Rows of requests: `rows_per_page` of each page of `table` int32 [S, P], of slots int32 [T] the first lens int32 [T], which
    are `most` at most."""

    table: Tensor
    slots: Tensor
    lens: Tensor
    rows_per_page: int
    most: int


def score_bytes(layers: Iterable[Attention], tokens: int, most: int) -> int:
    """Bytes of the scores that exist at a time in steps of `tokens` tokens that see `most`: what `choose_rows` takes beside the
    pools, and a captured step for good. 0 without indexers."""
    width = max((most // layer.rows[INDEX_KEYS].ratio for layer in layers if INDEX_KEYS in layer.rows), default=0)
    return torch.float32.itemsize * min(tokens * width, max(LOGITS, width))


def choose_rows(
    kernels: KernelTable,
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    codec: RowCodec | None,
    paged: Paged,
    count: int,
    named: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """int32 [T, count]: the rows of each token's request that its indexer scores highest, by q [T, H, D] and weights [T, H], scaled by
    the root of H D. So many tokens at a time that their scores take no more than LOGITS. `named`: the pages by which rows are
    called, int32 [N, P], and the line there of each token, int32 [T]; None: those of the keys."""
    scale, tokens, width = (q.shape[1] * q.shape[2]) ** -0.5, q.shape[0], max(1, paged.most)
    found, (pages, lines) = [], named or (paged.table, paged.slots)
    for first in range(0, max(1, tokens), step := max(1, LOGITS // width)):
        part = slice(first, first + step)
        slots, lens = paged.slots[part], paged.lens[part]
        where = paged.table, slots, lens, paged.rows_per_page
        logits = kernels.index_logits(q[part], weights[part], keys, *where, scale, width, codec)
        found.append(kernels.index_top_k(logits, lens, pages, lines[part], paged.rows_per_page, count))
    return joined(found)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of tokens one behind the other; not copied where there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
