"""Reads the header of a safetensors file: its tensors' names, types, shapes and places, checked
against the file's size.

Format: 8 bytes little-endian header length, a JSON header, then the data at the header's offsets.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import RawIOBase
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.core.errors import CheckpointError

PLAIN_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})
"""The element types of plain weights -> bytes of an element."""

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **PLAIN_BYTES,
        "U8": 1,
        "I8": 1,
        "U16": 2,
        "I16": 2,
        "U32": 4,
        "I32": 4,
        "I64": 8,
        "F8_E4M3": 1,
        "F8_E8M0": 1,
        "BOOL": 1,
    }
)
"""These, and the element types of quantised weights. The sizes of tensors of other types are not
checked."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in `file`: `dtype` as the file names it, and its bytes [start, end) counted from the
    file's start."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.start


def read_entries(path: Path, file: RawIOBase | None = None) -> tuple[Entry, ...]:
    """Return the tensors of a file in the order of their bytes. `file`: the open file, at its
    start. Raises `CheckpointError` if it can not be read or is damaged."""
    if file is not None:
        return _entries(path, file)
    with open_file(path) as opened:
        return _entries(path, opened)


def open_file(path: Path) -> Any:
    """Open the file for reading bytes, unbuffered; the caller closes it. Raises `CheckpointError`
    if it can not be read.
    """
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", remedy="check its permissions") from None


def damaged(path: Path, found: str) -> CheckpointError:
    """Return, do not raise, the error for a damaged file; `found` says what is wrong with it."""
    return CheckpointError(f"{path} is damaged: {found}", remedy="download it again")


def _entries(path: Path, file: RawIOBase) -> tuple[Entry, ...]:
    whole, length = os.fstat(file.fileno()).st_size, file.read(8) or b""
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > whole - 8:
        raise damaged(path, f"it has {whole} bytes, and its header alone would need {size + 8}")
    try:
        header = json.loads(file.read(size) or b"")
        header.pop("__metadata__", None)
        entries = [_entry(path, name, item, 8 + size) for name, item in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(path, "its header is not a safetensors header") from None
    for entry in entries:
        if entry.end > whole:
            raise damaged(path, f"it has {whole} bytes, and {entry.name!r} ends at {entry.end}")
    entries.sort(key=lambda entry: (entry.start, entry.end))
    for before, entry in pairwise(entries):
        if entry.start < before.end:
            raise damaged(path, f"{before.name!r} and {entry.name!r} have bytes in common")
    return tuple(entries)


def _entry(path: Path, name: str, item: dict[str, Any], base: int) -> Entry:
    start, end = item["data_offsets"]
    entry = Entry(path, name, item["dtype"], tuple(item["shape"]), base + start, base + end)
    is_whole = all(type(each) is int for each in (start, end, *entry.shape)) and min(entry.shape, default=0) >= 0
    if not is_whole or not isinstance(entry.dtype, str):
        raise TypeError(f"the place of {name!r}")
    size = ELEMENT_BYTES[entry.dtype] * math.prod(entry.shape) if entry.dtype in ELEMENT_BYTES else entry.num_bytes
    if size != entry.num_bytes or start < 0:
        raise damaged(path, f"{name!r} of shape {list(entry.shape)} and type {entry.dtype} has {entry.num_bytes} bytes")
    return entry
