"""Steps that verify proposals: a decode row becomes several rows of its slot, one for each token that is to be verified.

Attention, graphs and kernels see a decode of more rows: a forward stores all cells before it attends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sglcore.device.batch import HostSampling, Ints, ScheduleBatch
from sglcore.device.worker import BatchResult, TokenLogprobs
from sglcore.sampling.batch import SamplingBatch
from sglcore.step.rows import RowPlan


@dataclass(frozen=True, slots=True)
class WideRows:
    """What the draw of B * N rows knows while a composition lasts: the `number` of the wide one, `slots` int32[B * N], the rows'
    `sampling`, and `plan`, what they emit."""

    number: int
    slots: Ints
    sampling: HostSampling | None
    plan: RowPlan


def wide_rows(batch: ScheduleBatch, width: int, number: int) -> WideRows:
    """For `width` tokens of each row."""
    size, sampling = batch.batch_size * width, batch.sampling
    rows = np.repeat(np.arange(batch.batch_size, dtype=np.int32), width)
    return WideRows(
        number,
        batch.slots[rows],
        sampling.select(rows) if isinstance(sampling, SamplingBatch) else sampling,
        RowPlan.each(size),
    )


def widen(batch: ScheduleBatch, wide: WideRows) -> ScheduleBatch:
    """What the draw reads of a decode batch, with each token to verify as a row of its own. Lengths are the most that they can be."""
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
    """int32[B * N]: the most tokens that each wide row can have."""
    assert batch.cell_limits is not None
    ends = batch.prefix_lens[:, None] + np.arange(1, width + 1, dtype=np.int32)
    return np.minimum(ends, np.maximum(batch.cell_limits, 1)[:, None]).reshape(-1)


def _wide_masks(batch: ScheduleBatch, width: int) -> tuple[Ints | None, Ints | None]:
    """The wide rows that have a mask, and the masks: those for tokens beyond the width are left out."""
    if batch.mask_rows is None or batch.mask_nodes is None or batch.masks is None:
        return None, None
    kept = batch.mask_nodes < width
    return (batch.mask_rows * np.int32(width) + batch.mask_nodes)[kept], batch.masks[kept]


def _wide_changes(batch: ScheduleBatch, width: int) -> dict[str, NDArray | None]:
    """What is added to logits of the wide rows."""
    if batch.change_rows is None or batch.change_nodes is None:
        return {}
    assert batch.change_ids is not None and batch.change_values is not None
    kept = batch.change_nodes < width
    rows = (batch.change_rows * np.int32(width) + batch.change_nodes)[kept]
    ids, values = batch.change_ids[kept], batch.change_values[kept]
    return {"change_rows": rows, "change_nodes": None, "change_ids": ids, "change_values": values}


def node_limits(batch: ScheduleBatch, width: int) -> Ints | None:
    """int32[B]: of the `width` tokens of each row, those that may be verified, as they have a mask each or need none; None: all."""
    if batch.mask_rows is None:
        return None
    counts = np.bincount(batch.mask_rows, minlength=batch.batch_size).astype(np.int32)
    return np.where(counts > 0, counts, np.int32(width))


def accepted_runs(wide: BatchResult, accepted: Ints, proposed: Ints) -> BatchResult:
    """The result of B rows from that of their B * N: of each the first `accepted` + 1."""
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
