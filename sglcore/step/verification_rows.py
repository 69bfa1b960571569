"""Verification steps: each decode row becomes several rows of its request slot, one for each token
to verify.

Attention, graphs and kernels see a decode with more rows: a forward stores all KV entries before it
attends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sglcore.sampling.params_batch import SamplingBatch
from sglcore.step.emitting_rows import RowPlan
from sglcore.worker.model_worker import BatchResult, TokenLogprobs
from sglcore.worker.schedule_batch import HostSampling, Ints, ScheduleBatch


@dataclass(frozen=True, slots=True)
class WideRows:
    """Sampling inputs of B * N rows that stay valid for one composition: the `number` of the wide
    composition, `slots` int32[B * N], the rows' `sampling`, and `plan`, the rows that emit.
    """

    number: int
    slots: Ints
    sampling: HostSampling | None
    plan: RowPlan


def wide_rows(batch: ScheduleBatch, width: int, number: int) -> WideRows:
    """Make the sampling inputs of a decode batch that verifies `width` tokens of each row. `number`
    is a composition number of its own.
    """
    size, sampling = batch.batch_size * width, batch.sampling
    rows = np.repeat(np.arange(batch.batch_size, dtype=np.int32), width)
    return WideRows(
        number,
        batch.slots[rows],
        sampling.select(rows) if isinstance(sampling, SamplingBatch) else sampling,
        RowPlan.each(size),
    )


def widen(batch: ScheduleBatch, wide: WideRows) -> ScheduleBatch:
    """Return the batch that sampling reads, with one row for each token to verify; `wide` is from
    `wide_rows` for this composition. Lengths are upper bounds.
    """
    width = len(wide.slots) // max(batch.batch_size, 1)
    mask_rows, masks = _wide_masks(batch, width)
    changes = _wide_changes(batch, width)
    return replace(
        batch,
        slots=wide.slots,
        seq_lens=most_lens(batch, width),
        composition=wide.number,
        sampling=wide.sampling,
        mask_rows=mask_rows,
        mask_nodes=None,
        masks=masks,
        **changes,
    )


def most_lens(batch: ScheduleBatch, width: int) -> Ints:
    """Return int32[B * N] with N = `width`: an upper bound of the tokens of each wide row. Row j of
    a request (from 0) has `prefix_lens` + j + 1, at most `cell_limits`, which the batch must
    have."""
    assert batch.cell_limits is not None
    ends = batch.prefix_lens[:, None] + np.arange(1, width + 1, dtype=np.int32)
    return np.minimum(ends, np.maximum(batch.cell_limits, 1)[:, None]).reshape(-1)


def _wide_masks(batch: ScheduleBatch, width: int) -> tuple[Ints | None, Ints | None]:
    """Return the wide rows that have a mask, int32[M], and their masks; (None, None) if the batch
    has none. Masks for tokens beyond the width are left out.
    """
    if batch.mask_rows is None or batch.mask_nodes is None or batch.masks is None:
        return None, None
    kept = batch.mask_nodes < width
    return (batch.mask_rows * np.int32(width) + batch.mask_nodes)[kept], batch.masks[kept]


def _wide_changes(batch: ScheduleBatch, width: int) -> dict[str, NDArray | None]:
    """Return the batch fields of the logit additions, with the numbers of the wide rows; additions
    for tokens beyond the width are left out. Empty if the batch has none.
    """
    if batch.change_rows is None or batch.change_nodes is None:
        return {}
    assert batch.change_ids is not None and batch.change_values is not None
    kept = batch.change_nodes < width
    rows = (batch.change_rows * np.int32(width) + batch.change_nodes)[kept]
    ids, values = batch.change_ids[kept], batch.change_values[kept]
    return {"change_rows": rows, "change_nodes": None, "change_ids": ids, "change_values": values}


def node_limits(batch: ScheduleBatch, width: int) -> Ints | None:
    """Return int32[B]: how many of the `width` tokens of each row may be verified, because they
    have a mask or need none. None: all.
    """
    if batch.mask_rows is None:
        return None
    counts = np.bincount(batch.mask_rows, minlength=batch.batch_size).astype(np.int32)
    return np.where(counts > 0, counts, np.int32(width))


def accepted_runs(wide: BatchResult, accepted: Ints, proposed: Ints) -> BatchResult:
    """Reduce the result of B * N wide rows to B rows: the first `accepted` int32[B] + 1 tokens of
    each, with their log-probabilities. A row is bad if one of these wide rows is. `proposed`
    int32[B]: the numbers of verified draft tokens, for the result.
    """
    nodes = wide.token_ids.reshape(len(accepted), -1)
    kept = np.arange(nodes.shape[1], dtype=np.int32) <= accepted[:, None]
    offsets = np.zeros(len(accepted) + 1, np.int32)
    np.add.accumulate(accepted + 1, out=offsets[1:])
    logprobs = wide.logprobs
    if logprobs is not None:
        flat = kept.reshape(-1)
        logprobs = TokenLogprobs(
            logprobs.chosen[flat], logprobs.ranks[flat], logprobs.top_ids[flat], logprobs.top_logprobs[flat]
        )
    bad = wide.bad_rows.reshape(nodes.shape)
    bad = np.logical_or.reduce(bad & kept, axis=1) if bad.any() else bad[:, 0]
    return BatchResult(wide.step, offsets, nodes[kept], bad, logprobs, path=wide.path, proposed=proposed)
