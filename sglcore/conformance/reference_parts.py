"""Parts of the reference: a graph mechanism that captures nothing, and the standard bring-up with a
fixed budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from sglcore.conformance.reference_device import package
from sglcore.conformance.target import Target
from sglcore.device.facts import Facts
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.streams import Streams
from sglcore.step.sizing import MemoryBudget

MEMORY = 256 << 20
"""Bytes that the reference may take for KV; the kit's models need a small part of it."""


class ReplayedStep:
    """What `ReplayedGraphs.capture` returns: a replay calls the captured function again, which
    reads the same static buffers."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self._step = step

    def replay(self, update: object | None) -> Tensor:
        """Run the step again and return what it returns; `update` is not used."""
        return self._step()


class ReplayedGraphs:
    """A `GraphBackend` that captures nothing and runs the step's code again at each replay, so that
    buckets, padding and refresh can be tested on the host."""

    kind = "replayed"

    def __init__(self, facts: Facts, streams: Streams) -> None:
        """Called as the factory of the reference's graphs; `facts` and `streams` are not used."""

    def capture(self, step: Callable[[], Tensor]) -> ReplayedStep:
        """Run the step once, and return it in a form that runs it again for each replay."""
        step()
        return ReplayedStep(step)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class ReplayableAttention(ReferenceAttention):
    """The reference's attention with capture, for a graph that runs its host code again."""

    facts = replace(ReferenceAttention.facts, features=ReferenceAttention.facts.features | {"capture"})


def device_memory(model: object) -> MemoryBudget:
    """Return the fixed budget `MEMORY`, the same for every model; `model` is not read."""
    return MemoryBudget(MEMORY, MEMORY, "the reference's fixed budget")


BRING_UP = STANDARD.insert(device_memory, before="sizes")

REFERENCE = Target(package, "sglcore")
"""The reference as a device under test."""
