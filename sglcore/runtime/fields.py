"""The declaration of a batch field: one line per field, from which slots, views, children, retention and poison come.

It knows nothing of any particular batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any

import torch


class Axis(Enum):
    """What a field has one entry per."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    NONE = "none"


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
    """The rule for padding rows: VALUE writes `value` whenever the batch is padded, ONCE only when the slot is made,
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
    """Padding rows hold `value`, written when the slot is made."""
    return Padding(Fill.ONCE, value)


class Source(Enum):
    """Where a slot's contents come from: the HOST batch (staged), the device BATCH (copied), or COMPUTED in place."""

    HOST = "host"
    BATCH = "batch"
    COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """Everything there is to know about one field. `dim` is the tensor dimension of the axis, `lead` the sizes of the
    dimensions before it; `dtype` None means that the field is not a tensor of the registry."""

    name: str
    axis: Axis
    split: Split
    dtype: torch.dtype | None
    padding: Padding
    source: Source
    dim: int
    lead: tuple[int, ...]
    owner: str

    @property
    def is_slot(self) -> bool:
        """The registry keeps a static buffer for it."""
        return self.dtype is not None


def batch_field(
    *,
    axis: Axis,
    split: Split | None = None,
    dtype: torch.dtype | None = None,
    padding: Padding | None = None,
    source: Source = Source.BATCH,
    lead: tuple[int, ...] = (),
    owner: str = "batch",
    default: Any = None,
) -> Any:
    """Declare a field. A field without an axis must say how it is split: nothing can be right by default."""
    if split is None:
        if axis is Axis.NONE:
            raise TypeError("a batch field without an axis must declare split=...; there is no safe default")
        split = Split.SLICE
    if dtype is not None and padding is None:
        raise TypeError("a batch field with a dtype must declare padding=zero(), sentinel(v), fill_once(v) or keep()")
    spec = FieldSpec("", axis, split, dtype, padding or keep(), source, len(lead), lead, owner)
    return dataclasses.field(default=default, metadata={"spec": spec})


@cache
def specs(batch_type: type) -> tuple[FieldSpec, ...]:
    """The declarations of a batch type, in order. A field that bypassed `batch_field` is an error."""
    found = []
    for item in dataclasses.fields(batch_type):
        if "spec" not in item.metadata:
            raise TypeError(f"{batch_type.__name__}.{item.name} is not declared with batch_field(...)")
        found.append(dataclasses.replace(item.metadata["spec"], name=item.name))
    return tuple(found)


@cache
def spec_of(batch_type: type, name: str) -> FieldSpec:
    """One declaration by name; an unknown name is an error that lists the known ones."""
    for spec in specs(batch_type):
        if spec.name == name:
            return spec
    raise KeyError(
        f"{batch_type.__name__} declares no field {name!r}; it declares {[s.name for s in specs(batch_type)]}"
    )


def retained(batch: Any) -> list[torch.Tensor]:
    """Every tensor a batch holds, for as long as the device may read it."""
    read, read_nested = _readers(type(batch))
    kept = [value for value in read(batch) if isinstance(value, torch.Tensor)]
    for value in read_nested(batch):
        if value is not None:
            kept += retained(value)
    return kept


@cache
def _readers(batch_type: type) -> tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any], tuple[Any, ...]]]:
    """Readers of all plain fields and of all nested ones, each giving a tuple."""
    nested = [spec.name for spec in specs(batch_type) if spec.split is Split.NESTED]
    plain = [spec.name for spec in specs(batch_type) if spec.split is not Split.NESTED]
    return _reader(plain), _reader(nested)


def _reader(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda batch: tuple(getattr(batch, name) for name in names)
