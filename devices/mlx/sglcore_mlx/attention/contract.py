"""What an attention backend of this package is. It serves rows of one query; whole prompts are
`prompt.py`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import mlx.core as mx

from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What a backend takes; None: anything. `compute` are the kinds of hardware it runs on, as
    `Hardware.kind` has them."""

    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    compute: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """N rows of one query for each of B requests, one after the other: `page_table` int32 [B, n],
    `seq_lens` int32 [B * N] with the query's own token counted."""

    page_table: mx.array
    seq_lens: mx.array

    @property
    def width(self) -> int:
        """N."""
        return self.seq_lens.shape[0] // max(self.page_table.shape[0], 1)

    @property
    def own_pages(self) -> mx.array:
        """int32 [B * N, n]: the page table of each row."""
        return self.page_table if self.width == 1 else mx.repeat(self.page_table, self.width, axis=0)


class AttentionPlan(Protocol):
    """What a backend worked out of some rows, once for all layers."""

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """[B * N, heads, D] of q [B * N, heads, D] over the cells kv [cells, 2, kv_heads, D], in
        q's dtype. Queues only."""
        ...


class DecodeAttention(Protocol):
    """A backend. It holds constants only, and works under `mx.compile`."""

    facts: ClassVar[AttentionFacts]

    def __init__(self, layers: Sequence[LayerShape], page_size: int, streams: tuple[mx.Stream, ...] = ()) -> None: ...

    def plan(self, rows: DecodeRows) -> AttentionPlan:
        """What `forward` needs of these rows. Queues only."""
        ...
