"""One declaration per batch field. From it follow the staging copy to the device, static buffers,
padded views, cutting into micro-batches, which tensors are kept alive while the device reads them,
and which are overwritten for debugging (`--poison`).

This module knows no particular batch and no tensor library.
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
    """A `read=` source of a field: the attribute `name` of the host batch, which is a `OneShot`.
    Each read takes its value, so the next forward gets the default.
    """

    name: str


Read = str | Once | Callable[[Any, Mapping[str, Any]], Any]
"""Source of a value in the host batch: an attribute name, or a function of the batch and of the
values read before it, by field name. Attributes are read first, then the functions in the order of
their declarations.
"""

STAGED = ("int32", "float32")
"""Element types of staged values: the values of a step are copied as one block of 4-byte words."""


class Axis(Enum):
    """What a field has one entry for: each request (REQUESTS) or each token (TOKENS). NONE:
    neither.
    """

    REQUESTS = "requests"
    TOKENS = "tokens"
    NONE = "none"


class When(Enum):
    """When the host has a value for a field.

    ALWAYS: on each step. EXTEND: on all steps except decode, because the host knows the tokens of
    their rows. WINDOWS: on each step of a worker that keeps window pages, never on others.
    IF_GIVEN: when the host batch has one.
    """

    ALWAYS = "always"
    EXTEND = "extend"
    WINDOWS = "windows"
    IF_GIVEN = "if given"


class Split(Enum):
    """How the parts of a split batch get the field.

    SLICE cuts along the axis; CLIP cuts along the requests and changes the numbers of a request
    that is cut, as `Moved` says; SIZE recomputes a size or the starts of requests from the part's
    token interval; COUNT clamps a number of real tokens; COPY shares the object; DROP leaves it to
    the whole batch;
    FRESH resets it to its default; NESTED splits the fields of the value; REFUSE forbids the split
    while the field is present.
    """

    SLICE = "slice"
    CLIP = "clip"
    SIZE = "size"
    COUNT = "count"
    COPY = "copy"
    DROP = "drop"
    FRESH = "fresh"
    NESTED = "nested"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Moved:
    """How a per-request number changes if only some of the request's tokens are in a part of the
    batch: the part adds `by_skipped` times the number of the first request's tokens before it, and
    subtracts `by_rest` times the number of the last request's tokens after it.
    """

    by_skipped: int = 0
    by_rest: int = 0


class Wide(Enum):
    """How a decode step with several rows of each request (a verification of draft tokens) gets the
    field, for which the host has one entry for each request.

    REPEAT: each row has the entry of its request. PLACED: the maker of the rows writes it, such as
    their tokens and lengths.
    """

    REPEAT = "repeat"
    PLACED = "placed"


class Fill(Enum):
    """What padding rows of a padded view hold; `Padding` defines the members."""

    VALUE = "value"
    KEEP = "keep"
    ONCE = "once"


@dataclass(frozen=True, slots=True)
class Padding:
    """The rule for padding rows: VALUE writes `value` whenever the batch is padded, ONCE only when
    the buffer is allocated. KEEP leaves the old content, for fields that no kernel uses as an
    index.
    """

    fill: Fill
    value: float = 0


def zero() -> Padding:
    """Return the rule that padding rows are 0. Request slot 0, KV slot 0 and position 0 exist for
    padding.
    """
    return Padding(Fill.VALUE, 0)


def sentinel(value: float) -> Padding:
    """Return the rule that padding rows hold `value`."""
    return Padding(Fill.VALUE, value)


def keep() -> Padding:
    """Return the rule that padding rows keep their content."""
    return Padding(Fill.KEEP)


def fill_once(value: float) -> Padding:
    """Return the rule that padding rows hold `value`, written when the buffer is allocated."""
    return Padding(Fill.ONCE, value)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """The declaration of one batch field, which `batch_field` makes: its name and element type, its
    axis, where its value comes from and when, what padding rows hold, and how a split batch gets
    it."""

    name: str
    """Name of the field. A field of a nested record has a dotted name."""
    axis: Axis
    """The dimension along which the field has entries."""
    split: Split
    """How the parts of a split batch get the field."""
    dtype: str | None
    """Name of the element type. None: the field is no tensor with a static buffer."""
    padding: Padding
    """What padding rows hold."""
    when: When
    """When the host has a value for the field."""
    read: Read | None
    """Source of the value in the host batch. None: the host batch does not have it."""
    mirror: str
    """Name of the field that this one mirrors on the host; empty: none."""
    owner: str
    """Who computes or provides the field on steps for which the host has no value; empty: no one.
    The code reads only whether it is empty; the name is for readers."""
    record: type | None
    """Type of a nested record. None: the field is not nested."""
    dim: int
    """Tensor dimension of the axis."""
    lead: tuple[int, ...]
    """Sizes of the dimensions before the axis."""
    wide: Wide = Wide.REPEAT
    """How a decode with several rows per request gets the field."""
    moved: Moved | None = None
    """How the field's numbers change in a part of the batch (CLIP); None for a mirror, which
    changes as the field that it mirrors."""
    in_window: str | Callable[[Any], Any] = ""
    """The value of the field in the batch that sliding-window layers see: the field of this name,
    or a function of the batch. Empty: the same value."""

    @property
    def is_buffered(self) -> bool:
        """Whether the field has a static buffer where the worker keeps such buffers."""
        return self.dtype is not None

    @property
    def is_staged(self) -> bool:
        """Whether values of the host are written to the field's buffer."""
        return self.is_read and self.is_buffered

    @property
    def is_read(self) -> bool:
        """Whether the host batch has the field."""
        return self.read is not None or bool(self.mirror)

    @property
    def is_for_decode(self) -> bool:
        """Whether decode steps have the field, from the host or from its owner."""
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
    wide: Wide = Wide.REPEAT,
    moved: Moved | None = None,
    in_window: str | Callable[[Any], Any] = "",
    default: Any = None,
) -> Any:
    """Declare a field of a batch record. It has at least one source: `read` (from the host batch),
    `mirror` (the host copy of the field with that name), `record` (the type of a nested record), or
    `owner` (a label: who provides the value on steps for which the host has none, see `when`).

    For the other parameters see the fields of `FieldSpec`. `split` is SLICE by default, and CLIP if
    `moved` is given; without an axis it must be given. Raises TypeError without a source, for CLIP
    without `moved` or `mirror`, for a `dtype` without `padding`, and for a `read` field with a
    dtype that is not in `STAGED`.
    """
    if read is None and not (mirror or owner or record):
        raise TypeError(
            "a batch field must declare read=..., where the host batch has it, or mirror=, record= or owner=...; "
            "without any of them no code fills it"
        )
    if split is None:
        if axis is Axis.NONE:
            raise TypeError("a batch field without an axis must declare split=...; there is no safe default")
        split = Split.CLIP if moved is not None else Split.SLICE
    if split is Split.CLIP and moved is None and not mirror:
        raise TypeError("a batch field that is clipped must declare moved=Moved(...), or mirror= a field that does")
    if dtype is not None and padding is None:
        raise TypeError("a batch field with a dtype must declare padding=zero(), sentinel(v), fill_once(v) or keep()")
    if read is not None and dtype is not None and dtype not in STAGED:
        raise TypeError(f"the host stages {' and '.join(STAGED)}, not {dtype}")
    spec = FieldSpec(
        "",
        axis,
        split,
        dtype,
        padding or keep(),
        when,
        read,
        mirror,
        owner,
        record,
        dim=len(lead),
        lead=lead,
        wide=wide,
        moved=moved,
        in_window=in_window,
    )
    return dataclasses.field(default=default, metadata={"spec": spec})


