"""Adapts attention calls of transformers' classes to the engine's: tokens as rows instead of heads,
and rotary embedding fused with the KV store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sglcore.layers.attention import Rows
from sglcore.layers.torch_layers import Build
from sglcore.models.transformers_backend.alibi_slopes import Places, query_columns, wide_head, widened
from sglcore.models.transformers_backend.rotary_adapter import Angles, Turn
from sglcore.models.transformers_backend.shape_walk import AttentionCall
from sglcore.runtime.attention.backend_attention import BackendAttention
from sglcore.runtime.kernels.table import KernelTable

PAGED = "sglcore_paged"
"""The name under which transformers finds the engine's attention. It has no mask function, so no
masks are made."""
MASKED = "sglcore_masked"
"""The same with masks that hide nothing and take no memory, for classes with a bias, some of which
do not run without."""


class PagedAttention:
    """Callable from queries, keys and values of one attention call of a module to its output, over
    the paged pool. `turn`: the rotary embedding that the module applied or leaves to this call;
    None: none is known. `stores` is False if another call of the forward stores the same keys and
    values in the layer's KV slots. `places` and `slopes`: the positions and slopes of an ALiBi
    bias; `slopes` None: there is no bias."""

    __slots__ = (
        "_columns",
        "_norm_rotary_and_store",
        "_places",
        "_rotary_and_store",
        "_stores",
        "_turn",
        "_wide",
        "layer",
    )

    def __init__(
        self,
        layer: BackendAttention,
        turn: Turn | None,
        stores: bool,
        build: Build,
        places: Places,
        slopes: Sequence[float] | None,
    ) -> None:
        self.layer = layer
        self._places, self._columns = places, None
        if slopes is not None:
            self._columns = query_columns(slopes, layer.scaling).to(build.weights.device, build.dtype)
        self._stores = stores
        self._turn = turn if turn is not None and turn.is_direct else None
        self._wide = layer.head_dim
        self._rotary_and_store = self._norm_rotary_and_store = None
        if self._turn is not None and layer.cached and stores:
            q, kv = build.rows(layer.num_heads * self._wide), build.rows(layer.num_kv_heads * self._wide)
            cell = build.rows(layer.num_kv_heads, self._wide)
            turned = build.indices(), self._turn.table(build), self._wide
            stored = cell, cell, build.indices(dtype=build.index_dtype)
            self._rotary_and_store = build.kernel(KernelTable.rotary_and_store, q, kv, kv, *turned, *stored)
            norms = [each.placed for each in self._turn.norms]
            has_tables = all(each.has_tables for each in self._turn.rotaries)
            if norms and has_tables and norms[0].eps == norms[1].eps:
                given = *(each.weight for each in norms), norms[0].eps
                fused = build.kernel(KernelTable.norm_rotary_and_store, q, kv, kv, *turned, *stored, *given)
                self._norm_rotary_and_store = fused
            for each in self._turn.norms:
                each.waits = self._norm_rotary_and_store is not None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map query [1, heads, T, dim], key and value [1, kv_heads, T, at most dim] to [1, T,
        heads, the value's dim]. Stores keys and values in the KV slots of the step's tokens if
        `stores`."""
        wide, size = self._wide, value.shape[3]
        if self._columns is not None:
            query, key = widened(query, self._columns), widened(key, self._places.columns)
        rows = _rows(query, wide), _rows(key, wide), _rows(value, wide)
        angles = None if self._turn is None else self._turn.take(query, key)
        q, k, v = rows if angles is None or self._turn is None else self._turned(self._turn, *rows, angles)
        is_there = not self._stores and self.layer.cells() is not None
        out = self.layer(q, None, None) if is_there else self.layer(q, k, v)
        out = out.view(1, query.shape[2], self.layer.num_heads, wide)
        return out if size == wide else out[..., :size]

    def _turned(self, turn: Turn, q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Rows:
        cells = None if self._rotary_and_store is None else self.layer.cells()
        if self._norm_rotary_and_store is not None:
            q_norm, k_norm = (each.placed for each in turn.norms)
            if cells is not None:
                given = q, k, v, angles.positions, angles.table, self._wide, *cells
                return self._norm_rotary_and_store(*given, q_norm.weight, k_norm.weight, q_norm.eps), None, None
            q, k = (norm(x.view(len(x), -1, self._wide)).view(x.shape) for norm, x in ((q_norm, q), (k_norm, k)))
        if self._rotary_and_store is not None and cells is not None:
            return self._rotary_and_store(q, k, v, angles.positions, angles.table, self._wide, *cells), None, None
        return *turn.rows(q, k, angles, self._wide), v


class Several:
    """Callable like `PagedAttention`, for a module that attends several times in a forward: after
    `begin`, each call uses the next of `calls`."""

    __slots__ = ("_calls", "_next")

    def __init__(self, calls: Sequence[PagedAttention]) -> None:
        self._calls = calls
        self._next = 0

    def begin(self) -> None:
        """Start a forward, even if the previous one was interrupted."""
        self._next = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with the next of the module's calls: query [1, heads, T, dim], key and value [1,
        kv_heads, T, at most dim] to [1, T, heads, the value's dim].
        """
        self._next += 1
        return self._calls[self._next - 1](query, key, value)


def attention_layers(
    model: nn.Module, calls: tuple[AttentionCall, ...], turns: Mapping[nn.Module, Turn], build: Build, places: Places
) -> tuple[tuple[BackendAttention, ...], list[Several]]:
    """Attach attention to the modules of a model, as their attribute `sglcore_attention`. Returns
    one layer for each call that stores keys and values, in order (calls that only read these KV
    slots share the layer); and the attentions whose `begin` must be called before each forward."""
    parameters = dict(model.named_parameters())
    layers: dict[int, BackendAttention] = {}
    own: dict[nn.Module, list[PagedAttention]] = {}
    for number, call in enumerate(calls):
        stores = call.cells == number
        if stores:
            head_dim = max(call.head_dim, call.value_dim)
            layers[number] = BackendAttention(
                len(layers),
                call.num_heads,
                call.num_kv_heads,
                head_dim if call.slopes is None else wide_head(head_dim),
                call.scaling,
                call.window,
                cached=not build.config.is_encoder,
                softcap=call.softcap,
                sinks=None if call.sinks is None else parameters[call.sinks],
                is_exact=call.slopes is not None,
            )
        paged = PagedAttention(layers[call.cells], turns.get(call.module), stores, build, places, call.slopes)
        own.setdefault(call.module, []).append(paged)
    several: list[Several] = []
    for module, found in own.items():
        if len(found) > 1:
            several.append(Several(found))
        module.sglcore_attention = several[-1] if len(found) > 1 else found[0]  # pyright: ignore[reportArgumentType]
    return tuple(layers.values()), several


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any
) -> tuple[Tensor, None]:
    """Return the attention of a module [1, T, heads, the value's dim], and None. Has the signature
    of transformers' attention functions; the mask is not read."""
    paged: Any = module.sglcore_attention
    return paged(query, key, value), None


def make_zeros(batch_size: int, q_length: int, kv_length: int, device: torch.device, **_: Any) -> Tensor:
    """Return a mask that hides nothing: bool [batch_size, 1, q_length, kv_length], all False,
    expanded from one element.
    """
    return torch.zeros((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)


def _rows(part: Tensor, wide: int) -> Tensor:
    """Map [1, heads, T, dim] to [T, heads * wide]; narrower heads are padded with zeros. The result
    may be a view.
    """
    _, heads, tokens, size = part.shape
    if size != wide:
        part, size = pad(part, (0, wide - size)), wide
    if part.stride()[1::2] != (size, 1) or torch.compiler.is_compiling():
        return part.transpose(1, 2).reshape(tokens, heads * size)
    return part.as_strided((tokens, heads * size), (part.stride(2), 1))  # transposed and viewed at once
