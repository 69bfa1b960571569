"""`SwapShape`, the sizes of the device memory that KV rows in host memory need: the memory budget
counts it, and the HiSparse coordinator allocates it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglcore.runtime.memory.kv_rows import INDEX_KEYS, KeptRows, swapped_rows
from sglcore.runtime.memory.pools import pages_of
from sglcore.step.hisparse_config import HiSparseConfig, SwapSizes

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention

INT32 = 4
"""Bytes of an element of the tables."""
HALVES = 2
"""A step may run as two micro-batches, which count for themselves."""
COUNTED = 2
"""Numbers of a row that verifies a draft token, besides the entries that its indexers miss: entries
that each indexer chose for it, and entries that it completes."""


@dataclass(frozen=True, slots=True)
class SwapShape:
    """The layers with KV rows in host memory, and the device memory for their cached rows.
    `swap_shape` makes it.
    """

    names: Mapping[int, str]
    """Name of the rows in host memory, by layer id."""
    indexers: tuple[int, ...]
    """Ids of the layers that choose rows, each for itself and for the layers after it until the
    next indexer."""
    kept: KeptRows
    """Format of the rows."""
    top_k: int
    """Number of rows that a token reads."""
    buffer_rows: int
    """Number of rows of each layer and request that stay on the device."""
    page_size: int
    """Tokens per page."""
    pages: int
    """Maximum pages of a request."""
    rooms: int
    """Number of staging rooms, for all requests together."""
    held_pages: int = 0
    """Most pages of a prompt whose rows stay on the device from chunk to chunk; 0: none does."""
    most: int = 1
    """Most rows of a request in a decode step: more than one if it verifies draft tokens."""

    @property
    def rows_per_page(self) -> int:
        """Rows per page of one layer."""
        return self.kept.count(self.page_size)

    @property
    def entries(self) -> int:
        """Maximum rows of a request in one layer."""
        return self.pages * self.rows_per_page

    @property
    def room_rows(self) -> int:
        """Rows of a staging room: those of the longest request, after one reserved page."""
        return self.entries + self.rows_per_page

    @property
    def held_rows(self) -> int:
        """Rows of a layer's room for the held prompt, after one reserved page; 0: none."""
        return (self.held_pages + 1) * self.rows_per_page if self.held_pages else 0

    @property
    def table_sizes(self) -> tuple[int, int, int]:
        """int32 elements per slot and indexer: held entries, order of places, entry places."""
        return self.buffer_rows, self.buffer_rows, self.entries + 1

    @property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """For each indexer, the layers that read its choice, itself first."""
        last = {layer: self.indexers[bisect_right(self.indexers, layer) - 1] for layer in sorted(self.names)}
        return {indexer: tuple(each for each in last if last[each] == indexer) for indexer in self.indexers}

    @property
    def sizes(self) -> SwapSizes:
        """Sizes for the statistics of a step.

        A layer reads the choice of the last indexer before it, or its own.
        """
        layers = tuple(len(layers) for layers in self.readers.values())
        return SwapSizes(self.kept.row.nbytes, self.kept.ratio, self.top_k, self.page_size, layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a request of any length: buffers, tables, and a miss counter."""
        buffers = len(self.names) * self.buffer_rows * self.kept.row.nbytes
        counts = HALVES * self.most * (len(self.indexers) + (COUNTED if self.most > 1 else 0))
        return buffers + (len(self.indexers) * sum(self.table_sizes) + counts) * INT32

    @property
    def room_bytes(self) -> int:
        """Bytes of all staging rooms, and of the rooms of the held prompt."""
        rows = self.rooms * self.room_rows + len(self.names) * self.held_rows
        return rows * self.kept.row.nbytes


def swap_shape(
    hisparse: HiSparseConfig | None,
    layers: Sequence[Attention],
    longest: int,
    page_size: int,
    has_streams: bool,
    most: int = 1,
) -> SwapShape | None:
    """Return the shape for requests of at most `longest` tokens, with at most `most` rows of a
    request in a decode step.

    None without HiSparse, or if no layer has rows in host memory. With streams, one room is filled
    while another is read. Raises ConfigError for a buffer smaller than what a token reads.
    """
    swapped = {layer: name for layer in layers if (name := swapped_rows(layer.rows)) is not None}
    if hisparse is None or not swapped:
        return None
    (kept,) = {layer.rows[name] for layer, name in swapped.items()}
    (top_k,) = {layer.top_k for layer in swapped}
    return SwapShape(
        names={layer.layer_id: name for layer, name in swapped.items()},
        indexers=tuple(layer.layer_id for layer in swapped if INDEX_KEYS in layer.rows),
        kept=kept,
        top_k=top_k,
        buffer_rows=hisparse.buffer_rows(top_k, most),
        page_size=page_size,
        pages=pages_of(longest, page_size),
        rooms=1 + has_streams,
        held_pages=-(-hisparse.held_tokens(longest) // page_size),
        most=most,
    )
