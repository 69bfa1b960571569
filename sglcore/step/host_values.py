"""Read the values of the declared fields from a host batch, and make the batch of one forward from
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglcore.step.batch_field import Axis, FieldSpec, Once, Read, When, Wide, leaves, specs
from sglcore.worker.schedule_batch import ScheduleBatch

T = TypeVar("T")
Values = dict[str, Any]


class HostReader:
    """Reads the values of a batch type's declared fields from a host batch, by name (`read`). A
    reader is for decode steps, without the EXTEND fields, or for all other steps; one for wide
    decode steps, with several rows of each request, also leaves out the fields that are placed and
    the mirrors. The values of the fields in `staged` become tensors; all other values stay on the
    host.
    """

    def __init__(self, batch_type: type, is_decode: bool, is_wide: bool = False) -> None:
        every = {spec.name: spec for spec in leaves(batch_type) if spec.is_read}
        present = [spec for spec in every.values() if not (is_decode and spec.when is When.EXTEND)]
        repeated = [spec for spec in present if spec.wide is Wide.REPEAT and not spec.mirror]
        self._dropped: tuple[str, ...] = ()
        if is_wide and any(callable(spec.read) for spec in repeated):
            # Their functions may read values of fields that are placed.
            self._dropped = tuple(spec.name for spec in present if spec not in repeated)
        elif is_wide:
            present = repeated
        reads = {spec.name: every[spec.mirror].read if spec.mirror else spec.read for spec in present}
        given = {spec.name for spec in present if spec.when is When.IF_GIVEN}
        mirrors = {
            spec.name: spec.mirror for spec in present if spec.mirror in reads and not isinstance(reads[spec.name], str)
        }
        reads = {name: read for name, read in reads.items() if name not in mirrors}
        self.batch_type = batch_type
        self.staged = tuple(spec for spec in (repeated if is_wide else present) if spec.is_staged)
        self._read = _compiled(reads, given, mirrors)

    def read(self, batch: ScheduleBatch) -> Values:
        """Return the values by field name, without those that are absent, not padded. Takes
        one-shot values: the batch has their defaults afterwards."""
        values = self._read(batch)
        for name in self._dropped:
            values.pop(name, None)
        return values


def _compiled(
    reads: Mapping[str, Read | None], given: Set[str], mirrors: Mapping[str, str]
) -> Callable[[ScheduleBatch], Values]:
    """Return a function that makes the dict of values: first the attributes, then the functions,
    then the mirrors of values that are present. It is generated and compiled like the methods of a
    dataclass, because a loop over the names takes twice as long in each step.
    """
    once = {name: f"{read.name}.take()" for name, read in reads.items() if isinstance(read, Once)}
    paths = {name: read for name, read in reads.items() if isinstance(read, str)} | once
    functions = {name: read for name, read in reads.items() if callable(read)}
    always = ", ".join(f"{name!r}: batch.{path}" for name, path in paths.items() if name not in given)
    lines = ["def read(batch):", f" values = {{{always}}}"]
    for name, value in [
        *((name, f"batch.{path}") for name, path in paths.items() if name in given),
        *((name, f"functions[{name!r}](batch, values)") for name in functions),
        *((name, f"values.get({mirror!r})") for name, mirror in mirrors.items()),
    ]:
        lines += [f" value = {value}", f" if value is not None: values[{name!r}] = value"]
    scope: dict[str, Any] = {"functions": functions}
    exec("\n".join([*lines, " return values"]), scope)
    return scope["read"]


@cache
def host_reader(batch_type: type, is_decode: bool, is_wide: bool = False) -> HostReader:
    """Return the reader for this type and kind of step. Each is compiled once."""
    return HostReader(batch_type, is_decode, is_wide)


@cache
def optional_inputs(batch_type: type) -> Callable[[ScheduleBatch], bool]:
    """Return the function that says whether a host batch has any of the staged fields that only
    some batches have (`When.IF_GIVEN`). Captured graphs do not read them.
    """
    found = [spec.read for spec in leaves(batch_type) if spec.is_staged and spec.when is When.IF_GIVEN]
    paths = " or ".join(f"batch.{path} is not None" for path in found if isinstance(path, str))
    return eval(f"lambda batch: {paths or False}")


def idle_values(batch_type: type, batch: ScheduleBatch) -> Values:
    """Return the values of a step without rows, by field name: those of fields without an axis,
    which the host batch has, and an empty array for each field that stays on the host. Staged
    fields are not read, so the host batch need not have them.
    """
    read, arrays = _idle_reader(batch_type)
    return read(batch) | {name: np.zeros(0, dtype) for name, dtype in arrays.items()}


@cache
def _idle_reader(batch_type: type) -> tuple[Callable[[ScheduleBatch], Values], dict[str, str]]:
    """Return the function that reads the fields without an axis, and the dtypes of the host arrays
    of requests or tokens by name.
    """
    every = {spec.name: spec for spec in leaves(batch_type) if spec.is_read and not spec.is_staged}
    plain = {name: spec for name, spec in every.items() if spec.axis is Axis.NONE}
    given = {name for name, spec in plain.items() if spec.when is When.IF_GIVEN}
    by_name = {spec.name: spec for spec in leaves(batch_type)}
    arrays = {
        name: by_name[spec.mirror].dtype or "int32" if spec.mirror else "int32"
        for name, spec in every.items()
        if name not in plain and spec.when is not When.IF_GIVEN
    }
    return _compiled({name: spec.read for name, spec in plain.items()}, given, {}), arrays


def make_batch(batch_type: type[T], fields: dict[str, Any]) -> T:
    """Make a batch from values by (dotted) field name. A nested record is made if any of its fields
    is present, and replaces these entries in `fields`, which is changed. Absent fields get their
    defaults.
    """
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
    """Return the declarations of the fields that the host batch provides, that stay on the host,
    and that have one entry per request or token."""
    return tuple(s for s in specs(batch_type) if s.is_read and not s.is_staged and s.axis is not Axis.NONE)


def padded(spec: FieldSpec, values: NDArray, length: int) -> NDArray:
    """Return staged values in a new array of their declared type, padded with the field's padding
    value to `length` entries along the axis. A field without an axis is not padded.
    """
    if spec.axis is Axis.NONE:
        length = values.shape[-1]
    made = np.full((*spec.lead, length), spec.padding.value, dtype=spec.dtype)
    made[..., : values.shape[-1]] = values
    return made
