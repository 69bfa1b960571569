"""The hidden states that a step returns: which tokens they belong to, and the rows that get them.
Host data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sglcore.worker.schedule_batch import CaptureHiddenMode, Ints, ScheduleBatch

A = TypeVar("A")
AFTER, BEFORE = "tokens_after_norm", "tokens_before_norm"
"""Names of the index arrays on the device: the tokens with returned hidden states after the last
norm, and those with states before it."""


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """The requested hidden states of a step, in the order in which they are read back: first those
    after the last norm, then those before it."""

    rows: tuple[tuple[int, int], ...]
    """(row, number of its tokens), in that order."""
    arrays: Mapping[str, Ints]
    """int32[n] by name, AFTER and BEFORE: indices of the tokens in the step. Without empty ones."""

    def split(self, states: NDArray[np.float32]) -> dict[int, NDArray[np.float32]]:
        """Return the states float32[N, H] by row, as views."""
        found: dict[int, NDArray[np.float32]] = {}
        first = 0
        for row, count in self.rows:
            found[row] = states[first : first + count]
            first += count
        return found


def hidden_rows(batch: ScheduleBatch, width: int = 0) -> HiddenRows | None:
    """Return the hidden states that a batch requests; None: it requests none. Call it before the
    batch is staged, which takes its `capture_hidden_mode`.

    `width`: rows of each request in a verification; all are returned (0: no verification).
    """
    modes = batch.hidden_modes
    if modes is None or not batch.capture_hidden_mode.is_set:
        return None
    offsets = np.arange(len(modes) + 1, dtype=np.int32) * width if width else batch.token_offsets
    rows: list[tuple[int, int]] = []
    arrays: dict[str, Ints] = {}
    for name, flags in ((AFTER, modes > 0), (BEFORE, modes < 0)):
        places: list[Ints] = []
        for row in np.flatnonzero(flags).tolist():
            first, last = offsets[row : row + 2].tolist()
            if abs(modes[row]) == CaptureHiddenMode.LAST and not width:
                first = last - 1
            places.append(np.arange(first, last, dtype=np.int32))
            rows.append((row, last - first))
        if places:
            arrays[name] = np.concatenate(places)
    return HiddenRows(tuple(rows), arrays) if rows else None


def take_states(
    arrived: Mapping[str, A], after: A, before: A | None, take: Callable[[A, A], A], join: Callable[[list[A]], A]
) -> A:
    """Return the hidden states float32 [N, H] of `HiddenRows`, from those of the whole step [T, H].

    The library provides `take(states, indices)`, a copy in float32, and `join(arrays)`, which
    concatenates. `arrived` are the `arrays` on the device. Raises ValueError if the forward has not
    returned those `before` the last norm and some are requested.
    """
    parts = [take(after, arrived[AFTER])] if AFTER in arrived else []
    if BEFORE in arrived:
        if before is None:
            raise ValueError("the forward did not return the hidden states before the last norm that its batch wants")
        parts.append(take(before, arrived[BEFORE]))
    return parts[0] if len(parts) == 1 else join(parts)


def accepted_states(found: Mapping[int, NDArray[np.float32]], token_offsets: Ints) -> dict[int, NDArray[np.float32]]:
    """Return the states of a verification's accepted rows: the first of each row, one for each of
    its sampled tokens. `token_offsets` int32[B + 1] as in `BatchResult`."""
    counts = np.diff(token_offsets)
    return {row: states[: counts[row]] for row, states in found.items()}
