"""Makes the pools of a model's layers, by what each layer keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglcore.runtime.memory.deepseek_v4_rows import DeepSeekV4TokenToKVPool
from sglcore.runtime.memory.geometry import has_window, layer_shapes
from sglcore.runtime.memory.kv_rows import RowCounts, RowPool
from sglcore.runtime.memory.pools import KVPool, LayerShapes, ReqToTokenPool, TokenToKVPool, WindowTable
from sglcore.runtime.memory.shared_layers import shared_places
from sglcore.runtime.memory.states import StatePool
from sglcore.runtime.token_table import TokenTable
from sglcore.step.sizing import MemorySizes

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention


@dataclass(frozen=True, slots=True)
class WindowPools:
    """The pools of sliding-window layers, with the ids of these layers.

    `table` is their page table. `token_to_kv` has their KV slots; it is the pool of all layers if
    layers keep KV rows of their own, and has views of its tensors if both kinds of pages share
    memory.
    """

    layer_ids: frozenset[int]
    table: WindowTable
    token_to_kv: KVPool


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of one worker: page table, KV slots, token table, states (None: no layer has one)
    and windows (None: no layer frees pages outside its window).
    """

    req_to_token: ReqToTokenPool
    token_to_kv: KVPool
    token_table: TokenTable
    states: StatePool | None = None
    windows: WindowPools | None = None


def make_rows(
    layers: Sequence[Attention],
    sizes: MemorySizes,
    device: str,
    poison: bool,
    table: WindowTable | None,
    pins: bool = False,
) -> RowPool:
    """Return one pool of all KV rows of these layers: a `DeepSeekV4TokenToKVPool` if a layer has
    window rows, otherwise a `RowPool`.

    `table` names the sliding-window pages, if there are any. `poison` and `pins` as in `RowPool`.
    """
    counts = RowCounts(sizes.num_pages, sizes.num_window_pages, sizes.max_requests)
    given = [layer.rows for layer in layers], sizes.page_size, counts, device, poison, pins
    if any(has_window(layer) for layer in layers):
        return DeepSeekV4TokenToKVPool(*given, window_table=table)
    return RowPool(*given)


def make_cells(
    layers: Sequence[Attention],
    sizes: MemorySizes,
    make_pool: Callable[[int, LayerShapes], TokenToKVPool],
    windowed: Collection[int],
    is_encoder: bool,
    share: Callable[[Any, Mapping[int, tuple[int, int]], int], TokenToKVPool] | None = None,
) -> tuple[TokenToKVPool, TokenToKVPool | None]:
    """Return the pool of the layers that keep all tokens, and that of the layers with ids in
    `windowed` (None if there are none).

    `make_pool(pages, shapes)` makes each; a layer of the other pool has 0 heads. With
    `sizes.window_unit` the second is made by `share` (`PoolKind.windows`) in the storage of the
    first. The first pool of an encoder has one page.
    """

    def cells(count: int, of_windows: bool) -> TokenToKVPool:
        shapes = layer_shapes(layers, lambda layer: layer.cached and (layer.layer_id in windowed) == of_windows)
        return make_pool(count, shapes)

    full = cells(1 if is_encoder else sizes.num_pages, False)
    if sizes.window_unit:
        assert share is not None
        return full, share(full, shared_places(layers, windowed), sizes.window_unit)
    return full, cells(sizes.num_window_pages, True) if windowed else None
