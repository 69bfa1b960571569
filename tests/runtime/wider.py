"""Batches with one more integer per request and one more number per token: one line in each of the
two batches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.step.batch_field import Axis, batch_field, batch_record, sentinel
from sglcore.worker.schedule_batch import ScheduleBatch


@dataclass(slots=True)
class WiderSchedule(ScheduleBatch):
    """The host's batch."""

    marks: NDArray[np.int32] | None = None
    weights: NDArray[np.float32] | None = None


@batch_record(WiderSchedule)
class WiderBatch(ForwardBatch):
    """The device's batch."""

    marks: Tensor = batch_field(axis=Axis.REQUESTS, dtype="int32", padding=sentinel(-7), read="marks")
    weights: Tensor = batch_field(axis=Axis.TOKENS, dtype="float32", padding=sentinel(0.5), read="weights")


def widened(batch: ScheduleBatch, **given: Any) -> WiderSchedule:
    """The same step with marks 100 * slot + length and weights position + 0.5, unless given."""
    counts = np.diff(batch.token_offsets)
    within = np.arange(batch.num_tokens, dtype=np.int32) - np.repeat(batch.token_offsets[:-1], counts)
    positions = np.repeat(batch.prefix_lens, counts) + within
    wider = {"marks": 100 * batch.slots + batch.seq_lens, "weights": positions.astype(np.float32) + np.float32(0.5)}
    return WiderSchedule(**{item.name: getattr(batch, item.name) for item in fields(batch)}, **{**wider, **given})


def one_for_real_tokens(batch: ForwardBatch) -> Tensor:
    """float32 [T]: 1 for each token with the mark of its request and the weight of its position."""
    assert isinstance(batch, WiderBatch)
    marks = batch.marks - 100 * batch.req_pool_indices - batch.seq_lens + 1
    if batch.extend_seq_lens is not None:
        marks = torch.repeat_interleave(marks, batch.extend_seq_lens, output_size=batch.num_tokens)
    return marks * (batch.weights - batch.positions + 0.5)
