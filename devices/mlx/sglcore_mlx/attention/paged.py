"""Attention that reads cells where they lie, by a kernel for Apple GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from sglcore_mlx.attention.contract import AttentionFacts, DecodeRows
from sglcore_mlx.attention.metal import Launcher, launch_on_metal, paged_decode
from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The rows themselves: the kernel reads the page table."""

    rows: DecodeRows
    page_size: int
    launcher: Launcher

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """[B, heads, D] of q [B, heads, D] over kv [cells, 2, kv_heads, D]."""
        return paged_decode(
            q,
            kv,
            self.rows.own_pages,
            self.rows.seq_lens,
            page_size=self.page_size,
            scale=layer.scale,
            window=layer.sliding_window,
            softcap=layer.softcap,
            sinks=layer.sinks,
            launcher=self.launcher,
        )


class MetalAttention:
    """One or two launches a layer; `GatheredAttention` is its reference."""

    facts: ClassVar[AttentionFacts] = AttentionFacts(
        dtypes=("float32", "float16", "bfloat16"), head_dims=tuple(range(32, 513, 32)), compute=("metal",)
    )

    def __init__(
        self,
        layers: Sequence[LayerShape],
        page_size: int,
        streams: tuple[mx.Stream, ...] = (),
        launcher: Launcher = launch_on_metal,
    ) -> None:
        """`launcher` runs the kernel; its default is the GPU, which needs no further `streams`."""
        self._page_size = page_size
        self._launcher = launcher

    def plan(self, rows: DecodeRows) -> PagedPlan:
        """Nothing is worked out ahead."""
        return PagedPlan(rows, self._page_size, self._launcher)
