"""The declaration of a batch field: one line, from which staging, buffers, views, children, retention and poison follow.

It knows nothing of any particular batch, and no tensor library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Once:
    """Reads a one-shot value of the host batch, by the name of its attribute: the next forward does not see it."""

    name: str


Read = str | Once | Callable[[Any, Mapping[str, Any]], Any]
"""Where the host batch has a value: the name of its attribute, or a function of it and of the values that were read so
far, by the names of their fields: those of all attributes, and of the functions declared above."""

STAGED = ("int32", "float32")
"""Types of what the host stages: a step's values travel as one block of words of four bytes."""


class Axis(Enum):
    """What a field has one entry per."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    NONE = "none"


class When(Enum):
    """When the host has a value for a field: ALWAYS, on EXTEND steps, whose rows bring tokens that the host knows (all but
    decode), always of workers that keep WINDOWS and never of others, or IF_GIVEN."""

    ALWAYS = "always"
    EXTEND = "extend"
    WINDOWS = "windows"
    IF_GIVEN = "if given"


class Split(Enum):
    """How the children of a split batch get the field.

    SLICE cuts along the axis; CLIP recomputes lengths and offsets for the child's token interval; ADVANCE cuts along the
    requests and moves each start past the request's tokens before the child; COUNT clamps a number of real tokens; COPY
    shares the object; DROP leaves it to the parent; FRESH resets it to its default; NESTED splits the fields of the
    value; REFUSE makes the batch unsplittable while the field is present.
    """

    SLICE = "slice"
    CLIP = "clip"
    ADVANCE = "advance"
    COUNT = "count"
    COPY = "copy"
    DROP = "drop"
    FRESH = "fresh"
    NESTED = "nested"
    REFUSE = "refuse"


class Fill(Enum):
    """What rows beyond the real ones hold in a padded view."""

    VALUE = "value"
    KEEP = "keep"
    ONCE = "once"


@dataclass(frozen=True, slots=True)
class Padding:
    """The rule for padding rows: VALUE writes `value` whenever the batch is padded, ONCE only when the buffer is made,
    KEEP leaves whatever is there (for fields that no kernel indexes with)."""

    fill: Fill
    value: float = 0


def zero() -> Padding:
    """Padding rows are 0: slot 0, cell 0, position 0 all exist and belong to nobody."""
    return Padding(Fill.VALUE, 0)


def sentinel(value: float) -> Padding:
    """Padding rows hold `value`."""
    return Padding(Fill.VALUE, value)


def keep() -> Padding:
    """Padding rows keep what they had."""
    return Padding(Fill.KEEP)


def fill_once(value: float) -> Padding:
    """Padding rows hold `value`, written when the buffer is made."""
    return Padding(Fill.ONCE, value)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """The declaration of one batch field. `batch_field` makes it."""

    name: str
    """The field's name; of a nested record's field with dots."""
    axis: Axis
    """What it has one entry per."""
    split: Split
    """How the children of a split batch get it."""
    dtype: str | None
    """The name of its element type. None: it is no tensor with a static buffer."""
    padding: Padding
    """What padding rows hold."""
    when: When
    """When the host has a value for it."""
    read: Read | None
    """Where the host batch has its value. None: the host batch does not have it."""
    mirror: str
    """The field of which it is the host's side; empty: none."""
    owner: str
    """Who computes or brings it where the host does not; empty: none does."""
    record: type | None
    """The type of a nested record. None: it is not nested."""
    dim: int
    """The tensor dimension of the axis."""
    lead: tuple[int, ...]
    """The sizes of the dimensions before the axis."""

    @property
    def is_buffered(self) -> bool:
        """A static buffer is kept for it where there are such."""
        return self.dtype is not None

    @property
    def is_staged(self) -> bool:
        """The host's values are written to its buffer."""
        return self.is_read and self.is_buffered

    @property
    def is_read(self) -> bool:
        """The host batch has it."""
        return self.read is not None or bool(self.mirror)

    @property
    def is_for_decode(self) -> bool:
        """Decode steps have it too: from the host, or else from its owner."""
        return self.when is not When.EXTEND or bool(self.owner)


