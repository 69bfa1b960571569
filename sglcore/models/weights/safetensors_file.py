"""One safetensors file: reads tensors straight into their targets."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Mapping
from io import RawIOBase
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore.checkpoint.safetensors_header import Entry, damaged, open_file, read_entries

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""The element types of plain weights."""

READABLE: Mapping[str, torch.dtype] = MappingProxyType(
    {
        **DTYPES,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
    }
)
"""The element types that `read` returns: plain weights, and parts of quantised weights."""

PIECE_BYTES = 8 << 20
"""Bytes read at a time. A cast or a copy to a device takes this memory in addition to the
weights."""


class SafetensorsFile:
    """An open file and its `entries`, in the order of their bytes. Raises `CheckpointError` for a
    damaged file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._file = open_file(path)
        try:
            self.entries = read_entries(path, self._file)
        except BaseException:
            self.close()
            raise

    def copy(self, entry: Entry, target: Tensor, report: Callable[[int], None]) -> None:
        """Fill a tensor of the same shape, cast to its dtype; call `report` with the bytes of each
        piece.

        Reads straight into contiguous host memory of the same dtype. A tensor that is not
        contiguous is filled along its first dimension.
        """
        self._file.seek(entry.start)
        if target.is_contiguous():
            self._fill(entry, target, report)
            return
        for part in target:
            whole = torch.empty(part.shape, dtype=READABLE[entry.dtype])
            self._fill(entry, whole, report)
            part.copy_(whole)

    def _fill(self, entry: Entry, target: Tensor, report: Callable[[int], None]) -> None:
        """Fill a contiguous tensor from the file's current position, in pieces; casts to its
        dtype.
        """
        dtype = READABLE[entry.dtype]
        is_direct = target.is_cpu and target.dtype == dtype
        flat, count = target.view(target.numel()), PIECE_BYTES // dtype.itemsize
        for first in range(0, flat.numel(), count):
            part = flat[first : first + count]
            piece = part if is_direct else torch.empty(part.shape, dtype=dtype)
            self._read_into(piece, entry)
            if not is_direct:
                part.copy_(piece)
            report(piece.nbytes)

    def read(self, entry: Entry) -> Tensor:
        """Read a tensor to the host, in the file's dtype and shape. Raises KeyError for a type that
        is not `READABLE`."""
        dtype = READABLE[entry.dtype]
        whole = torch.empty(math.prod(entry.shape), dtype=dtype)
        self._file.seek(entry.start)
        self._read_into(whole, entry)
        return whole.view(entry.shape)

    def mapped(self, entry: Entry) -> Tensor:
        """Return the tensor as a view of the mapped file, in the file's dtype. Writes to it do not
        reach the file. Pages are read when they are touched, and kept until `release`."""
        if self._map is None:
            # A private mapping, because torch requires a writable buffer.
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype = READABLE[entry.dtype]
        count = entry.num_bytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, offset=entry.start, count=count).view(entry.shape)

    def release(self, start: int, end: int) -> None:
        """Release the process's memory for bytes [start, end) of `mapped` tensors.

        A later read loads them from the file again. Does nothing on systems other than Linux.
        """
        if self._map is None or sys.platform != "linux":
            return
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def close(self) -> None:
        """Close the file. The mapping is freed with its last tensor."""
        self._map = None
        self._file.close()

    def _read_into(self, piece: Tensor, entry: Entry) -> None:
        if not read_into(self._file, piece.view(torch.uint8)):
            raise damaged(self.path, f"it ends inside {entry.name!r}")


def read_into(file: RawIOBase, piece: Tensor) -> bool:
    """Fill a tensor uint8 [bytes] on the host from an open file's current position. Returns False
    if the file ends before the tensor is full."""
    rest = piece.numpy().data
    while len(rest) and (got := file.readinto(rest)):
        rest = rest[got:]
    return not len(rest)
