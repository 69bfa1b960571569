"""Tables by request slot on the device that a step's batch changes before its forward.

The host sends each change once, with the step that makes it. Each table says what a batch changes,
and applies it when the arrays have arrived on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from numpy.typing import NDArray
from torch import Tensor

from sglcore.step.snapshot_copies import entering_slots
from sglcore.worker.schedule_batch import ScheduleBatch


class SlotTable(Protocol):
    """A table on the device with an entry, a row or a state of each request slot."""

    def changes(self, batch: ScheduleBatch) -> Mapping[str, NDArray]:
        """Return the arrays that `apply` needs, by name; empty: the batch changes nothing.

        Host work only.
        """
        ...

    def apply(self, arrived: Mapping[str, Tensor]) -> None:
        """Apply the changes of a step. `arrived` also has the arrays of others.

        Does not wait.
        """
        ...


class Entered(Protocol):
    """An object with data by slot that is invalid once the slot belongs to another request."""

    def enter(self, slots: Tensor) -> None:
        """Reset slots int32 [N], which now belong to new requests. Does not wait."""
        ...


class EnteringSlots:
    """A `SlotTable` that calls `enter` of each `Entered` with the slots that get a new request."""

    def __init__(self, entered: Sequence[Entered]) -> None:
        self._entered = tuple(entered)

    def changes(self, batch: ScheduleBatch) -> Mapping[str, NDArray]:
        """Return {"entered_slots": int32 [N]}, the slots that the step gives to a new request;
        empty if there are none.
        """
        slots = entering_slots(batch)
        return {"entered_slots": slots} if len(slots) else {}

    def apply(self, arrived: Mapping[str, Tensor]) -> None:
        """Call `enter` of each `Entered` with the slots of `changes`, if there are any. Does not
        wait.
        """
        if "entered_slots" in arrived:
            for each in self._entered:
                each.enter(arrived["entered_slots"])
