"""The streams of a device that has them: one that runs forwards, one on which the host prepares and reads back, and perhaps a lane."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from sglcore.device.facts import Facts


@dataclass(frozen=True, slots=True)
class Part:
    """A stream whose kernels keep to so many of a device's compute units."""

    units: int
    stream: torch.Stream


@dataclass(frozen=True, slots=True)
class Streams:
    """`schedule` is the stream that was current when this was made; `forward` runs every step. None: no streams. `index` is
    the number of a device without streams; None: it has none. `lane`: prompts may run on it beside `forward`, which goes first;
    on one of `parts`, for each share of the device's units, where it is divided."""

    schedule: torch.Stream | None = None
    forward: torch.Stream | None = None
    index: int | None = None
    lane: torch.Stream | None = None
    parts: tuple[Part, ...] = ()

    @property
    def all(self) -> tuple[torch.Stream, ...]:
        """Every stream that there is, those that run steps first."""
        found = (self.forward, self.lane, *(part.stream for part in self.parts), self.schedule)
        return tuple(stream for stream in found if stream is not None)

    @property
    def is_host(self) -> bool:
        """There is no stream and no number of a device: nothing need be current for a step."""
        return self.forward is None and self.index is None

    def running(self) -> AbstractContextManager[object]:
        """A context in which the forward stream is current, and its device, whichever another engine of this thread left so."""
        if self.forward is not None:
            return self.forward
        return nullcontext() if self.index is None else torch.accelerator.device_index(self.index)

    def close(self) -> None:
        """All but the schedule stream are left to the next engine of this process. What was queued on them must have run."""
        if self.forward is not None:
            _spare(self.forward.device, 0 if self.lane is None else FIRST).append(self.forward)
        if self.lane is not None:
            _spare(self.lane.device, 0).append(self.lane)
        for part in self.parts:
            _spare(part.stream.device, 0, part.units).append(part.stream)


def entered(stream: torch.Stream) -> AbstractContextManager[object]:
    """A context in which `stream` is current. One that already is stays so: torch before 2.12 refuses to enter a stream twice."""
    is_current = torch.accelerator.current_stream(stream.device) == stream
    return nullcontext() if is_current else stream


FIRST = -1
"""The priority of a stream that goes first; others have 0."""


def make_streams(facts: Facts, *, has_lane: bool = False, parts: tuple[Part, ...] = ()) -> Streams:
    """The streams of the facts' device, or none. `has_lane`: with one beside the forward stream, which then has priority; `parts` of
    the device belong to that."""
    device = torch.device(facts.tensor_device)
    if not facts.has_streams:
        return Streams(index=device.index)
    current = torch.accelerator.current_stream(device)
    if not has_lane:
        return Streams(current, _stream(device))
    return Streams(current, _stream(device, FIRST), lane=_stream(device), parts=parts)


def take_part(device: torch.device, units: int, make: Callable[[int], torch.Stream]) -> Part:
    """A stream that keeps to so many units: one that an engine left, or a new one."""
    spare = _spare(device, 0, units)
    return Part(units, spare.pop() if spare else make(units))


def _stream(device: torch.device, priority: int = 0) -> torch.Stream:
    spare = _spare(device, priority)
    if spare:
        return spare.pop()
    return torch.Stream(device, priority=priority) if priority else torch.Stream(device)


@cache
def _spare(device: torch.device, priority: int, units: int | None = None) -> list[torch.Stream]:
    """Streams that no engine of this process uses, on all units or so many of them. Libraries keep a workspace for every stream that they were ever called
    on, of up to 32 MiB and as long as the process lives: an engine that is opened again must not add to them."""
    return []
