"""Small host batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.worker.schedule_batch import ForwardMode, Ints, ScheduleBatch

GREEDY = SamplingParams(temperature=0.0)


def ints(values: Any) -> Ints:
    """int32."""
    return np.asarray(values, dtype=np.int32)


def offsets(lengths: Sequence[int]) -> Ints:
    """CSR offsets of rows of these lengths."""
    return ints([0, *np.cumsum(lengths)]) if len(lengths) else ints([0])


def make_batch(
    rows: Mapping[int, Sequence[int]],
    mode: ForwardMode = ForwardMode.EXTEND,
    *,
    params: Sequence[tuple] | None = None,
    emits: Sequence[bool] | None = None,
    **values: Any,
) -> ScheduleBatch:
    """A step in which slot s brings rows[s] and has no earlier tokens; each row gets one page in
    prefill and none in decode."""
    lengths = [len(tokens) for tokens in rows.values()]
    pages = [0 if mode is ForwardMode.DECODE else 1] * len(rows)
    made = ScheduleBatch(
        step=1,
        forward_mode=mode,
        slots=ints(list(rows)),
        seq_lens=ints(lengths),
        prefix_lens=ints([0] * len(rows)),
        token_offsets=offsets(lengths),
        input_ids=ints([token for tokens in rows.values() for token in tokens]),
        page_counts=ints([0] * len(rows)),
        new_page_offsets=offsets(pages),
        new_pages=ints(np.arange(1, 1 + sum(pages))),
        emits=np.array([True] * len(rows) if emits is None else emits, dtype=np.bool_),
        composition=5,
        sampling=SamplingBatch.from_params(params or [(GREEDY, 0)] * len(rows)),
    )
    for name, value in values.items():
        setattr(made, name, value)
    return made