def batch_field(
    *,
    axis: Axis,
    read: Read | None = None,
    mirror: str = "",
    owner: str = "",
    record: type | None = None,
    when: When = When.ALWAYS,
    split: Split | None = None,
    dtype: str | None = None,
    padding: Padding | None = None,
    lead: tuple[int, ...] = (),
    default: Any = None,
) -> Any:
    """Declare a field, and who carries it: the host batch (`read`), the host's side of the field `mirror`, the fields of a
    nested `record`, or an `owner` who computes or brings it where the host does not.

    A field without an axis must say how it is split: nothing can be right by default. Raises TypeError for a declaration
    that leaves something open.
    """
    if read is None and not (mirror or owner or record):
        raise TypeError(
            "a batch field must declare read=..., where the host batch has it, or mirror=, record= or owner=...; "
            "without any of them nobody carries it"
        )
    if split is None:
        if axis is Axis.NONE:
            raise TypeError("a batch field without an axis must declare split=...; there is no safe default")
        split = Split.SLICE
    if dtype is not None and padding is None:
        raise TypeError("a batch field with a dtype must declare padding=zero(), sentinel(v), fill_once(v) or keep()")
    if read is not None and dtype is not None and dtype not in STAGED:
        raise TypeError(f"the host stages {' and '.join(STAGED)}, not {dtype}")
    spec = FieldSpec(
        "", axis, split, dtype, padding or keep(), when, read, mirror, owner, record, dim=len(lead), lead=lead
    )
    return dataclasses.field(default=default, metadata={"spec": spec})


@dataclass_transform()
def batch_record(host: type) -> Callable[[type[T]], type[T]]:
    """Make a class a record of declared fields that are read from batches of the type `host`.

    Raises TypeError if a field is not declared with `batch_field`, or if `host` has no attribute that one reads.
    """

    def make(kind: type[T]) -> type[T]:
        made = dataclass(slots=True)(kind)
        known = set(dir(host))
        names = {spec.name for spec in specs(made)}
        for spec in specs(made):
            name = spec.read.name if isinstance(spec.read, Once) else spec.read
            if isinstance(name, str) and name not in known:
                raise TypeError(f"{kind.__name__}.{spec.name} reads {name!r}, which {host.__name__} does not have")
            if spec.mirror and spec.mirror not in names:
                raise TypeError(f"{kind.__name__}.{spec.name} mirrors {spec.mirror!r}, which is not declared")
        return made

    return make


@cache
def specs(batch_type: type) -> tuple[FieldSpec, ...]:
    """The declarations of a batch type, in order. A field that bypassed `batch_field` is an error."""
    found = []
    for item in dataclasses.fields(batch_type):
        if "spec" not in item.metadata:
            raise TypeError(f"{batch_type.__name__}.{item.name} is not declared with batch_field(...)")
        found.append(replace(item.metadata["spec"], name=item.name))
    return tuple(found)


@cache
def leaves(batch_type: type) -> tuple[FieldSpec, ...]:
    """The same with the fields of nested records, under dotted names, in the places of those."""
    return tuple(_leaves(batch_type))


def _leaves(batch_type: type) -> Iterator[FieldSpec]:
    for spec in specs(batch_type):
        if spec.record is None:
            yield spec
            continue
        for inner in leaves(spec.record):
            yield replace(inner, name=f"{spec.name}.{inner.name}")


@cache
def spec_of(batch_type: type, name: str) -> FieldSpec:
    """One declaration by name; an unknown name is an error that lists the known ones."""
    for spec in specs(batch_type):
        if spec.name == name:
            return spec
    raise KeyError(
        f"{batch_type.__name__} declares no field {name!r}; it declares {[s.name for s in specs(batch_type)]}"
    )
