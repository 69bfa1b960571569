"""One safetensors file, mapped: its header checked, its tensors read in pieces that leave no pages behind.

Format: 8 bytes little-endian header length, a JSON header, then the data that the header's offsets point into.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.device.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""The element types that can be loaded."""

CHUNK_BYTES = 8 << 20
"""How much of a file is resident at a time; a multiple of every page size in use."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: `dtype` as the file names it, and its bytes [start, end) counted from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open file and its `entries`, in the order of their bytes. Raises `CheckpointError` if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._size = path.stat().st_size
            with path.open("rb") as file:
                self.entries = self._read_header(file.read(8), file.read)
                # A private mapping is writable in name, which tensors over it ask for; nothing writes to it.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path} can not be read: {error.strerror}", remedy="download it again") from None

    def copy(self, entry: Entry, target: Tensor, report: Callable[[int], None]) -> None:
        """Copy and cast a tensor into a contiguous one of the same shape; calls `report` with the bytes of each piece."""
        dtype = DTYPES[entry.dtype]
        flat = target.view(target.numel())
        done = 0
        while done < flat.numel():
            count = min(CHUNK_BYTES // dtype.itemsize, flat.numel() - done)
            start = entry.start + done * dtype.itemsize
            flat[done : done + count].copy_(self._piece(start, count, dtype))
            self._release(start, count * dtype.itemsize)
            done += count
            report(count * dtype.itemsize)

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def _piece(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        if start % dtype.itemsize == 0:
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return raw.clone().view(dtype)

    def _release(self, start: int, size: int) -> None:
        """Let go of the pages that lie wholly before the end of a piece; they count as this process's memory."""
        first = start - start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, start + size - first)

    def _read_header(self, length: bytes, read: Callable[[int], bytes]) -> tuple[Entry, ...]:
        size = int.from_bytes(length, "little")
        if len(length) < 8 or size > self._size - 8:
            raise self._damaged(f"it has {self._size} bytes, and its header alone would need {size + 8}")
        try:
            header = json.loads(read(size))
            header.pop("__metadata__", None)
            entries = sorted((self._entry(name, item, 8 + size) for name, item in header.items()), key=_by_start)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._damaged("its header is not that of a safetensors file") from None
        if entries and entries[-1].end > self._size:
            raise self._damaged(f"it has {self._size} bytes, and {entries[-1].name!r} ends at {entries[-1].end}")
        return tuple(entries)

    def _entry(self, name: str, item: dict[str, Any], base: int) -> Entry:
        start, end = item["data_offsets"]
        entry = Entry(name, item["dtype"], tuple(item["shape"]), base + start, base + end)
        size = DTYPES[entry.dtype].itemsize * _count(entry.shape) if entry.dtype in DTYPES else end - start
        if size != end - start or start < 0:
            raise self._damaged(f"{name!r} of shape {list(entry.shape)} and type {entry.dtype} has {end - start} bytes")
        return entry

    def _damaged(self, found: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {found}", remedy="download it again")


def _by_start(entry: Entry) -> int:
    return entry.start


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
