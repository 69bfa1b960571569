"""What layers keep as rows of their own where others keep keys and values by head: latent rows, index keys, compressed blocks
and what is not compressed yet.

Page 0 and slot 0 belong to nobody, and so does row 0 of everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import lcm
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sglcore.device.errors import ConfigError
from sglcore.runtime.kernels.row_codec import E4M3FN, RowCodec
from sglcore.step.sizing import size_text

if TYPE_CHECKING:
    from sglcore.runtime.memory.pools import WindowTable

ROWS = "rows"
"""The layout of pools whose layers say by name which rows they keep."""
INDEX_KEYS = "index_keys"
"""The name of rows by which an indexer chooses others."""
FP8 = "fp8"
"""The `kv_cache_dtype` of rows in eight bits."""


def row_codec(kv_cache_dtype: str, size: int, exact: int = 0, float8: str = E4M3FN) -> RowCodec | None:
    """The form of rows of `size` elements, the last `exact` of which hold places, by what a configuration asks for and by the
    kernel table's floats; None: they are numbers of the model's type."""
    return RowCodec(size, exact, float8=float8) if kv_cache_dtype == FP8 else None


def check_row_dtype(kv_cache_dtype: str, device: torch.device | str, float8: str = E4M3FN) -> None:
    """Raises ConfigError for a `kv_cache_dtype` that rows have none of, or that the device can not compute."""
    if kv_cache_dtype not in ("auto", FP8):
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, and this model keeps no keys and values by head, but rows",
            wanted=f"auto or {FP8}",
            remedy="leave --kv-cache-dtype out",
        )
    codec = row_codec(kv_cache_dtype, 64, float8=float8)
    try:
        if codec is not None:
            codec.decode(codec.encode(torch.ones(1, 64, device=device)))
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, and this device knows no 8-bit floats ({float8}): {error}",
            wanted="auto",
            remedy="leave --kv-cache-dtype out",
        ) from None


class Place(Enum):
    """Whose rows they are: those of a page of all tokens, on the device or in host memory, of a page of windows (of one of all
    tokens where windows have none of their own), or of a slot."""

    PAGES = "pages"
    HOST_PAGES = "pages in host memory"
    WINDOW_PAGES = "window pages"
    SLOTS = "slots"


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of `size` elements. One for each `ratio` tokens of a page: that of position p is
    page * (page_size / ratio) + p % page_size // ratio. Or `ring` of each page or slot, for the last tokens, `span` of which make one
    block of `ratio`: p is at page * ring + p % ring. With a `codec` they are uint8 in its form."""

    size: int
    dtype: torch.dtype
    place: Place = Place.PAGES
    ratio: int = 1
    ring: int = 0
    span: int = 0
    codec: RowCodec | None = None

    @property
    def page_multiple(self) -> int:
        """What divides the tokens of a page."""
        return self.ratio if self.place is Place.SLOTS else lcm(self.ratio, self.ring or 1)

    def count(self, page_size: int) -> int:
        """Rows of one page or slot."""
        return self.ring or page_size // self.ratio

    def num_bytes(self, page_size: int) -> int:
        """Bytes of one page or slot."""
        return self.count(page_size) * self.row.nbytes

    @property
    def row(self) -> Tensor:
        """One as calls of kernels have it, [1, elements or bytes], without content."""
        if self.codec is not None:
            return torch.empty(1, self.codec.num_bytes, dtype=torch.uint8, device="meta")
        return torch.empty(1, self.size, dtype=self.dtype, device="meta")


LayerRows = Mapping[str, KeptRows]
"""What a layer keeps, by name."""


def swapped_rows(layer: LayerRows) -> str | None:
    """The name of what lies in host memory, of which a token reads what an indexer chooses."""
    return next((name for name, kept in layer.items() if kept.place is Place.HOST_PAGES), None)


def page_multiple(layers: Iterable[LayerRows]) -> int:
    """The least number of tokens of a page in which all of their rows come out even."""
    return lcm(*(each.page_multiple for layer in layers for each in layer.values()))


def row_bytes(layers: Iterable[LayerRows], place: Place, page_size: int) -> int:
    """Bytes of one page or slot over all layers."""
    return sum(each.num_bytes(page_size) for layer in layers for each in layer.values() if each.place is place)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """How many pages and slots a pool is for, without those that are nobody's. `window_pages` 0: what windows keep lies in the
    pages of all tokens."""

    pages: int
    window_pages: int = 0
    slots: int = 0

    def owners(self, place: Place) -> int:
        """Pages or slots of a kind, with that which is nobody's."""
        if place is Place.SLOTS:
            return 1 + self.slots
        return 1 + (self.window_pages or self.pages if place is Place.WINDOW_PAGES else self.pages)


class RowPool:
    """For each layer and name one tensor [rows, size]. `generation` changes whenever an address does."""

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
        """`poison`: what was never written is NaN, so that who reads it shows. `pins`: rows in host memory lie in pinned memory,
        which the device's kernels reach. Raises ConfigError where the host has no room for them."""
        self.generation = 0
        self.page_size = page_size
        self.num_cells = (counts.pages + 1) * page_size
        self.num_layers = len(layers)
        self.layers = tuple(layers)
        self._counts, self._device, self._poison, self._pins = counts, device, poison, pins
        self._rows = self._allocate()

    def rows(self, layer_id: int, name: str) -> Tensor:
        """A layer's rows [rows, size] of a name."""
        return self._rows[layer_id][name]

    def codec(self, layer_id: int, name: str) -> RowCodec | None:
        """The form of those rows; None: they are numbers."""
        return self.layers[layer_id][name].codec

    def on_device(self, layer_id: int) -> dict[str, Tensor]:
        """A layer's rows by name, but for those in host memory."""
        layer, rows = self.layers[layer_id], self._rows[layer_id]
        return {name: each for name, each in rows.items() if layer[name].place is not Place.HOST_PAGES}

    def kv(self, layer_id: int) -> tuple[Tensor, ...]:
        """All that a layer keeps."""
        return tuple(self._rows[layer_id].values())

    @property
    def poisons_slots(self) -> bool:
        """What slots keep is to be no number when they are given to a request."""
        return self._poison and any(kept.place is Place.SLOTS for layer in self.layers for kept in layer.values())

    def enter(self, slots: Tensor) -> None:
        """What slots int [N] had is nobody's any more: it is no number. Does not wait."""
        for layer, rows in zip(self.layers, self._rows, strict=True):
            for name, kept in layer.items():
                if kept.place is Place.SLOTS:
                    rows[name].view(-1, kept.ring, rows[name].shape[1])[slots] = torch.nan

    def replace_storage(self) -> None:
        """Move to new memory: every address changes, so plans and graphs made before are refused."""
        self._rows = self._allocate()
        self.generation += 1

    def _allocate(self) -> list[dict[str, Tensor]]:
        return [{name: self._make(each) for name, each in layer.items()} for layer in self.layers]

    def _make(self, kept: KeptRows) -> Tensor:
        rows, row = self._counts.owners(kept.place) * kept.count(self.page_size), kept.row
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
    """A pool that keeps some rows only as far as windows see: `window_table` names the pages of those; None where they lie in
    the pages of all tokens."""

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
