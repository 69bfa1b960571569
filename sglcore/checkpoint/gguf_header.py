"""Read the header of a GGUF file: its metadata, and the place of each tensor.

Supports versions 2 and 3, little-endian. The header is read whole; the tensor data after it is read
elsewhere. Shapes here have the rows first; in the file the rows are last.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.core.errors import CheckpointError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
ALIGNMENT = 32
REMEDY = "download it again"

TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        30: ("BF16", 1, 2),
    }
)
"""The element types that can be loaded: number -> name, elements of a block, bytes of a block."""

OTHERS: Mapping[int, str] = MappingProxyType(
    {10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL"}
    | {21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
)
"""The names of the element types that cannot be loaded."""
_SCALARS = "BbHhIif?"
"""`struct` formats of the value types 0 to 7. In the format's own numbers, 8 is text, 9 an array,
and 10 to 12 are Q, q and d."""

_TEXT, _ARRAY = 8, 9
_WIDE: Mapping[int, str] = MappingProxyType({10: "Q", 11: "q", 12: "d"})


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: the name of its type, its shape with the rows first, and its bytes [start, end)
    counted from the file's start."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TextList:
    """The place of a list of texts: `count` texts, one after another from byte `start` of the
    file."""

    start: int
    count: int

    def read(self, data: mmap.mmap, places: Collection[int]) -> dict[int, str]:
        """Return the texts at some indices, without indices that the list does not have. Reads up
        to the last of them."""
        wanted, at, length, found = frozenset(places), self.start, struct.Struct("<Q").unpack_from, dict[int, str]()
        for place in range(min(max(wanted, default=-1) + 1, self.count)):
            first = at + 8
            at = first + length(data, at)[0]
            if place in wanted:
                found[place] = data[first:at].decode("utf-8", "replace")
        return found


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file. `metadata` has numbers, texts, booleans and lists of them; `left_out`
    has the lists of texts that were not read."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    left_out: Mapping[str, TextList]

    def some_texts(self, key: str, places: Collection[int]) -> Mapping[int, str]:
        """Return the texts at some indices of a list, also of a list that was left out; empty if
        the key has no list."""
        kept, left_out = self.metadata.get(key), self.left_out.get(key)
        if left_out is not None:
            with _mapped(self.path) as data:
                return left_out.read(data, places)
        return {place: kept[place] for place in places if place < len(kept)} if isinstance(kept, list) else {}

    def need(self, key: str, kind: type) -> Any:
        """Return the metadata's value of `key`. Raises `CheckpointError` if it is missing or of
        another type."""
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{self.path} says {key} = {value!r:.60}", wanted=f"a value of kind {kind.__name__}", remedy=REMEDY
            )
        return value

    def floats(self, name: str) -> tuple[float, ...]:
        """Return all values of an F32 tensor of the header, read from the file, in its order.
        Raises `CheckpointError` for another type."""
        tensor = self.tensors[name]
        if tensor.type != "F32":
            raise CheckpointError(f"{name!r} in {self.path} has the type {tensor.type}", wanted="F32")
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            return struct.unpack(f"<{(tensor.end - tensor.start) // 4}f", file.read(tensor.end - tensor.start))


def is_gguf(path: str | Path) -> bool:
    """Return whether a model's path is an existing file with the suffix .gguf; its content is not
    read.
    """
    return Path(path).suffix == SUFFIX and Path(path).is_file()


def read_header(path: Path, *, texts: bool = False) -> GgufHeader:
    """Read a file's header. Raises `CheckpointError` for a damaged file, and for one with an
    element type that can not be loaded.

    Lists of texts are vocabularies and take most of the time; they are left out unless `texts` is
    true.
    """
    with _mapped(path) as data:
        return _Reader(path, data, texts).header()


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map the file's bytes for the `with` block. Errors of reading them, also those of a damaged
    file in the block, become a `CheckpointError`.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", remedy="check its permissions") from None
    except RecursionError:
        raise CheckpointError(f"{path} is damaged: its lists are nested without end", remedy=REMEDY) from None
    except (struct.error, ValueError, IndexError, OverflowError, MemoryError):
        raise CheckpointError(f"{path} is damaged: it ends inside its header", remedy=REMEDY) from None


class _Reader:
    """Reads the mapped file from its start, one value after another; `header` makes the
    `GgufHeader`."""

    def __init__(self, path: Path, data: mmap.mmap, texts: bool) -> None:
        self._path = path
        self._data = data
        self._keeps_texts = texts
        self._at = 0

    def header(self) -> GgufHeader:
        """Read the whole header, from the file's start. Raises `CheckpointError` for a file that is
        no GGUF, is damaged, or is one of several parts."""
        if self._take(4) != MAGIC:
            raise self._damaged("it does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise CheckpointError(f"{self._path} is GGUF version {version}", wanted="2 or 3", remedy="convert it again")
        tensors, keys = self._number("Q"), self._number("Q")
        values = [(self._text(), self._value(self._number("I"))) for _ in range(keys)]
        metadata = {key: value for key, value in values if not isinstance(value, TextList)}
        left_out = {key: value for key, value in values if isinstance(value, TextList)}
        split = metadata.get("split.count", 1)
        if split != 1:
            raise CheckpointError(
                f"{self._path} is one of {split} parts",
                wanted="one file",
                remedy="join them with llama-gguf-split --merge",
            )
        found = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"it says general.alignment = {alignment!r:.60}")
        base = -(-self._at // alignment) * alignment
        placed = {tensor.name: self._placed(tensor, base) for tensor in found}
        if len(placed) != len(found):
            raise self._damaged("it has two tensors with the same name")
        return GgufHeader(self._path, MappingProxyType(metadata), MappingProxyType(placed), MappingProxyType(left_out))

    def _tensor(self) -> GgufTensor:
        """Read a tensor's entry; its start and end are relative to the data's start. Raises
        `CheckpointError` for an element type that can not be loaded.
        """
        name = self._text()
        shape = tuple(reversed([self._number("Q") for _ in range(self._number("I"))]))
        number, start = self._number("I"), self._number("Q")
        if number not in TYPES:
            raise CheckpointError(
                f"{name!r} in {self._path} has the type {OTHERS.get(number, number)}",
                wanted=f"one of {', '.join(known for known, _, _ in TYPES.values())}",
                remedy="use another quantisation of this model, such as Q4_K_M or Q8_0",
            )
        kind, block, size = TYPES[number]
        count = math.prod(shape)
        if shape and shape[-1] % block:
            raise self._damaged(f"{name!r} has rows of {shape[-1]} elements, and {kind} has blocks of {block}")
        return GgufTensor(name, kind, shape, start, start + count // block * size)

    def _placed(self, tensor: GgufTensor, base: int) -> GgufTensor:
        if base + tensor.end > len(self._data):
            raise self._damaged(f"it has {len(self._data)} bytes, and {tensor.name!r} ends at {base + tensor.end}")
        return GgufTensor(tensor.name, tensor.type, tensor.shape, base + tensor.start, base + tensor.end)

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            item, count = self._number("I"), self._number("Q")
            return self._array(item, count)
        return self._number(self._format(kind))

    def _array(self, kind: int, count: int) -> list[Any] | TextList:
        if kind == _TEXT:
            place, found = TextList(self._at, count), self._texts(count)
            return found if self._keeps_texts else place
        if kind == _ARRAY:
            return [self._value(kind) for _ in range(count)]
        size = struct.calcsize(f"<{self._format(kind)}") * count
        return list(struct.unpack(f"<{count}{self._format(kind)}", self._take(size)))

    def _texts(self, count: int) -> list[str]:
        """Read `count` texts one after another; or, unless the reader keeps texts, skip them and
        return an empty list. Raises `struct.error` if the data end before.
        """
        data, at, length, found = self._data, self._at, struct.Struct("<Q").unpack_from, list[str]()
        for _ in range(count):
            first = at + 8
            at = first + length(data, at)[0]
            if self._keeps_texts:
                found.append(data[first:at].decode("utf-8", "replace"))
        if at > len(data):
            raise struct.error
        self._at = at
        return found

    def _format(self, kind: int) -> str:
        found = _WIDE.get(kind) if kind >= len(_SCALARS) else _SCALARS[kind]
        if found is None:
            raise self._damaged(f"it has a value of the unknown type {kind}")
        return found

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        found = struct.unpack_from(f"<{code}", self._data, self._at)[0]
        self._at += struct.calcsize(f"<{code}")
        return found

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise struct.error
        self._at += size
        return self._data[self._at - size : self._at]

    def _damaged(self, found: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {found}", remedy=REMEDY)
