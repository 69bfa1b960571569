"""The prompt whose KV rows stay on the device between its chunks, while the KV cache is in host
memory (HiSparse). Host data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglcore.step.snapshot_copies import entering_slots
from sglcore.worker.schedule_batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class Held:
    """The held prompt in a step: `row` is its index in the batch; the rows of its first `tokens`
    tokens are on the device already.
    """

    row: int
    tokens: int


class HeldPrompt:
    """Chooses which prompt is held, step by step: one that has further chunks, until its last one.

    A prompt that is held from its first chunk on has each of its rows brought to the device once.
    Another one that needs the place while the held one is not in a step takes it. A prompt longer
    than `most` tokens loses the place; its older rows are then copied with every chunk.
    """

    def __init__(self, most: int) -> None:
        """`most`: tokens of the longest prompt that can be held; 0: none is."""
        self.now: Held | None = None
        """The held prompt in the last batch; None: it has none."""
        self._most, self._slot, self._tokens = most, 0, 0

    def changes(self, batch: ScheduleBatch) -> Mapping[str, NDArray]:
        """Choose for a batch. Call once per batch, in the order of submission. Host work only;
        returns nothing, because no table on the device changes.
        """
        if len(entered := entering_slots(batch)) and self._slot in entered:
            self._slot = 0
        self.now = None
        if not batch.forward_mode.is_decode:
            self.now = self._chosen(batch)
        return {}

    def apply(self, arrived: Mapping[str, object]) -> None:
        """Does nothing: `changes` returned nothing."""

    def _chosen(self, batch: ScheduleBatch) -> Held | None:
        row = self._row(batch)
        if row is None:
            return None
        slot, end = int(batch.slots[row]), int(batch.seq_lens[row])
        is_there = slot == self._slot and int(batch.prefix_lens[row]) == self._tokens
        found = Held(row, self._tokens if is_there else 0)
        self._slot, self._tokens = (slot, end) if not batch.emits[row] else (0, 0)
        return found

    def _row(self, batch: ScheduleBatch) -> int | None:
        """Return the row of the held prompt, or of one that begins to be held; None: neither."""
        fits = batch.seq_lens <= self._most
        for rows in ((batch.slots == self._slot) & (batch.slots > 0), ~batch.emits):
            found = np.flatnonzero(rows)
            if len(found) and fits[found[0]]:
                return int(found[0])
        return None
