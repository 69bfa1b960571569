"""The tokens of a batch one by one, as kernels over KV rows take them, for any forward mode.

Computed on the device. Host lengths, if known, only determine the size of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.kv_rows import INDEX_KEYS

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.kernels.row_codec import RowCodec
    from sglcore.runtime.kernels.table import KernelTable

LOGITS = 1 << 26
"""Maximum number of indexer scores that exist at a time."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Each token's request slot (`slots`), and the number of tokens that it sees, itself included
    (`lens`): int32 [T] each.

    `most` is an upper bound of `lens`, known on the host.
    """

    slots: Tensor
    lens: Tensor
    most: int

    @classmethod
    def of(cls, batch: ForwardBatch, most: int) -> Self:
        """Return the tokens of a batch on the device.

        The upper bound is the maximum of the host's lengths; the parameter `most` is used if only
        the device knows lengths. Shares the batch's tensors if each row is one token.
        """
        if batch.seq_lens_cpu is not None:
            most = int(batch.seq_lens_cpu.max(initial=1))
        if batch.extend_seq_lens is None:
            return cls(batch.req_pool_indices, batch.seq_lens, most)
        slots = torch.repeat_interleave(batch.req_pool_indices, batch.extend_seq_lens, output_size=batch.num_tokens)
        return cls(slots, batch.positions + 1, most)

    @classmethod
    def empty(cls, num_tokens: int, most: int, device: torch.device) -> Self:
        """Return `num_tokens` padding tokens (slot 0, length 1) in new tensors, for a plan with
        fixed addresses.
        """
        slots = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        return cls(slots, torch.ones_like(slots), most)

    def copy_(self, other: TokenRows) -> None:
        """Copy the slots and lengths of `other` into these tensors; `most` stays.

        `other` must have the same number of tokens, and at most this `most`.
        """
        self.slots.copy_(other.slots)
        self.lens.copy_(other.lens)


class RequestRows(NamedTuple):
    """A batch by request, int32 [B] each, as the kernel table's `compress_plan` takes it.

    Request b, in the request slot `slots[b]`, has the batch's tokens [starts[b], starts[b] +
    lengths[b]), the last of its `seq_lens[b]`. If both are None, request b has token b only.
    """

    slots: Tensor
    seq_lens: Tensor
    lengths: Tensor | None
    starts: Tensor | None

    @classmethod
    def of(cls, batch: ForwardBatch) -> Self:
        """Return the requests of a batch on the device, one each even if a decode has several rows
        per request (`width`).

        Requests of slot 0 have no token; padding may follow the last request.
        """
        width = batch.width
        if width is None:
            return cls(batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens, batch.extend_start_loc)
        rows = batch.batch_size // width * width
        owners = batch.req_pool_indices[:rows].view(-1, width)
        lengths = (owners > 0).sum(1, dtype=torch.int32)
        starts = torch.arange(0, rows, width, dtype=torch.int32, device=owners.device)
        return cls(owners[:, 0].contiguous(), batch.seq_lens[:rows:width] + lengths - 1, lengths, starts)


@dataclass(frozen=True, slots=True)
class Paged:
    """KV rows of requests, by page.

    `table` int32 [S, P] has the pages of each slot, with `rows_per_page` rows in each. Token t sees
    the first lens[t] rows of slot slots[t], int32 [T] each; `most` is an upper bound of lens.
    """

    table: Tensor
    slots: Tensor
    lens: Tensor
    rows_per_page: int
    most: int


def score_bytes(layers: Iterable[Attention], tokens: int, most: int) -> int:
    """Return the bytes of indexer scores that exist at a time, in steps of `tokens` tokens that see
    at most `most` tokens; 0 without indexers.

    `choose_rows` needs them in addition to the pools, a captured step permanently.
    """
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
    """Return int32 [T, count]: the rows that a token's indexer scores highest, then -1.

    Scores are computed from q [T, H, D] and weights [T, H] with the rows `keys`, scaled by 1 /
    sqrt(H D), in parts of at most LOGITS scores. `named`: another page table int32 [N, P] that
    names the returned rows, and each token's row in it, int32 [T] (None: the table of `paged`).
    """
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
    """Concatenate the rows of several parts; one part is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
