"""Token indices of each request in an embedding step, as host arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglcore.step.emitting_rows import owners, within
from sglcore.worker.schedule_batch import ScheduleBatch


def pooled_rows(batch: ScheduleBatch) -> dict[str, NDArray[np.int32]]:
    """Return, for T tokens of B requests: `owners` int32[T], the request of each token; `weights`
    int32[T], its index in the request counted from 1; `first`, `last` and `lengths` int32[B], the
    indices of each request's first and last token among the T, and the number of its tokens.
    """
    offsets = batch.token_offsets
    return {
        "owners": owners(offsets),
        "weights": within(offsets) + np.int32(1),
        "first": offsets[:-1],
        "last": offsets[1:] - np.int32(1),
        "lengths": np.diff(offsets),
    }
