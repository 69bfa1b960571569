"""Children of a batch: a child is an interval of tokens, made field by field from the declarations.

One clip formula serves decode, extend, splits at request boundaries and splits inside a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.step.fields import Axis, FieldSpec, Split, spec_of, specs

Record = TypeVar("Record")
Ints = NDArray[np.int32]


class SplitRefusedError(ValueError):
    """The batch holds a field whose presence forbids splitting it."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A child's tokens [first, last) of its parent, in terms of requests.

    `rows` are the requests with tokens in it; of each, `lengths` tokens belong to the child, after `skipped` tokens of
    this step and `prefix_lens` cells in all, so that `seq_lens` tokens are known once the child has run; layers with windows
    count from `window_starts` on. `real` of its tokens are not padding; the first `mirrored` rows are not, and have host
    mirrors.
    """

    first: int
    last: int
    rows: slice
    lengths: Ints
    skipped: Ints
    prefix_lens: Ints
    window_starts: Ints
    real: int
    mirrored: int

    @property
    def values(self) -> dict[str, Any]:
        """What each clipped field becomes, as host values; a host mirror becomes those of its field that are `mirrored`."""
        starts = np.cumsum(self.lengths, dtype=np.int32) - self.lengths
        seq_lens = (self.prefix_lens + self.lengths).astype(np.int32)
        return {
            "batch_size": len(self.lengths),
            "num_tokens": self.last - self.first,
            "seq_lens": seq_lens,
            "window_seq_lens": seq_lens - self.window_starts,
            "extend_seq_lens": self.lengths,
            "extend_prefix_lens": self.prefix_lens,
            "extend_start_loc": starts,
            "req_lens": self.lengths,
        }


def clip(batch: ForwardBatch, first: int, last: int, real_tokens: int) -> Clip:
    """The interval [first, last) of a batch of which `real_tokens` are not padding."""
    if not 0 <= first <= last <= batch.num_tokens:
        raise ValueError(f"tokens [{first}, {last}) do not lie in a batch of {batch.num_tokens} tokens")
    assert batch.seq_lens_cpu is not None
    lengths, seq_lens = batch.extend_seq_lens_cpu, batch.seq_lens_cpu
    if lengths is None:
        lengths = np.ones(batch.batch_size, dtype=np.int32)
        padding = int(spec_of(ForwardBatch, "seq_lens").padding.value)
        seq_lens = np.append(seq_lens, np.full(batch.batch_size - len(seq_lens), padding, dtype=np.int32))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    inside = np.flatnonzero(np.minimum(ends, last) > np.maximum(starts, first))
    rows = slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)
    skipped = np.maximum(first - starts[rows], 0).astype(np.int32)
    kept = np.minimum(ends[rows], last) - np.maximum(starts[rows], first)
    prefix = seq_lens[rows] - lengths[rows] + skipped
    real = min(max(real_tokens - first, 0), last - first)
    mirrored = max(min(len(batch.seq_lens_cpu), rows.stop) - rows.start, 0)
    hidden = np.zeros_like(seq_lens)
    if batch.window_seq_lens_cpu is not None:
        hidden[: len(batch.seq_lens_cpu)] = batch.seq_lens_cpu - batch.window_seq_lens_cpu
    kept, prefix = kept.astype(np.int32), prefix.astype(np.int32)
    return Clip(first, last, rows, kept, skipped, prefix, hidden[rows], real, mirrored)


def filter_batch(batch: ForwardBatch, first: int, last: int, real_tokens: int | None = None) -> ForwardBatch:
    """The child that holds tokens [first, last). It starts without a plan; the parent is left as it is.

    Raises SplitRefusedError if a field forbids it. Tensors are views where the axis is only cut.
    """
    part = clip(batch, first, last, batch.num_tokens if real_tokens is None else real_tokens)
    return _child(batch, part)


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
        raise SplitRefusedError(f"a batch with {spec.name} can not be split; run it whole")
    if spec.split is Split.NESTED:
        return _child(value, part)
    if spec.split is Split.COUNT:
        return torch.full_like(value, part.real)
    if spec.split is Split.CLIP:
        clipped = part.values[spec.mirror][: part.mirrored] if spec.mirror else part.values[spec.name]
        return torch.from_numpy(clipped).to(value.device, value.dtype) if isinstance(value, torch.Tensor) else clipped
    if spec.split is Split.ADVANCE:
        return value[part.rows] + torch.from_numpy(part.skipped).to(value.device)
    where = slice(part.first, part.last) if spec.axis is Axis.TOKENS else part.rows
    return value[(slice(None),) * spec.dim + (where,)]
