"""The sampling state of a host batch, made in one call, for tests that sample without steps or a
history table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sglcore.sampling.packing import lay_out, read_words, write_words
from sglcore.sampling.params_batch import SamplingBatch, SamplingNeeds
from sglcore.sampling.processors import PenaltyState, count_penalties, place_penalties
from sglcore.sampling.sampler import SamplingState, place_state
from sglcore.sampling.state import Masks, penalty_arrays, state_arrays


def make_state(
    batch: SamplingBatch,
    positions: Tensor,
    penalties: PenaltyState | None = None,
    masks: Masks[Tensor] | None = None,
    needs: SamplingNeeds | None = None,
) -> SamplingState:
    """Return the sampling state of a host batch of B rows, on the device of positions int32 [B].
    Waits for the copy.

    `needs` may be wider than the batch's own (None: those), as for a captured graph. Raises
    ValueError if these needs include penalties and `penalties` is None.
    """
    needs = needs or batch.needs
    if needs.any_penalty and penalties is None:
        raise ValueError("found rows with penalties, wanted their token counts; pass make_penalties(...)")
    parts = _upload(state_arrays(batch, needs), positions.device)
    return replace(place_state(needs, positions, parts), penalties=penalties, masks=masks)


def make_penalties(
    batch: SamplingBatch, history: Tensor, lengths: Tensor, vocab_size: int, all_rows: bool = False
) -> PenaltyState:
    """Return the penalties of a host batch, with its tokens counted, on the device of `history`.
    history int32 [R, L] and lengths int32 [R] have the rows of batch.penalty_rows(), in order; with
    `all_rows`, all rows of the batch."""
    parts = _upload(penalty_arrays(batch, all_rows), history.device)
    rows = None if all_rows else parts["penalty_rows"].long()
    return count_penalties(place_penalties(parts, rows), history, lengths, vocab_size)


def _upload(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """Copy all arrays to the device at once and return them as tensors by name. Waits for the
    copy."""
    values = list(arrays.values())
    starts, total = lay_out(values)
    words = np.zeros(total, np.int32)
    write_words(words, values, starts)
    return dict(zip(arrays, read_words(torch.from_numpy(words).to(device), values, starts), strict=True))
