"""The cache entries of compressed blocks (DeepSeek-V4), in addition to a layer's KV slots.

A layer with blocks has up to four arrays by page: block rows, keys of its indexer, and for layers
in which a block also depends on the tokens of the block before, the part of a page's last block
that the next page's first block needs. So a request can continue from any cached page. The tokens
of incomplete blocks are states of the request slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

import mlx.core as mx

from sglcore.core.errors import ConfigError
from sglcore_mlx.forward_batch import States
from sglcore_mlx.models.contract import BlockShape, LayerShape, StateShape


@dataclass(frozen=True, slots=True)
class PageArray:
    """An array of a layer by page: `count` rows for each page, each of `shape` and `dtype`."""

    count: int
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.count * prod(self.shape) * self.dtype.size


def page_arrays(blocks: BlockShape, page_size: int, dtype: mx.Dtype) -> list[PageArray]:
    """Return the arrays of a layer, for each compressor (the layer's own, then its indexer's): the
    rows, and if blocks overlap, values and gates of a page's last block, float32."""
    found: list[PageArray] = []
    for size in blocks.sizes:
        found.append(PageArray(page_size // blocks.ratio, (size,), dtype))
        if blocks.series > 1:
            found.append(PageArray(1, (blocks.ratio, 2 * size), mx.float32))
    return found


def with_blocks(layers: Sequence[LayerShape]) -> Iterator[tuple[int, BlockShape]]:
    """Yield the layers with blocks: (layer id, blocks)."""
    return ((layer_id, layer.blocks) for layer_id, layer in enumerate(layers) if layer.blocks is not None)


def has_blocks(layers: Sequence[LayerShape]) -> bool:
    """Return whether a layer has compressed blocks."""
    return any(layer.blocks is not None for layer in layers)


def block_page_bytes(layers: Sequence[LayerShape], page_size: int, dtype: mx.Dtype) -> int:
    """Return the bytes of blocks in one page, over all layers; 0 without blocks."""
    return sum(array.page_bytes for _, blocks in with_blocks(layers) for array in page_arrays(blocks, page_size, dtype))


def make_block_arrays(
    layers: Sequence[LayerShape], page_size: int, dtype: mx.Dtype, num_pages: int, fill: float
) -> list[mx.array]:
    """Allocate the arrays of all layers for `num_pages` pages, in the order of `page_arrays`, layer
    after layer; every element is `fill`. Waits."""
    made = [
        mx.full((num_pages * array.count, *array.shape), fill, array.dtype)
        for _, blocks in with_blocks(layers)
        for array in page_arrays(blocks, page_size, dtype)
    ]
    mx.eval(made)
    return made


def block_states(layers: Sequence[LayerShape]) -> tuple[tuple[StateShape, ...], ...]:
    """Return the state of each compressor: values and gates of a request's last tokens, which a
    block that ends later may need, float32 [span - 1, 2 * series * size]."""
    return tuple(
        (StateShape((blocks.span - 1, 2 * blocks.series * size), mx.float32),)
        for _, blocks in with_blocks(layers)
        for size in blocks.sizes
    )


def keep_last(states: States, x: mx.array, lens: mx.array | None = None) -> tuple[mx.array, States]:
    """Implements `Advance` for a compressor: x float32 [R, L, C] follow the tokens in `states`.
    Returns all of them, [R, span - 1 + L, C], and the last span - 1."""
    every, kept = mx.concatenate([states[0], x], axis=1), states[0].shape[1]
    if lens is None:
        return every, [every[:, every.shape[1] - kept :]]
    places = lens[:, None] + mx.arange(kept)[None]
    return every, [mx.take_along_axis(every, places[..., None], axis=1)]


def fitting_page_size(layers: Sequence[LayerShape], asked: int | None, default: int) -> int:
    """Return the tokens of a page: `asked`, or the least multiple of every layer's block from
    `default` up. Raises ConfigError if `asked` is no such multiple."""
    multiple = lcm(*(blocks.ratio for _, blocks in with_blocks(layers)))
    if asked is None:
        return -(-default // multiple) * multiple
    if asked % multiple:
        raise ConfigError(
            f"page_size is {asked}",
            wanted=f"a multiple of {multiple} tokens, so that a page has whole blocks of this model",
            remedy="leave --page-size out",
        )
    return asked
