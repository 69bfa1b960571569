"""The contract of this package's attention backends. A backend handles requests with one query, or
few queries to verify; `prompt.py` handles prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import mlx.core as mx

from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What a backend supports; None: anything. `dtypes`: their names, such as "bfloat16".
    `compute`: kinds of hardware, as in `Hardware.kind`. `takes_latent`: layers with values that are
    a part of the keys. `takes_blocks`: models with compressed blocks, and no others."""

    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    compute: tuple[str, ...] | None = None
    takes_latent: bool = True
    takes_blocks: bool = False


class AttentionPlan(Protocol):
    """A backend's preparation for the queries of one step, shared by all layers;
    `DecodeAttention.plan` makes it."""

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """Attend with q [B * N, heads, D] over kv [KV slots, *layer.entry]; returns [B * N, heads,
        value D] in q's dtype. Builds the lazy graph only; nothing is computed yet."""
        ...


class DecodeAttention(Protocol):
    """An attention backend: `plan` once per step, then the plan's `forward` in each layer. It keeps
    nothing between steps but constants, and works under `mx.compile`."""

    facts: ClassVar[AttentionFacts]

    def __init__(self, layers: Sequence[LayerShape], page_size: int, streams: tuple[mx.Stream, ...] = ()) -> None: ...

    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        """Prepare the rows of a batch with a `page_table` for the `forward` of every layer: N
        queries for each of B requests, grouped by request. `seq_lens` int32 [B * N] says for each
        query the number of KV slots up to its own, included. Every declared field is there, but not
        yet the batch's functions. Builds the lazy graph only; nothing is computed yet."""
        ...
