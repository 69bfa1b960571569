"""KV rows: entries of layers that do not keep keys and values per head.

Examples are latent rows, index keys, compressed blocks, and tokens of incomplete blocks. Page 0,
slot 0 and row 0 of every tensor are reserved for padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import lcm
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.kernels.row_codec import E4M3FN, RowCodec
from sglcore.step.sizing import size_text

if TYPE_CHECKING:
    from sglcore.runtime.memory.pools import WindowTable

ROWS = "rows"
"""The `layout` of pools with KV rows: each layer declares its rows by name."""
INDEX_KEYS = "index_keys"
"""The name of the rows with which an indexer chooses other rows."""
FP8 = "fp8"
"""The `kv_cache_dtype` of 8-bit rows."""


def row_codec(kv_cache_dtype: str, size: int, exact: int = 0, float8: str = E4M3FN) -> RowCodec | None:
    """Return the 8-bit codec of rows of `size` elements, or None if rows keep the model's dtype.

    The last `exact` elements hold rotary positions and are not quantised. `float8` is the kernel
    table's.
    """
    return RowCodec(size, exact, float8=float8) if kv_cache_dtype == FP8 else None


def check_row_dtype(kv_cache_dtype: str, device: torch.device | str, float8: str = E4M3FN) -> None:
    """Raise ConfigError for a `kv_cache_dtype` that rows or the device do not support."""
    if kv_cache_dtype not in ("auto", FP8):
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, and this model keeps rows, not keys and values by head",
            wanted=f"auto or {FP8}",
            remedy="leave --kv-cache-dtype out",
        )
    codec = row_codec(kv_cache_dtype, 64, float8=float8)
    try:
        if codec is not None:
            codec.decode(codec.encode(torch.ones(1, 64, device=device)))
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, and this device does not support 8-bit floats ({float8}): {error}",
            wanted="auto",
            remedy="leave --kv-cache-dtype out",
        ) from None


class Place(Enum):
    """What rows belong to: a page of all tokens, a window page, or a slot.

    Pages of all tokens are on the device or in host memory. Without separate window pages, window
    rows lie in the pages of all tokens.
    """

    PAGES = "pages"
    HOST_PAGES = "pages in host memory"
    WINDOW_PAGES = "window pages"
    SLOTS = "slots"


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The format of rows that a layer stores: of `size` elements, one for each `ratio` tokens of a
    page, or a ring.

    The row of position p is page * (page_size / ratio) + p % page_size // ratio. A ring has `ring`
    rows per page or slot for the last tokens; `span` of them make one block of `ratio`; p is at
    page * ring + p % ring. With a `codec`, rows are uint8 in its format.
    """

    size: int
    dtype: torch.dtype
    place: Place = Place.PAGES
    ratio: int = 1
    ring: int = 0
    span: int = 0
    codec: RowCodec | None = None

    @property
    def page_multiple(self) -> int:
        """The tokens of a page must be a multiple of this number."""
        return self.ratio if self.place is Place.SLOTS else lcm(self.ratio, self.ring or 1)

    def count(self, page_size: int) -> int:
        """Return the number of rows in one page of `page_size` tokens, or in one slot."""
        return self.ring or page_size // self.ratio

    def num_bytes(self, page_size: int) -> int:
        """Return the bytes of the rows of one layer in one page of `page_size` tokens, or in one
        slot.
        """
        return self.count(page_size) * self.row.nbytes

    @property
    def row(self) -> Tensor:
        """One row [1, elements or bytes] as kernels see it, without content (device `meta`)."""
        if self.codec is not None:
            return torch.empty(1, self.codec.num_bytes, dtype=torch.uint8, device="meta")
        return torch.empty(1, self.size, dtype=self.dtype, device="meta")


LayerRows = Mapping[str, KeptRows]
"""The rows of a layer, by name."""


def swapped_rows(layer: LayerRows) -> str | None:
    """Return the name of the layer's rows in host memory, or None.

    A token reads those rows that an indexer chooses.
    """
    return next((name for name, kept in layer.items() if kept.place is Place.HOST_PAGES), None)


def page_multiple(layers: Iterable[LayerRows]) -> int:
    """Return the least number of tokens per page with which every page has whole rows and rings of
    all these layers; fitting page sizes are its multiples.
    """
    return lcm(*(each.page_multiple for layer in layers for each in layer.values()))


