"""An attention layer that stores KV rows instead of keys and values per head.

It maps hidden states to hidden states, projections included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.sparse.host_rows import HISPARSE
from sglcore.runtime.forward_context import get_forward_context
from sglcore.runtime.memory.kv_rows import Place, swapped_rows

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.memory.kv_rows import KeptRows


class SparseLayer(Attention, ABC):
    """The base of sparse attention layers, callable from hidden states to hidden states. Its
    attributes describe it to the runner, graphs and memory sizing.

    `rows` are the stored rows, by name; the first `value_size` elements of a row are its value.
    `top_k` rows are chosen for each token (0: it sees all). `asks` is the feature that the facts of
    a backend must contain.
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
        """`asks`, which covers everything that the layer needs, and `hisparse` if some of its rows
        are in host memory.
        """
        return self._features

    def keep_on_device(self) -> None:
        """Keep all rows on the device. Call before pools are made."""
        name = swapped_rows(self.rows)
        if name is not None:
            self.rows = {**self.rows, name: replace(self.rows[name], place=Place.PAGES)}
            self._features -= {HISPARSE}

    @property
    def layer(self) -> Attention:
        """This layer itself, as backends see it."""
        return self

    def __call__(self, hidden: Tensor, batch: object = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  projections are inside
        """Map hidden [T, H] to [T, H] by `mix`; store and read rows.

        A forward captured in pieces runs this layer between two pieces, and a compiler treats it as
        opaque. The batch comes from the forward context; the parameter `batch` is ignored.
        """
        if torch.compiler.is_compiling():
            return torch.ops.sglcore.sparse_layer(hidden, self.layer_id)
        context = get_forward_context()
        if context.segments is not None:
            return context.segments.run_between(self, hidden)
        assert context.batch is not None
        return self.mix(hidden, context.batch, context.attn_backend)

    @abstractmethod
    def mix(self, hidden: Tensor, batch: ForwardBatch, backend: Any) -> Tensor:
        """Map hidden [T, H] of the batch's tokens with a backend that has this layer's feature.

        Decode steps run inside graphs: no host reads. Padding rows have slot 0.
        """


@torch.library.custom_op("sglcore::sparse_layer", mutates_args=())
def sparse_layer_op(hidden: Tensor, layer_id: int) -> Tensor:
    """Run a sparse layer on hidden [T, H] as one operation that is opaque to a compiler; return
    [T, H].

    `layer_id` is the layer's index in the forward context, which has the batch and backend too.
    """
    layer = get_forward_context().layers[layer_id]
    assert isinstance(layer, SparseLayer)
    return layer(hidden)


@sparse_layer_op.register_fake
def _(hidden: Tensor, layer_id: int) -> Tensor:
    return torch.empty_like(hidden)
