"""What a host batch gives one forward: the values of the declared fields, read in one go, and the batch made of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglcore.device.batch import ScheduleBatch
from sglcore.step.fields import Axis, FieldSpec, Once, When, leaves, specs

T = TypeVar("T")
Values = dict[str, Any]


class HostReader:
    """The loop over a batch type's declarations for decode steps, or for all others. `staged` are the fields whose values
    become tensors; the rest of what is read stays on the host."""

    def __init__(self, batch_type: type, is_decode: bool) -> None:
        every = {spec.name: spec for spec in leaves(batch_type) if spec.is_read}
        present = [spec for spec in every.values() if not (is_decode and spec.when is When.EXTEND)]
        reads = {spec.name: every[spec.mirror].read if spec.mirror else spec.read for spec in present}
        given = {spec.name for spec in present if spec.when is When.IF_GIVEN}
        self._once = tuple(name for name, read in reads.items() if isinstance(read, Once))
        reads |= {name: read.name for name, read in reads.items() if isinstance(read, Once)}
        attributes = {name: read for name, read in reads.items() if isinstance(read, str)}
        self.batch_type = batch_type
        self.staged = tuple(spec for spec in present if spec.is_staged)
        self._names = tuple(name for name in attributes if name not in given)
        self._attributes = _reader([attributes[name] for name in self._names])
        self._given_names = tuple(name for name in attributes if name in given)
        self._given = _reader([attributes[name] for name in self._given_names])
        mirrors = {spec.name: spec.mirror for spec in present if spec.mirror in reads and spec.name not in attributes}
        self._mirrors = tuple(mirrors.items())
        self._functions = tuple((name, read) for name, read in reads.items() if callable(read) and name not in mirrors)

    def read(self, batch: ScheduleBatch) -> Values:
        """The values by the names of their fields, without those that were not given. One-shot values are taken."""
        values = dict(zip(self._names, self._attributes(batch), strict=True))
        for name in self._once:
            values[name] = values[name].take()
        for name, function in self._functions:
            values[name] = function(batch, values)
        for name, mirror in self._mirrors:
            values[name] = values[mirror]
        for name, value in zip(self._given_names, self._given(batch), strict=True):
            if value is not None:
                values[name] = value
        return values


@cache
def host_reader(batch_type: type, is_decode: bool) -> HostReader:
    """The loop for this type and kind of step, compiled once."""
    return HostReader(batch_type, is_decode)


def make_batch(batch_type: type[T], fields: dict[str, Any]) -> T:
    """A batch of values by the (dotted) names of their fields. A nested record is there if any of its fields is."""
    for name, record, inner in _records(batch_type):
        if not fields.keys().isdisjoint(inner):
            fields[name] = record(*(fields.pop(path, None) for path in inner))
    return batch_type(**fields)


@cache
def _records(batch_type: type) -> tuple[tuple[str, Callable[..., Any], tuple[str, ...]], ...]:
    return tuple(
        (spec.name, spec.record, tuple(f"{spec.name}.{inner.name}" for inner in specs(spec.record)))
        for spec in specs(batch_type)
        if spec.record is not None
    )


@cache
def host_arrays(batch_type: type) -> tuple[FieldSpec, ...]:
    """The fields that a batch keeps on the host, one entry per request or token."""
    return tuple(s for s in specs(batch_type) if s.is_read and not s.is_staged and s.axis is not Axis.NONE)


def padded(spec: FieldSpec, values: NDArray, length: int) -> NDArray:
    """Staged values in their declared type, with padding up to `length` entries along the axis."""
    made = np.full((*spec.lead, length), spec.padding.value, dtype=spec.dtype)
    made[..., : values.shape[-1]] = values
    return made


def _reader(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads attributes, always giving a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda batch: tuple(getattr(batch, name) for name in names)
