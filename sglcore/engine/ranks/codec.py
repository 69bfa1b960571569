"""Steps and their results as bytes. The encoding is generated from the declarations of the records,
so a new field needs no code here.

A frame's body is a head (msgpack of the record's values in the order of their declaration),
followed by the bytes of its arrays, which are read in place. A value of an unknown kind is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from enum import IntEnum
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from sglcore.sampling.params_batch import SamplingBatch
from sglcore.worker.model_worker import BatchResult, TokenLogprobs
from sglcore.worker.schedule_batch import CaptureHiddenMode, ForwardMode, OneShot, ScheduleBatch
from sglcore.worker.step_plan import StepPlan
from sglcore.worker.swap_counts import SwapCounts

RECORDS = (ScheduleBatch, SamplingBatch, BatchResult, TokenLogprobs, SwapCounts, StepPlan)
"""Records that can be encoded. The index of a record identifies it in the encoding."""
DTYPES = tuple(np.dtype(name) for name in ("int32", "bool", "float32", "int64", "float64", "uint8"))
"""The element types of arrays; the index of a type identifies it in the encoding."""
ALIGN = 8
"""Arrays begin at multiples of this number of bytes."""

_CODES: Mapping[np.dtype, int] = MappingProxyType({dtype: code for code, dtype in enumerate(DTYPES)})
_TAGS: Mapping[type, int] = MappingProxyType({record: tag for tag, record in enumerate(RECORDS)})
_ENUMS = frozenset({ForwardMode, CaptureHiddenMode})
_BY_NAME: Mapping[str, type[IntEnum]] = MappingProxyType({kind.__name__: kind for kind in _ENUMS})
_PLAIN = frozenset({int, str, bool, float, type(None)})


def encode(record: Any) -> bytes:
    """Return the bytes of a record, one of RECORDS. Takes one-shot values. Raises TypeError for a
    value of another kind."""
    arrays: list[np.ndarray] = []
    head = msgspec.msgpack.encode(_plain(record, arrays))
    parts = [len(head).to_bytes(8, "little"), head, bytes(-len(head) % ALIGN)]
    for array in arrays:
        parts += [array.tobytes(), bytes(-array.nbytes % ALIGN)]
    return b"".join(parts)


def decode(body: bytearray) -> Any:
    """Return the record that `encode` encoded; its arrays are views of `body`, which must not be
    changed afterwards."""
    size = int.from_bytes(body[:8], "little")
    values = msgspec.msgpack.decode(memoryview(body)[8 : 8 + size])
    return _Reader(body, 8 + size + -size % ALIGN).record(values)


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a value in msgpack's types and append its arrays to `arrays`: an array is [code,
    *shape], a record {tag: values}, a mapping of records [-1, keys, values], a tuple of numbers
    [-2, *numbers]."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is np.ndarray:
        arrays.append(value)
        return [_CODES[value.dtype], *value.shape]
    if kind is tuple:
        return [-2, *value]
    if kind in _TAGS:
        values = [each if type(each) in _PLAIN else _plain(each, arrays) for each in _reader(kind)(value)]
        return {_TAGS[kind]: values}
    if kind is OneShot:
        return _plain(value.take(), arrays) if value.is_set else None
    if kind in _ENUMS:
        return int(value)
    if isinstance(value, Mapping):
        return [-1, list(value), [_plain(each, arrays) for each in value.values()]]
    raise TypeError(f"found a value of the type {kind.__name__}; wanted a number, text, an array or a record")


class _Reader:
    """Makes records, of the kinds in RECORDS, from the decoded head of one frame; their arrays are
    views of `body`, read one after the other from byte `place` on."""

    def __init__(self, body: bytearray, place: int) -> None:
        self._body, self._place = body, place

    def record(self, values: dict[int, list[Any]]) -> Any:
        ((tag, found),) = values.items()
        kind = RECORDS[tag]
        count, makers = _makers(kind)
        if len(found) != count:
            raise ValueError(f"found {len(found)} values of {kind.__name__}; wanted {count}")
        made = [each if type(each) in _PLAIN else self.value(each) for each in found]
        for place, make in makers:
            made[place] = make(made[place])
        return kind(*made)

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            if value[0] == -2:
                return tuple(value[1:])
            return self._mapping(value) if value[0] == -1 else self._array(value)
        return self.record(value) if kind is dict else value

    def _array(self, value: list[int]) -> np.ndarray:
        found = np.ndarray(value[1:], DTYPES[value[0]], self._body, self._place)
        self._place += found.nbytes + -found.nbytes % ALIGN
        return found

    def _mapping(self, value: list[Any]) -> dict[int, Any]:
        return {key: self.value(each) for key, each in zip(value[1], value[2], strict=True)}


@cache
def _reader(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads all declared fields, in order, as a tuple. `kind` has two fields
    or more."""
    return attrgetter(*(item.name for item in fields(kind)))


@cache
def _makers(kind: type) -> tuple[int, tuple[tuple[int, Callable[[Any], Any]], ...]]:
    """Return the number of fields, and for fields that msgpack does not return in their own type:
    index and conversion."""
    named = fields(kind)
    found = [(place, _maker(item)) for place, item in enumerate(named)]
    return len(named), tuple((place, make) for place, make in found if make is not None)


def _maker(item: Field[Any]) -> Callable[[Any], Any] | None:
    """Return the conversion of one field. A one-shot value that was not set arrives unset."""
    declared = str(item.type)
    if declared in _BY_NAME:
        return _BY_NAME[declared]
    if declared.startswith("OneShot["):
        make: Any = item.default_factory
        inner = _BY_NAME.get(declared.removeprefix("OneShot[").removesuffix("]"))
        return lambda value: _one_shot(make(), value, inner)
    return None


def _one_shot(made: OneShot[Any], value: Any, convert: Callable[[Any], Any] | None) -> OneShot[Any]:
    """Set a one-shot to the value that arrived, in its own type; None: leave it unset."""
    if value is not None:
        made.put(value if convert is None else convert(value))
    return made
