"""Counters that show whether closing a device frees everything: what the process holds, to compare
before a start and after the close. Bytes of tensors on the torch runtime, on the CPU too; otherwise
the number of objects of bring-ups that are still alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from sglcore.conformance.target import Target


class Counter(Protocol):
    """Counts what started devices hold (`Bytes` or `Parts`); closing a device must bring `held`
    back to its value before the start. `what`: the unit of the count, for messages."""

    what: str

    def watch(self, parts: Iterable[object]) -> None:
        """Note the parts of a device that was started, without keeping them alive."""
        ...

    def held(self) -> int:
        """Return how much is held now. Waits for the device."""
        ...


def counter(target: Target) -> Counter:
    """Return a new counter for a device: `Bytes` on the torch runtime, otherwise `Parts`."""
    return Bytes(target.facts().tensor_device) if "torch_runtime" in target.capabilities() else Parts()


COUNTED = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors with bytes of their own. Others, such as fake tensors, may have no storage."""


class Bytes:
    """Counts bytes of device memory that this process holds for tensors; where host memory is
    device memory, the bytes of all its torch tensors and parameters."""

    what = "bytes"

    def __init__(self, tensor_device: str) -> None:
        self._is_host = torch.device(tensor_device).type == "cpu"

    def watch(self, parts: Iterable[object]) -> None:
        """Do nothing: bytes need no watching."""

    def held(self) -> int:
        """Return the number of bytes now. Waits for the device."""
        if not self._is_host:
            torch.accelerator.synchronize()
            return int(torch.accelerator.memory_allocated())
        tensors = [thing for thing in gc.get_objects() if type(thing) in COUNTED and not thing.is_mkldnn]
        storages = {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes() for thing in tensors}
        return sum(storages.values())


class Parts:
    """Counts distinct objects that bring-ups built and that are still alive: model, memory, worker,
    and any other that takes a weak reference."""

    what = "parts that bring-ups built"

    def __init__(self) -> None:
        self._parts: list[weakref.ref[object]] = []

    def watch(self, parts: Iterable[object]) -> None:
        """Keep weak references to the parts; those that take none are ignored."""
        for part in parts:
            try:
                self._parts.append(weakref.ref(part))
            except TypeError:
                continue

    def held(self) -> int:
        """Return the number of watched objects that are still alive."""
        return len({id(part) for ref in self._parts if (part := ref()) is not None})
