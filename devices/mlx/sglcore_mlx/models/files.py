"""The files of a checkpoint: what their headers say, checked before MLX maps them.

A safetensors file is 8 bytes little-endian header length, a JSON header, then the data that the header's offsets point
into.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from sglcore.device.errors import CheckpointError

WIDTHS: Mapping[str, int] = MappingProxyType(
    {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U16": 2, "BOOL": 1}
)
"""The element types that MLX maps, and their bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file as its header has it; `dtype` is the file's name for its elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: Path


def read_entries(path: Path) -> tuple[Entry, ...]:
    """What a file's header says, by position in the file; raises `CheckpointError` if it is damaged or has a type that
    can not be mapped."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = file.read(8)
            header_size = int.from_bytes(length, "little")
            if len(length) < 8 or header_size > size - 8:
                raise _damaged(path, f"it has {size} bytes, and its header alone would need {header_size + 8}")
            text = file.read(header_size)
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}", remedy="check its permissions") from None
    try:
        header = {name: item for name, item in json.loads(text).items() if name != "__metadata__"}
        entries = [_entry(path, name, item, size - 8 - header_size) for name, item in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(path, "its header is not that of a safetensors file") from None
    return tuple(entry for _, entry in sorted(entries, key=lambda pair: pair[0]))


def map_file(path: Path) -> dict[str, mx.array]:
    """The tensors of a file, none of them read yet; raises `CheckpointError` for a file that MLX refuses."""
    try:
        arrays = mx.load(str(path), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from None
    assert isinstance(arrays, dict)
    return arrays


def _entry(path: Path, name: str, item: dict[str, Any], data_size: int) -> tuple[int, Entry]:
    start, end = item["data_offsets"]
    entry = Entry(name, item["dtype"], tuple(item["shape"]), end - start, path)
    if entry.dtype not in WIDTHS:
        raise CheckpointError(
            f"{name!r} in {path.name} has the type {entry.dtype}",
            wanted=f"one of {', '.join(WIDTHS)}",
            remedy="use a version of this model in float32, bfloat16, float16 or a quantisation of mlx_lm.convert",
        )
    if WIDTHS[entry.dtype] * math.prod(entry.shape) != entry.num_bytes or start < 0:
        found = f"{name!r} of shape {list(entry.shape)} and type {entry.dtype} has {entry.num_bytes} bytes"
        raise _damaged(path, found)
    if end > data_size:
        raise _damaged(path, f"it has {data_size} bytes of data, and {name!r} ends at {end}")
    return start, entry


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {found}", remedy="download it again")
