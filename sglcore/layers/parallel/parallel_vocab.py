"""The embedding and the output layer, with the vocabulary divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.checkpoint.parallel.tensor_parallel import Range
from sglcore.layers.linear import Embedding, Head
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.parallel.process_group import AnyGroup


class SharedEmbedding:
    """An embedding with rows divided among ranks: the rank that has an id's row takes it, the
    others take zeros, and an all-reduce sums these."""

    __slots__ = ("_first", "_group", "_rows", "own")

    def __init__(self, own: Embedding, part: Range, group: AnyGroup) -> None:
        """`own` has the rows [first, last) `part` of the vocabulary; ids that it takes count from
        `first`.
        """
        self.own = own
        self._first, self._rows = part[0], part[1] - part[0]
        self._group = group

    def __call__(self, ids: Tensor) -> Tensor:
        """Ids int [T] to rows [T, size], on every rank. All ranks must call it with the same
        ids.
        """
        places = ids - self._first
        elsewhere = (places < 0) | (places >= self._rows)
        rows = self.own(places.masked_fill_(elsewhere, 0))
        return self._group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the rows [T, size] of the batch's ids, or a copy of its `input_embeds` if it has
        them."""
        if batch.input_embeds is not None:
            return batch.input_embeds.clone()
        return self(batch.input_ids)

    def row(self, index: int) -> Tensor:
        """Return row `index`, [size], on every rank, with the embedding's scale. All ranks must
        call it.
        """
        return self(torch.tensor([index], dtype=torch.int32, device=self.own.weight.device))[0]


class SharedHead:
    """An output layer with the vocabulary divided among ranks: concatenates the ranks' columns of
    logits and drops the padding of the last part."""

    __slots__ = ("_group", "_own", "_vocab_size")

    def __init__(self, own: Head, vocab_size: int, group: AnyGroup) -> None:
        """`own` has this rank's rows; `vocab_size` is the whole vocabulary's."""
        self._own, self._vocab_size, self._group = own, vocab_size, group

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, H] to float32 [N, vocab], on every rank. All ranks must call it with the same
        `hidden`.
        """
        parts = self._group.all_gather(self._own(hidden).contiguous())
        whole = torch.cat(tuple(parts), dim=-1)
        return whole[:, : self._vocab_size].contiguous()
