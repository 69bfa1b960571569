"""Paged attention: a kernel for Apple GPUs reads keys and values in their pages, without a
gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from sglcore_mlx.attention.contract import AttentionFacts
from sglcore_mlx.attention.metal import Launcher, launch_on_metal, paged_decode
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The plan of `MetalAttention`: the batch, with page table and lengths of its queries, which
    the kernel reads; `launcher` runs the kernel."""

    batch: ForwardBatch
    page_size: int
    launcher: Launcher

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """Implements `AttentionPlan.forward` with one or two kernel launches. Raises ConfigError
        for sizes and types that the kernels do not support."""
        return paged_decode(
            q,
            kv,
            self.batch.pages_of_rows,
            self.batch.seq_lens,
            page_size=self.page_size,
            scale=layer.scale,
            window=layer.sliding_window,
            softcap=layer.softcap,
            sinks=layer.sinks,
            visible=self.batch.visible,
            launcher=self.launcher,
        )


class MetalAttention:
    """Paged attention with one or two kernel launches per layer (`metal.py`); `GatheredAttention`
    is its reference."""

    facts: ClassVar[AttentionFacts] = AttentionFacts(
        dtypes=("float32", "float16", "bfloat16"),
        head_dims=tuple(range(32, 513, 32)),
        compute=("metal",),
        takes_latent=False,
    )

    def __init__(
        self,
        layers: Sequence[LayerShape],
        page_size: int,
        streams: tuple[mx.Stream, ...] = (),
        launcher: Launcher = launch_on_metal,
    ) -> None:
        """`launcher` runs the kernel, by default on the GPU; `layers` and `streams` are not
        used."""
        self._page_size = page_size
        self._launcher = launcher

    def plan(self, batch: ForwardBatch) -> PagedPlan:
        """Implements `DecodeAttention.plan`: keep the batch; there is nothing to compute in
        advance."""
        return PagedPlan(batch, self._page_size, self._launcher)
