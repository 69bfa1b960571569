"""The KV rows of DeepSeek-V4's attention.

Window rows, block rows, and states of incomplete blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.runtime.kernels.row_codec import E4M3FN
from sglcore.runtime.memory.kv_rows import INDEX_KEYS, BaseSWAKVPool, KeptRows, LayerRows, Place, row_codec

WINDOW, BLOCKS, STATE = "window", "blocks", "state"
INDEX_STATE = "index_state"
"""Names of rows: WINDOW has one per token, BLOCKS one per block, STATE and INDEX_STATE the
compressor states of blocks and of index keys.
"""


def ring_size(ratio: int, span: int, drafts: int = 1) -> int:
    """Return the number of tokens in a ring of compressor states: `ratio` times a power of two.

    A block is made from `span` tokens. A step has `drafts` tokens, and only the first is sure to be
    accepted. The step must leave the states that a block of the next step reads.
    """
    size = ratio
    while size < span + max(0, drafts - 2):
        size *= 2
    return size


def kept_rows(
    net: CompressedConfig,
    compression: Compression | None,
    dtype: torch.dtype,
    drafts: int = 1,
    kv_cache_dtype: str = "auto",
    hisparse: bool = False,
    float8: str = E4M3FN,
) -> LayerRows:
    """Return the rows of one layer that computes in `dtype`, by name: WINDOW; with `compression`
    also BLOCKS and STATE, and if an indexer chooses blocks INDEX_KEYS and INDEX_STATE.

    States are float32, values and gates side by side. If the last block's tokens also enter the
    next block, states are kept in window pages, so that a request can continue from a cached page.
    Otherwise they are kept by slot, because a page ends with a complete block. `hisparse`: blocks
    that an indexer chooses are kept in host memory. `drafts` is that of `ring_size`; `float8` is
    that of the kernel table.
    """
    codec = row_codec(kv_cache_dtype, net.head_dim, net.rope_dim, float8)
    kept = {WINDOW: KeptRows(net.head_dim, dtype, Place.WINDOW_PAGES, codec=codec)}
    if compression is None:
        return kept
    ratio, span, series = compression.ratio, compression.span, compression.series
    place, ring = (Place.WINDOW_PAGES if series > 1 else Place.SLOTS), ring_size(ratio, span, drafts)

    def state(size: int) -> KeptRows:
        return KeptRows(2 * series * size, torch.float32, place, ratio, ring, span)

    of_blocks = Place.HOST_PAGES if hisparse and compression.is_sparse else Place.PAGES
    kept |= {BLOCKS: KeptRows(net.head_dim, dtype, of_blocks, ratio, codec=codec), STATE: state(net.head_dim)}
    if compression.is_sparse:
        codec = row_codec(kv_cache_dtype, net.index_dim, float8=float8)
        kept |= {
            INDEX_KEYS: KeptRows(net.index_dim, dtype, ratio=ratio, codec=codec),
            INDEX_STATE: state(net.index_dim),
        }
    return kept


class DeepSeekV4TokenToKVPool(BaseSWAKVPool):
    """A pool of the rows that `kept_rows` returns: window rows, block rows, index keys, and
    compressor states.

    The block rows of a layer and its window rows are parts of one tensor, so that a kernel can read
    both by one list. Block rows in host memory are apart.
    """

    def joined(self, layer_id: int) -> tuple[Tensor, int] | None:
        """Return a layer's block rows followed by its window rows, as one tensor [rows, size], and
        the number of block rows; None if the layer has no block rows, or has them in host memory.
        """
        kept = self.layers[layer_id].get(BLOCKS)
        if kept is None or kept.place is not Place.PAGES:
            return None
        blocks, window = self.rows(layer_id, BLOCKS), self.rows(layer_id, WINDOW)
        rows = len(blocks) + len(window)
        return blocks.as_strided((rows, blocks.shape[1]), blocks.stride()), len(blocks)

    def _allocate(self) -> list[dict[str, Tensor]]:
        return [self._allocate_layer(layer) for layer in self.layers]

    def _allocate_layer(self, layer: LayerRows) -> dict[str, Tensor]:
        parts, kept = dict[str, Tensor](), layer.get(BLOCKS)
        if kept is not None and kept.place is Place.PAGES:
            sizes = self._count(kept), self._count(layer[WINDOW])
            parts[BLOCKS], parts[WINDOW] = self._make(kept, sum(sizes)).split(sizes)
        return {
            name: parts[name] if name in parts else self._make(each, self._count(each)) for name, each in layer.items()
        }

    @property
    def states(self) -> tuple[KeptRows, ...]:
        """The format of the compressor states STATE, one for each distinct (ratio, span) of the
        layers.
        """
        found = {(kept.ratio, kept.span): kept for layer in self.layers if (kept := layer.get(STATE)) is not None}
        return tuple(found.values())

    @property
    def listed_ratios(self) -> tuple[int, ...]:
        """The distinct ratios of the layers with blocks that attend to all of them, without an
        indexer; in order of the layers.
        """
        return tuple(
            dict.fromkeys(each[BLOCKS].ratio for each in self.layers if BLOCKS in each and INDEX_KEYS not in each)
        )
