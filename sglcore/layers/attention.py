"""The attention layer of models: norms of query and key heads and rotary embedding, fused with the
KV store if the device has such kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.layers.build_scope import Scope
from sglcore.layers.norm import RMSNorm
from sglcore.layers.rotary import axes_of, turned_by_axes
from sglcore.runtime.attention.backend_attention import BackendAttention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import get_attn_backend
from sglcore.runtime.kernels.table import KernelTable

Rows = tuple[Tensor, Tensor | None, Tensor | None]
"""Queries, keys and values, each [T, heads * head_dim]. Keys and values are None if they are stored
already."""


class AttentionLayer:
    """`layer_kinds.Attention` in torch: attention from concatenated queries, keys and values.
    `layer` is the part that attention backends see."""

    __slots__ = (
        "_axes",
        "_cos_sin",
        "_head_dim",
        "_norm_rotary_and_store",
        "_norms_heads",
        "_rotary",
        "_rotary_and_store",
        "_sizes",
        "_stores",
        "k_norm",
        "layer",
        "q_norm",
    )

    def __init__(
        self,
        build: Scope,
        layer_id: int,
        rotary: Tensor | None,
        *,
        qk_norm: bool = False,
        whole_norm: bool = False,
        norm_offset: float | None = None,
        sinks: bool = False,
        is_encoder: bool = False,
    ) -> None:
        """`rotary` is the result of `cos_sin_cache` (None: no rotary embedding).

        `qk_norm`: `q_norm` and `k_norm` of this scope norm each query and key head, with
        `norm_offset` added to their weights. `whole_norm`: they norm all queries of a token at
        once, and all keys. `sinks`: the parameter `sinks` [heads] has the scores of one more key
        without value. `is_encoder`: each token sees its whole request."""
        config = build.config
        size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        window = config.sliding_windows[layer_id]
        self._norms_heads = qk_norm
        self.q_norm, self.k_norm = (
            _norm(build.at(name), count, qk_norm, norm_offset) if qk_norm or whole_norm else None
            for name, count in (("q_norm", heads), ("k_norm", kv_heads))
        )
        self.layer = BackendAttention(
            layer_id,
            heads,
            kv_heads,
            size,
            config.attention_scaling,
            window,
            causal=not is_encoder,
            cached=not config.is_encoder,
            softcap=config.options.get("attn_logit_softcapping"),
            sinks=build.parameter("sinks", heads) if sinks else None,
        )
        self._sizes = [heads * size, kv_heads * size, kv_heads * size]
        self._head_dim = size
        self._cos_sin = rotary
        self._axes = None if rotary is None else axes_of(config, rotary.device)
        self._choose(build)
        self._stores = self._rotary_and_store is not None or self._norm_rotary_and_store is not None

    def _choose(self, build: Scope) -> None:
        """Choose the kernels for rotary embedding, alone or fused with norms and KV store, for
        these heads, with KV slots in the model's dtype.
        """
        self._rotary, self._rotary_and_store, self._norm_rotary_and_store = build.kernels.rotary, None, None
        if self._cos_sin is None:
            return
        q, k, v = (build.rows(size) for size in self._sizes)
        turned = q, k, build.indices(), self._cos_sin, self._head_dim
        self._rotary = build.kernel(KernelTable.rotary, *turned)
        if not self.layer.cached:
            return
        cell = build.rows(self.layer.num_kv_heads, self._head_dim)
        stored = q, k, v, *turned[2:], cell, cell, build.indices(dtype=build.index_dtype)
        self._rotary_and_store = build.kernel(KernelTable.rotary_and_store, *stored)
        if self._norms_heads and self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            self._norm_rotary_and_store = build.kernel(KernelTable.norm_rotary_and_store, *stored, *norms)

    def __call__(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, (heads + 2 kv_heads) * head_dim], queries, keys and values concatenated, to [T, heads
        * head_dim]; stores the keys and values if the layer has a KV cache."""
        positions, cos_sin = batch.positions, self._cos_sin
        if batch.mrope_positions is not None and cos_sin is not None and self._axes is not None:
            cos_sin = turned_by_axes(cos_sin, batch.mrope_positions, self._axes)
            positions = torch.arange(len(positions), dtype=positions.dtype, device=positions.device)
        return self.layer(*self._rows(qkv, positions, cos_sin))

    def store(self, kv: Tensor, batch: ForwardBatch) -> None:
        """Store `kv` [T, 2 * kv_heads * head_dim], keys before norm and rotary embedding and then
        values, in the KV slots (`cells`) of the batch's tokens. Only for layers with rotary
        embedding. Does not wait."""
        layer, cos_sin = self.layer, self._cos_sin
        assert cos_sin is not None
        k, v = (each.contiguous() for each in kv.chunk(2, -1))
        k = k if self.k_norm is None else self._norm(self.k_norm, k)
        # The kernel rotates queries and keys; only the keys are needed here.
        _, k = self._rotary(k.clone(), k, batch.positions, cos_sin, self._head_dim)
        pool, cells = get_attn_backend().cells_of(layer, batch)
        assert cells is not None
        shape = (kv.shape[0], layer.num_kv_heads, layer.head_dim)
        pool.store(layer.layer_id, k.view(shape), v.view(shape), cells)

    def _rows(self, qkv: Tensor, positions: Tensor, cos_sin: Tensor | None) -> Rows:
        q, k, v = qkv.split(self._sizes, dim=-1)
        q_norm, k_norm = self.q_norm, self.k_norm
        cells = self.layer.cells() if self._stores and cos_sin is not None else None
        if q_norm is not None and k_norm is not None:
            if self._norm_rotary_and_store is not None and cells is not None:
                assert cos_sin is not None
                norms = q_norm.weight, k_norm.weight, q_norm.eps
                stored = self._norm_rotary_and_store(q, k, v, positions, cos_sin, self._head_dim, *cells, *norms)
                return stored, None, None
            q, k = self._norm(q_norm, q), self._norm(k_norm, k)
        if cos_sin is None:
            return q, k, v
        if self._rotary_and_store is not None and cells is not None:
            return self._rotary_and_store(q, k, v, positions, cos_sin, self._head_dim, *cells), None, None
        return *self._rotary(q, k, positions, cos_sin, self._head_dim), v

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        if not self._norms_heads:
            return norm(x)
        tokens, width = x.shape
        return norm(x.view(tokens, width // self._head_dim, self._head_dim)).view(tokens, width)


def _norm(build: Scope, count: int, of_heads: bool, offset: float | None) -> RMSNorm:
    """Return the norm of a scope's queries or keys: with `of_heads` of each of `count` heads,
    otherwise of all these heads at once. `offset` is that of `RMSNorm`.
    """
    size, eps = build.config.head_dim, build.config.rms_norm_eps
    if of_heads:
        return RMSNorm(build, size, eps, count, offset)
    return RMSNorm(build, count * size, eps, offset=offset)
