"""What each layer of a model keeps, and its bytes.

A layer keeps KV slots of all tokens, KV slots of a sliding window, KV rows, or a recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row
from sglcore.runtime.memory.kv_rows import FP8, LayerRows, Place, page_multiple, row_bytes
from sglcore.runtime.memory.states import KeepsState, state_bytes
from sglcore.step.sizing import Geometry, size_text

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.memory.pools import LayerShapes

CellBytes = Callable[["LayerShapes", torch.dtype], int]
"""`cell_bytes(layers, dtype)`: bytes of one token over these layers, for one kind of pool."""


def has_window(layer: Attention) -> bool:
    """Return whether the layer keeps data that only a sliding window sees."""
    return layer.sliding_window is not None and (layer.stores or bool(layer.rows))


def keeps_window(layer: Attention, window: int) -> bool:
    """Return whether the layer keeps only the last `window` tokens.

    `window` is the longest window of such layers; 0: there are none.
    """
    return has_window(layer) and layer.sliding_window is not None and layer.sliding_window <= window


def layer_shapes(
    layers: Sequence[Attention], kept: Callable[[Attention], bool] = lambda layer: layer.stores
) -> LayerShapes:
    """Return (kv_heads, head_dim) of each layer in order, as a pool holds them: 0 heads for a layer
    for which `kept(layer)` is False.
    """
    return tuple((layer.num_kv_heads if kept(layer) else 0, layer.head_dim) for layer in layers)


def geometry(
    layers: Sequence[Attention],
    states: Sequence[KeepsState],
    most: int,
    page_size: int,
    dtype: torch.dtype,
    cell_bytes: CellBytes,
) -> Geometry:
    """Return the window length and the bytes of a page, window page, state, ring and host page.

    Windows of at least `most` tokens are kept like all tokens, because no page would be freed in
    time; if all are, the window length is 0 and window rows count in the page. A window page is
    freed when neither the next query nor a block that begins in it needs it.
    """
    rows = [layer.rows for layer in layers]
    least = max((1 + reach(each) for each in rows), default=1)
    windows = [
        max(least, layer.sliding_window) for layer in layers if has_window(layer) and layer.sliding_window is not None
    ]
    window = max((each for each in windows if each < most), default=0)
    of_rows = {place: row_bytes(rows, place, page_size) for place in Place}
    every = page_size * cell_bytes(layer_shapes(layers), dtype)
    of_windows = page_size * cell_bytes(
        layer_shapes(layers, lambda layer: layer.stores and keeps_window(layer, window)), dtype
    )
    page, window_page = every - of_windows + of_rows[Place.PAGES], of_windows + of_rows[Place.WINDOW_PAGES]
    if not window:
        page, window_page = page + window_page, 0
    return Geometry(page, window_page, window, state_bytes(states), of_rows[Place.SLOTS], of_rows[Place.HOST_PAGES])


def reach(rows: LayerRows) -> int:
    """Return how many tokens before a page's first token are inputs of blocks that end after it.

    Only rows in window pages count.
    """
    return max((kept.span - kept.ratio for kept in rows.values() if kept.place is Place.WINDOW_PAGES), default=0)


def fitting_page_size(layers: Sequence[Attention], asked: int | None, default: int) -> int:
    """Return the tokens per page: `asked`, or without it the least fitting multiple from `default`
    up.

    A page must have whole rows and rings of every layer. Raises ConfigError if `asked` does not
    fit.
    """
    multiple = page_multiple(layer.rows for layer in layers)
    if asked is None:
        return -(-default // multiple) * multiple
    if asked % multiple:
        raise ConfigError(
            f"page_size is {asked}",
            wanted=f"a multiple of {multiple} tokens, so that a page has whole blocks of this model",
            remedy="leave --page-size out",
        )
    return asked


def rows_row(
    kept: Geometry, layers: Sequence[Attention], page_size: int, dtype: torch.dtype, kv_cache_dtype: str = "auto"
) -> Row:
    """Return the ledger row that compares 1,000 tokens of KV rows with keys and values per head."""

    def thousand(page_bytes: int) -> str:
        return size_text(1000 * page_bytes // page_size)

    parts = [f"{thousand(kept.page)} for 1,000 tokens"]
    parts += [f"{thousand(kept.window_page)} for 1,000 in sliding windows"] if kept.window_page else []
    parts += [f"{size_text(kept.ring)} per request"] if kept.ring else []
    dense = sum(layer.size_by_head for layer in layers) * dtype.itemsize
    reason = f"keys and values by head would be {size_text(1000 * dense)} for 1,000 tokens"
    floats = {each.codec.float8 for layer in layers for each in layer.rows.values() if each.codec is not None}
    if kv_cache_dtype == FP8:
        parts[0], reason = (
            f"{FP8}, {parts[0]}",
            f"8-bit floats ({', '.join(floats)}) with a scale for each group of them; in {dtype} {reason}",
        )
    return Row("kv rows", kv_cache_dtype, ", ".join(parts), reason, f"--kv-cache-dtype auto or {FP8}")