@dataclass_transform()
def batch_record(host: type) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that makes a dataclass of the fields declared with `batch_field`.
    `host` is the type of the batches from which fields with `read` come.

    Raises TypeError if a field is not declared with `batch_field`, reads an attribute that `host`
    does not have, mirrors a field that the class does not have, or is clipped and mirrors a field
    without `moved`.
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
    """Return the declarations of a batch type, in order. Raises TypeError for a field that is not
    declared with `batch_field`, and for a clipped mirror of a field without `moved`.
    """
    found = []
    for item in dataclasses.fields(batch_type):
        if "spec" not in item.metadata:
            raise TypeError(f"{batch_type.__name__}.{item.name} is not declared with batch_field(...)")
        found.append(replace(item.metadata["spec"], name=item.name))
    by_name = {spec.name: spec for spec in found}
    made = tuple(_like_mirrored(spec, by_name.get(spec.mirror)) for spec in found)
    for spec in made:
        if spec.split is Split.CLIP and spec.moved is None:
            raise TypeError(
                f"{batch_type.__name__}.{spec.name} is clipped and mirrors {spec.mirror}, "
                "which does not declare moved=Moved(...)"
            )
    return made


def _like_mirrored(spec: FieldSpec, mirrored: FieldSpec | None) -> FieldSpec:
    """Return the declaration of a mirror with the `moved` of the field that it mirrors; `spec`
    itself if it mirrors none (None).
    """
    return spec if mirrored is None else replace(spec, moved=mirrored.moved)


@cache
def leaves(batch_type: type) -> tuple[FieldSpec, ...]:
    """Return the declarations, with nested records replaced by their fields under dotted names."""
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
    """Return the declaration of a record's own field by name (not a dotted name of a nested
    record). Raises KeyError, which lists the known names.
    """
    for spec in specs(batch_type):
        if spec.name == name:
            return spec
    raise KeyError(
        f"{batch_type.__name__} declares no field {name!r}; it declares {[s.name for s in specs(batch_type)]}"
    )
