"""Splits a batch: a child has an interval of its parent's tokens, and each field is made by the
`Split` that the field declares.

One clip formula serves decode, extend, splits between requests and splits inside a request. It
reads the parent's tensors in place: nothing is copied from the host, so a batch can also be split
inside a captured stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.step.batch_field import Axis, FieldSpec, Moved, Split, specs

Record = TypeVar("Record")
Ints = NDArray[np.int32]


class SplitRefusedError(ValueError):
    """The batch has a field that forbids splitting it."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A child's tokens [first, last) of its parent, and the requests that they belong to.

    `rows` are the requests with tokens in the child. `skipped` counts the first request's tokens of
    this step before the child, `rest` the last request's tokens after it. Requests between them are
    whole.
    """

    first: int
    last: int
    rows: slice
    skipped: int
    rest: int

    @property
    def batch_size(self) -> int:
        """Number of requests with tokens in the child."""
        return self.rows.stop - self.rows.start


def clip(batch: ForwardBatch, first: int, last: int) -> Clip:
    """Return the interval [first, last) of a batch.

    Raises ValueError if it is not inside the batch, or if it cuts through the rows of one request
    in a decode with several rows per request.
    """
    if not 0 <= first <= last <= batch.num_tokens:
        raise ValueError(f"tokens [{first}, {last}) do not lie in a batch of {batch.num_tokens} tokens")
    width = batch.width or 1
    if first % width or last % width:
        raise ValueError(f"tokens [{first}, {last}) split a request of {width} rows; wanted multiples of {width}")
    lengths = batch.extend_seq_lens_cpu
    if lengths is None:
        return Clip(first, last, slice(first, last), 0, 0)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    inside = np.flatnonzero(np.minimum(ends, last) > np.maximum(starts, first))
    if not len(inside):
        return Clip(first, last, slice(0, 0), 0, 0)
    left, right = int(inside[0]), int(inside[-1])
    skipped, rest = max(first - int(starts[left]), 0), max(int(ends[right]) - last, 0)
    return Clip(first, last, slice(left, right + 1), skipped, rest)


def filter_batch(batch: ForwardBatch, first: int, last: int) -> ForwardBatch:
    """Return the child with tokens [first, last), without a plan; the parent does not change.

    Tensors that are only sliced are views. Raises SplitRefusedError if the batch has a field that
    forbids it, and ValueError as `clip` does. Does not wait.
    """
    return _child(batch, clip(batch, first, last))


def refusal(record: object) -> str:
    """Return the name of the first field that is not None and forbids splitting the batch, nested
    records included; empty if there is none.
    """
    for spec in specs(type(record)):
        value = getattr(record, spec.name)
        if value is not None and spec.split is Split.REFUSE:
            return spec.name
        if value is not None and spec.split is Split.NESTED and (inner := refusal(value)):
            return inner
    return ""


def _child(record: Record, part: Clip) -> Record:
    changes: dict[str, Any] = {}
    for spec in specs(type(record)):
        changes[spec.name] = _child_value(spec, getattr(record, spec.name), part)
    return type(record)(**{name: value for name, value in changes.items() if value is not _DEFAULT})


_DEFAULT = object()


def _child_value(spec: FieldSpec, value: Any, part: Clip) -> Any:
    if spec.split is Split.FRESH or spec.split is Split.DROP:
        return _DEFAULT
    if value is None or spec.split is Split.COPY:
        return value
    if spec.split is Split.REFUSE:
        raise SplitRefusedError(f"a batch with {spec.name} cannot be split; run it whole")
    if spec.split is Split.NESTED:
        return _child(value, part)
    if spec.split is Split.COUNT:
        return (value - part.first).clamp_(0, part.last - part.first)
    if spec.split is Split.SIZE:
        return _sized(spec.name, value, part)
    if spec.split is Split.CLIP:
        assert spec.moved is not None
        return _moved(value, part, spec.moved)
    where = slice(part.first, part.last) if spec.axis is Axis.TOKENS else part.rows
    return value[(slice(None),) * spec.dim + (where,)]


def _sized(name: str, value: Any, part: Clip) -> Any:
    if name == "batch_size":
        return part.batch_size
    if name == "num_tokens":
        return part.last - part.first
    if name == "extend_start_loc":
        starts = value[part.rows] - part.first
        return starts.clamp_(min=0) if isinstance(starts, torch.Tensor) else np.maximum(starts, 0)
    raise TypeError(f"{name} is declared as Split.SIZE, and this module has no formula for it")


def _moved(value: Any, part: Clip, moved: Moved) -> Any:
    """Return the child's part of a field with one number per request. `moved` changes the first and
    the last number only, because the other requests are whole: then the result is a copy, otherwise
    a view.

    `value` is a tensor, or a host array; if it ends before the child's last request, that request
    has no number to change.
    """
    found = value[part.rows]
    before, behind = moved.by_skipped * part.skipped, -moved.by_rest * part.rest
    if not (before or behind) or not len(found):
        return found
    found = found.clone() if isinstance(found, torch.Tensor) else found.copy()
    head, tail = found[:1], found[part.batch_size - 1 :]
    head += before
    tail += behind
    return found
