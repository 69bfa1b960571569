"""The contract of this package's attention backends. A backend handles requests with one query, or
few queries to verify; `prompt.py` handles prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import mlx.core as mx

from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What a backend supports; None: anything. `compute`: kinds of hardware, as in
    `Hardware.kind`."""

    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    compute: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """N queries for each of B requests, grouped by request: `page_table` int32 [B, n], `seq_lens`
    int32 [B * N], which includes the query's own token."""

    page_table: mx.array
    seq_lens: mx.array

    @property
    def width(self) -> int:
        """N, the number of queries of each request."""
        return self.seq_lens.shape[0] // max(self.page_table.shape[0], 1)

    @property
    def own_pages(self) -> mx.array:
        """int32 [B * N, n]: the page table of each query."""
        return self.page_table if self.width == 1 else mx.repeat(self.page_table, self.width, axis=0)


class AttentionPlan(Protocol):
    """A backend's preparation for the queries of one step, shared by all layers;
    `DecodeAttention.plan` makes it."""

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """Attend with q [B * N, heads, D] over kv [cells, 2, kv_heads, D]; returns [B * N, heads,
        D] in q's dtype. Queues only."""
        ...


class DecodeAttention(Protocol):
    """An attention backend: `plan` once per step, then the plan's `forward` in each layer. It holds
    constants only, and works under `mx.compile`."""

    facts: ClassVar[AttentionFacts]

    def __init__(self, layers: Sequence[LayerShape], page_size: int, streams: tuple[mx.Stream, ...] = ()) -> None: ...

    def plan(self, rows: DecodeRows) -> AttentionPlan:
        """Prepare these queries for `forward`. Queues only."""
        ...
