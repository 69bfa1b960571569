"""The attention layer of every model: it describes itself and hands its rows to the active backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglcore.runtime.forward_context import get_forward_context
from sglcore.runtime.memory.read_only import ReadOnlyPool

if TYPE_CHECKING:
    from sglcore.runtime.kernels.choice import Call
    from sglcore.runtime.kernels.entry import Entry
    from sglcore.runtime.memory.rows import KeptRows


class Attention:
    """Scaled dot-product attention over the paged KV pool.

    `sliding_window` W lets a query see itself and the W - 1 tokens before it. `cached=False`: nothing is stored, and a
    token sees this step's alone; with `causal=False` all of its request, or those less than W from it either way. `softcap`
    c bends a scaled score s to
    c * tanh(s / c). `sinks` [heads] are the scores of one more key that every query sees and that has no value. `is_exact`: its
    keys hold numbers that no rounding may change, and are kept in the model's type. `is_frozen`: it has queries alone, and
    its keys and values are those of another model's layer of this id. `rows`: what is kept in other forms than
    keys and values by head, of which `top_k` are chosen for each token (0: it sees all).
    """

    rows: Mapping[str, KeptRows] = MappingProxyType({})
    top_k: int = 0
    __slots__ = (
        "cached",
        "causal",
        "head_dim",
        "is_exact",
        "is_frozen",
        "layer_id",
        "num_heads",
        "num_kv_heads",
        "scaling",
        "sinks",
        "sliding_window",
        "softcap",
    )

    def __init__(
        self,
        layer_id: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scaling: float | None = None,
        sliding_window: int | None = None,
        causal: bool = True,
        cached: bool = True,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_exact: bool = False,
        is_frozen: bool = False,
    ) -> None:
        self.layer_id = layer_id
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scaling = head_dim**-0.5 if scaling is None else scaling
        self.sliding_window = sliding_window
        self.causal = causal
        self.cached = cached
        self.softcap = softcap
        self.sinks = sinks
        self.is_exact = is_exact
        self.is_frozen = is_frozen

    @property
    def stores(self) -> bool:
        """It keeps keys and values in cells of its own."""
        return self.cached and not self.is_frozen

    @property
    def size_by_head(self) -> int:
        """Elements of a token's keys and values, if each head of queries had its own."""
        return 2 * self.num_heads * self.head_dim

    @property
    def features(self) -> frozenset[str]:
        """What a backend's facts must name to serve it, beside those of its batches."""
        asked = {
            "sliding_window": self.sliding_window is not None,
            "softcap": self.softcap is not None,
            "sinks": self.sinks is not None,
            "encoder": not self.cached,
            "frozen": self.is_frozen,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    def calls(self, page_size: int) -> Iterable[tuple[Entry[Any], Call]]:
        """The entries of the kernel table that a backend calls for it beside those that every model has, each with arguments that have the sizes and types of such
        a call."""
        return ()

    def cells(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The caches [cells, kv_heads, head_dim] of keys and values and the cells int[T] of this forward's tokens, if the
        caller may store there and then call with k and v None. Not where a compiler traces, the backend wants k and v, or
        the pool has another layout. Raises ReadOnlyPoolError for cells that are another model's.
        """
        if torch.compiler.is_compiling() or not self.cached:
            return None
        context = get_forward_context()
        backend, batch = context.attn_backend, context.batch
        if not backend.takes_stored or batch is None:
            return None
        pool, cells = backend.cells_of(self, batch)
        if isinstance(pool, ReadOnlyPool):
            pool.refuse(self.layer_id)
        return None if cells is None else (*pool.kv(self.layer_id), cells)

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """q [T, heads * head_dim], k and v [T, kv_heads * head_dim] to [T, heads * head_dim]; stores k and v. Both are None
        if they are in the layer's `cells` already, or the layer is frozen."""
        if torch.compiler.is_compiling():
            assert k is not None and v is not None
            return torch.ops.sglcore.attention(q, k, v, self.layer_id)
        context = get_forward_context()
        if context.segments is not None:
            return context.segments.run_between(self, q, k, v)
        return context.attn_backend.forward(q, k, v, self, context.batch)


@torch.library.custom_op("sglcore::attention", mutates_args=())
def attention_op(q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
    """Attention as one operation that a compiler does not look into; the context says on what it works."""
    context = get_forward_context()
    return context.attn_backend.forward(q, k, v, context.layers[layer_id], context.batch)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
    return torch.empty_like(q)
