"""Layers that combine the parts of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from sglcore.checkpoint.parallel.tensor_parallel import Range
from sglcore_mlx.layers.linear import Embedding, Head, Identified
from sglcore_mlx.parallel.ranks import Ranks


class Summed:
    """Callable that runs a layer which computes a partial sum on each rank, and returns the sum
    over the ranks."""

    __slots__ = ("_inner", "_ranks")

    def __init__(self, inner: Callable[..., mx.array], ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks

    def __call__(self, x: mx.array, *more: Any) -> mx.array:
        """Return the sum [T, out] of [T, in] and further inputs of the layer."""
        return self._ranks.summed(self._inner(x, *more))


class SharedEmbedding:
    """An embedding with rows divided among ranks: the rank that has an id's row takes it, the
    others take zeros, and these are summed."""

    __slots__ = ("_first", "_ranks", "_rows", "own")

    def __init__(self, own: Embedding, part: Range, ranks: Ranks) -> None:
        """`own` has the rows [first, last) `part` of the vocabulary."""
        self.own, self._first, self._rows, self._ranks = own, part[0], part[1] - part[0], ranks

    def __call__(self, ids: mx.array) -> mx.array:
        """Return the rows [T, size] of ids int [T]."""
        places = ids.astype(mx.int32) - self._first
        is_here = (places >= 0) & (places < self._rows)
        rows = self.own(mx.where(is_here, places, 0))
        return self._ranks.summed(mx.where(is_here[:, None], rows, 0).astype(rows.dtype))

    def embed(self, batch: Identified) -> mx.array:
        """Return the rows [T, size] of the batch's ids."""
        return self(batch.input_ids)

    def row(self, index: int) -> mx.array:
        """Return the row of the single id `index`, [1, size]."""
        return self(mx.array([index]))


class SharedHead:
    """An output layer with the vocabulary divided among ranks: every rank gets all logits."""

    __slots__ = ("_own", "_ranks", "_vocab_size")

    def __init__(self, own: Head, vocab_size: int, ranks: Ranks) -> None:
        """`own` has this rank's rows of the vocabulary, which the last rank's padding follows."""
        self._own, self._vocab_size, self._ranks = own, vocab_size, ranks

    def __call__(self, hidden: mx.array) -> mx.array:
        """Map [N, H] to logits float32 [N, V]."""
        return self._ranks.joined(self._own(hidden))[:, : self._vocab_size]
