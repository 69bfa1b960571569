"""Batches of a draft model: rows that the device makes from the rows of another batch.

What a row has besides its token and its place follows from the declarations of the batch fields
(`Wide` in step/batch_field.py): each row gets the entries of the request that it continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.batch_split import filter_batch
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.step.batch_field import Axis
from sglcore.step.host_values import make_batch
from sglcore.step.repeated_fields import continued
from sglcore.worker.schedule_batch import ForwardMode
from sglcore.worker.step_plan import StepPlan

Sources = Callable[[Axis], Tensor]
"""`sources(axis)` returns int[N]: for each of N new rows the entry that it continues in fields of
this axis (requests or tokens) of another batch. Called only if that batch has such a field.
"""


def placed(slots: Tensor, positions: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return slots and positions int32[R].

    Those at or past `ends` are replaced by position 0 of slot 0 (scratch).
    """
    usable = positions < ends
    return slots * usable, positions * usable


def decode_batch(
    like: ForwardBatch,
    sources: Sources,
    slots: Tensor,
    positions: Tensor,
    ids: Tensor,
    most_lens: NDArray[np.int32],
    features: Tensor | None = None,
    plan: StepPlan | None = None,
) -> ForwardBatch:
    """Return a decode batch of one token per row, int32[R] each, for a draft's runner.

    `most_lens` are upper bounds of the lengths. Each row has the fields of `like` that repeat
    (`Wide.REPEAT`) at its entry of `sources`. `plan`: of a forward of several data-parallel shards;
    all its rows may belong to other shards. Does not wait.
    """
    if plan is not None and not len(most_lens):
        return no_tokens(like, plan, features)
    made: dict[str, Any] = {
        "forward_mode": ForwardMode.DECODE,
        "batch_size": len(most_lens),
        "num_tokens": len(most_lens),
        "req_pool_indices": slots,
        "seq_lens": positions + 1,
        "input_ids": ids,
        "positions": positions,
        "num_token_non_padded": like.num_token_non_padded,
        "seq_lens_cpu": most_lens,
        "features": features,
        "step_plan": plan,
    }
    made.update(continued(like, lambda spec, value: value.index_select(spec.dim, sources(spec.axis))))
    return make_batch(type(like), made)


def no_tokens(like: ForwardBatch, plan: StepPlan, features: Tensor | None = None) -> ForwardBatch:
    """Return a batch without rows, for a step in which only other data-parallel shards have rows.
    `features`, if given, are [0, F].
    """
    given = {"forward_mode": ForwardMode.IDLE, "input_embeds": None, "features": features, "step_plan": plan}
    return replace(filter_batch(like, 0, 0), **given)
