"""Attention over gathered cells: any device, any shape. The reference of faster backends.

A column beyond a request's end repeats its last cell, so that nothing another request left there,
not even a NaN, can reach a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from sglcore_mlx.attention.contract import AttentionFacts, DecodeRows
from sglcore_mlx.attention.dense import attend
from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """`cells` int32 [B, S]; `masks` by sliding window, bool [B, 1, N, S]."""

    cells: mx.array
    masks: Mapping[int | None, mx.array]

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """[B * N, heads, D] of q [B * N, heads, D] over kv [cells, 2, kv_heads, D]."""
        found = kv[self.cells]
        keys, values = found[:, :, 0].swapaxes(1, 2), found[:, :, 1].swapaxes(1, 2)
        mask = self.masks[layer.sliding_window]
        queries = q.reshape(found.shape[0], -1, *q.shape[1:]).swapaxes(1, 2)
        return attend(queries, keys, values, mask, layer).swapaxes(1, 2).reshape(q.shape)


class GatheredAttention:
    """Gathers each request's cells, then attends: as many bytes moved again as attention itself
    reads."""

    facts: ClassVar[AttentionFacts] = AttentionFacts()

    def __init__(self, layers: Sequence[LayerShape], page_size: int, streams: tuple[mx.Stream, ...] = ()) -> None:
        """`streams` are not used: a GPU's own is all."""
        self._windows = tuple(dict.fromkeys(layer.sliding_window for layer in layers))
        self._page_size = page_size

    def plan(self, rows: DecodeRows) -> GatheredPlan:
        """The cells of every request, up to the width of its page table, and which of them count
        for each row."""
        size, lens = self._page_size, rows.seq_lens.reshape(rows.page_table.shape[0], -1)
        columns = mx.arange(rows.page_table.shape[1] * size, dtype=mx.int32)[None]
        places = mx.minimum(columns, mx.max(lens, axis=1, keepdims=True) - 1)
        pages = mx.take_along_axis(rows.page_table, places // size, axis=1)
        masks = {window: _mask(columns, lens, window) for window in self._windows}
        return GatheredPlan(pages * size + places % size, masks)


def _mask(columns: mx.array, lens: mx.array, window: int | None) -> mx.array:
    """bool [B, 1, N, S]: the columns of int32 [1, S] that a query at the end of each of lens int32
    [B, N] sees."""
    ends = lens[:, :, None]
    seen = columns < ends
    if window is not None:
        seen = seen & (columns >= ends - window)
    return seen[:, None]
