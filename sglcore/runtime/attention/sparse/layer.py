"""An attention layer that keeps rows of its own: a function of hidden states, from the projections in to the one out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_context import get_forward_context
from sglcore.runtime.hisparse.coordinator import HISPARSE
from sglcore.runtime.memory.rows import swapped_rows

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.memory.rows import KeptRows


class SparseLayer(Attention, ABC):
    """What such layers are to the runner, to graphs and to who sizes memory.

    `rows` are those that it keeps, by name; `value_size` elements of a row are its value; `top_k` rows are chosen for each token (0: it
    sees all). `asks` are features that a backend must name.
    """

    def __init__(
        self,
        layer_id: int,
        num_heads: int,
        head_dim: int,
        rows: Mapping[str, KeptRows],
        asks: str,
        *,
        scaling: float,
        value_size: int,
        top_k: int = 0,
        sliding_window: int | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(layer_id, num_heads, 1, head_dim, scaling, sliding_window, cached=False, sinks=sinks)
        self.rows = rows
        self.value_size = value_size
        self.top_k = top_k
        self._features = frozenset({asks} if swapped_rows(rows) is None else {asks, HISPARSE})

    @property
    def features(self) -> frozenset[str]:
        """One name for all of its attention."""
        return self._features

    @property
    def layer(self) -> Attention:
        """Itself: what backends see of it."""
        return self

    def __call__(self, hidden: Tensor, batch: object = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  projections are inside
        """[T, H] to [T, H]; rows are stored and read. A forward that is captured in pieces runs it between two of them, and a
        compiler does not look into it: the batch is the context's, whatever a model hands on."""
        if torch.compiler.is_compiling():
            return torch.ops.sglcore.sparse_layer(hidden, self.layer_id)
        context = get_forward_context()
        if context.segments is not None:
            return context.segments.run_between(self, hidden)
        assert context.batch is not None
        return self.mix(hidden, context.batch, context.attn_backend)

    @abstractmethod
    def mix(self, hidden: Tensor, batch: ForwardBatch, backend: Any) -> Tensor:
        """hidden [T, H] of the batch's tokens, by a backend that names what this layer asks. On decode steps it runs inside
        graphs: no host reads. Padding rows are of slot 0."""


@torch.library.custom_op("sglcore::sparse_layer", mutates_args=())
def sparse_layer_op(hidden: Tensor, layer_id: int) -> Tensor:
    """Such a layer as one operation that a compiler does not look into; the context says on what it works."""
    layer = get_forward_context().layers[layer_id]
    assert isinstance(layer, SparseLayer)
    return layer(hidden)


@sparse_layer_op.register_fake
def _(hidden: Tensor, layer_id: int) -> Tensor:
    return torch.empty_like(hidden)