def row_bytes(layers: Iterable[LayerRows], place: Place, page_size: int) -> int:
    """Return the bytes of the rows of this place in one page or slot, over all layers."""
    return sum(each.num_bytes(page_size) for layer in layers for each in layer.values() if each.place is place)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The pages and slots of a pool, without the reserved ones.

    `window_pages` 0: window rows lie in the pages of all tokens.
    """

    pages: int
    window_pages: int = 0
    slots: int = 0

    def owners(self, place: Place) -> int:
        """Return the number of pages or slots of a kind, including the reserved one; pages in host
        memory are the same number as those on the device.
        """
        if place is Place.SLOTS:
            return 1 + self.slots
        return 1 + (self.window_pages or self.pages if place is Place.WINDOW_PAGES else self.pages)


class RowPool:
    """A `KVPool` of KV rows: one tensor [rows, size] for each layer and name.

    `generation` changes when an address changes.
    """

    layout: ClassVar[str] = ROWS

    def __init__(
        self,
        layers: Sequence[LayerRows],
        page_size: int,
        counts: RowCounts,
        device: str,
        poison: bool = False,
        pins: bool = False,
    ) -> None:
        """`poison`: rows that were never written hold NaN, so that reading them shows.

        `pins`: rows in host memory are pinned, and the device's kernels reach them. Raises
        ConfigError if the host does not have enough memory.
        """
        self.generation = 0
        self.page_size = page_size
        self.num_cells = (counts.pages + 1) * page_size
        self.num_layers = len(layers)
        self.layers = tuple(layers)
        self._counts, self._device, self._poison, self._pins = counts, device, poison, pins
        self._rows = self._allocate()

    def rows(self, layer_id: int, name: str) -> Tensor:
        """Return the tensor of a layer's rows of this name, not a copy: [rows, size], or uint8
        [rows, bytes] with a codec. It is on the host for rows of `Place.HOST_PAGES` that are
        pinned.
        """
        return self._rows[layer_id][name]

    def codec(self, layer_id: int, name: str) -> RowCodec | None:
        """Return the codec of a layer's rows of this name; None: they hold numbers, not codes."""
        return self.layers[layer_id][name].codec

    def on_device(self, layer_id: int) -> dict[str, Tensor]:
        """Return a layer's rows by name, without those in host memory."""
        layer, rows = self.layers[layer_id], self._rows[layer_id]
        return {name: each for name, each in rows.items() if layer[name].place is not Place.HOST_PAGES}

    def kv(self, layer_id: int) -> tuple[Tensor, ...]:
        """Return the tensors of a layer's rows, as `rows` does, in the declarations' order."""
        return tuple(self._rows[layer_id].values())

    @property
    def poisons_slots(self) -> bool:
        """True if slot rows must be set to NaN when a slot is given to a request."""
        return self._poison and any(kept.place is Place.SLOTS for layer in self.layers for kept in layer.values())

    def enter(self, slots: Tensor) -> None:
        """Set the rows of slots int [N] to NaN: they belonged to other requests. Called only if
        `poisons_slots`. Does not wait.
        """
        for layer, rows in zip(self.layers, self._rows, strict=True):
            for name, kept in layer.items():
                if kept.place is Place.SLOTS:
                    rows[name].view(-1, kept.ring, rows[name].shape[1])[slots] = torch.nan

    def replace_storage(self) -> None:
        """Allocate new memory; the contents are lost. Addresses change, so older plans and graphs
        are refused.
        """
        self._rows = self._allocate()
        self.generation += 1

    def _allocate(self) -> list[dict[str, Tensor]]:
        return [{name: self._make(each, self._count(each)) for name, each in layer.items()} for layer in self.layers]

    def _count(self, kept: KeptRows) -> int:
        """Return the rows of all pages or slots, reserved ones included."""
        return self._counts.owners(kept.place) * kept.count(self.page_size)

    def _make(self, kept: KeptRows, rows: int) -> Tensor:
        row = kept.row
        unwritten = torch.tensor([torch.nan], dtype=row.dtype) if kept.codec is None else kept.codec.unwritten
        value, shape = unwritten if self._poison else torch.zeros_like(unwritten), (rows, row.shape[1])
        if kept.place is Place.HOST_PAGES and self._pins:
            return _pinned(shape, row.dtype).copy_(value)
        return torch.empty(shape, dtype=row.dtype, device=self._device).copy_(value.to(self._device))


def _pinned(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        wanted = size_text(shape[0] * shape[1] * dtype.itemsize)
        raise ConfigError(
            f"the host has no {wanted} of memory to pin for the rows of a layer: {error}",
            remedy="lower kv_cache_memory, or host_to_device_ratio of --hisparse",
        ) from None


class BaseSWAKVPool(RowPool):
    """A `RowPool` with some rows that are kept for a sliding window only.

    `window_table` names their pages; None: they are kept in the pages of all tokens.
    """

    def __init__(
        self,
        layers: Sequence[LayerRows],
        page_size: int,
        counts: RowCounts,
        device: str,
        poison: bool = False,
        pins: bool = False,
        window_table: WindowTable | None = None,
    ) -> None:
        super().__init__(layers, page_size, counts, device, poison, pins)
        self.window_table = window_table
