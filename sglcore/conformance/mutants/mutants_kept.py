"""Broken devices that handle recurrent states and sliding-window pages of requests wrongly: workers
(`Changed`), and functions from a class of the runtime to a subclass. The docstring of each is the
text of its `Mutant`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from sglcore.conformance.mutant import Mutant, become, in_runtime, words_of
from sglcore.conformance.mutants.mutants_worker import Changed
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.worker.model_worker import Limits, ModelWorker
from sglcore.worker.schedule_batch import ScheduleBatch


class KeepsOldStates(Changed):
    """A request begins with the state of the previous request in its slot."""

    def change(self, batch: ScheduleBatch) -> None:
        if batch.state_from is not None:
            batch.state_from = np.where(batch.state_from, batch.state_from, np.int32(-1))


class LateSnapshots(Changed):
    """Takes a state snapshot one step too late."""

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(worker)
        self._due: dict[int, int] = {}

    def change(self, batch: ScheduleBatch) -> None:
        slots, wanted = batch.slots.tolist(), batch.state_to
        batch.state_to = np.array([self._due.pop(slot, 0) for slot in slots], np.int32)
        if wanted is not None:
            self._due |= {slot: place for slot, place in zip(slots, wanted.tolist(), strict=True) if place}


class KeepsOldWindows(Changed):
    """The first window position of a row stays as it was when the row entered its slot."""

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(worker)
        self._starts: dict[int, int] = {}

    def change(self, batch: ScheduleBatch) -> None:
        if batch.window_starts is None:
            return
        for row, slot in enumerate(batch.slots.tolist()):
            if not batch.page_counts[row]:
                self._starts[slot] = int(batch.window_starts[row])
        batch.window_starts = np.array([self._starts[slot] for slot in batch.slots.tolist()], np.int32)


class ShortWindow(Changed):
    """The limits state a window that is one page too short, so a page is freed while tokens still
    attend to it."""

    @property
    def limits(self) -> Limits:
        real = self.worker.limits
        return replace(real, window=max(real.window - real.page_size, min(real.window, 1)))


def loses_tails(base: Any) -> type:
    """A chunk begins without the tokens before it that a convolution reaches."""

    class LosesTails(base):
        def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
            if not batch.forward_mode.is_decode:
                states["conv"][batch.req_pool_indices] = 0
            return super().mix(hidden, batch, states)

    return LosesTails


def padding_has_a_slot(base: Any) -> type:
    """A padding row goes on with the state of the first slot."""

    class PaddingHasASlot(base):
        def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
            given = replace(batch, req_pool_indices=batch.req_pool_indices.clamp(min=1))
            return super().mix(hidden, given, states)

    return PaddingHasASlot


def _layers(subclass: Callable[[Any], type]) -> Mutant:
    def change(model: Any) -> Any:
        for layer in model.state_layers:
            become(layer, subclass)
        return model

    return in_runtime(*words_of(subclass), model=change)


def _worker(name: str, kind: type[Changed]) -> Mutant:
    return Mutant(name=name, says=str(kind.__doc__), steps=MappingProxyType({"worker": kind}))


KEEPS_OLD_STATES = _worker("slot keeps old state", KeepsOldStates)
LATE_SNAPSHOTS = _worker("snapshots late", LateSnapshots)
KEEPS_OLD_WINDOWS = _worker("window pages begin where they did", KeepsOldWindows)
SHORT_WINDOW = _worker("window too short", ShortWindow)
LOSES_TAILS = _layers(loses_tails)
PADDING_HAS_A_SLOT = _layers(padding_has_a_slot)
