"""The attention layer of every model: it calls the active backend."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_context import get_forward_context
from sglcore.runtime.memory.read_only import ReadOnlyPool


class BackendAttention(Attention):
    """An attention layer, callable inside a forward with q, k and v. The batch and the backend come
    from the forward context.
    """

    __slots__ = ()

    def cells(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return where the caller may store keys and values before it calls with k and v None.

        The result is the key and value caches [cells, kv_heads, head_dim] and the KV slots int[T]
        of this forward's tokens. None if the layer keeps nothing (`cached=False`), while a compiler
        traces, without a batch in the context, or if the backend needs k and v
        (`AttentionBackend.takes_stored` is False). Raises ReadOnlyPoolError for KV slots of another
        model.
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
        """Map q [T, heads * head_dim], k and v [T, kv_heads * head_dim] to [T, heads * head_dim].

        Store k and v in the batch's KV slots, unless `cached` is False. k and v are None if they
        are already in the layer's `cells`, or if the layer is frozen. Raises StalePlanError without
        a batch that the backend planned.
        """
        if torch.compiler.is_compiling():
            assert k is not None and v is not None
            return torch.ops.sglcore.attention(q, k, v, self.layer_id)
        context = get_forward_context()
        if context.segments is not None:
            return context.segments.run_between(self, q, k, v)
        return context.attn_backend.forward(q, k, v, self, context.batch)


@torch.library.custom_op("sglcore::attention", mutates_args=())
def attention_op(q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
    """Run a `BackendAttention` call as one operation that is opaque to a compiler; q, k, v and the
    result as there.

    `layer_id` is the layer's index in the forward context, where the batch and the backend are
    taken from too.
    """
    context = get_forward_context()
    return context.attn_backend.forward(q, k, v, context.layers[layer_id], context.batch)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> Tensor:
    return torch.empty_like(q)
