"""The streams of a device: for forwards, for host preparation and readback, for prefill slices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from sglcore.device.facts import Facts


@dataclass(frozen=True, slots=True)
class Part:
    """A stream with kernels limited to `units` compute units of the device."""

    units: int
    stream: torch.Stream


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one engine. `schedule` and `forward` are None on a device without streams.

    `schedule` is the stream that was current when this was made; `forward` runs every step. `index`
    is the device index of a device without streams (None: it has no index). `lane` runs prefill
    slices concurrently with `forward`, which has priority. `parts` are the streams to use instead
    of `lane` if the compute units are partitioned, one per share.
    """

    schedule: torch.Stream | None = None
    forward: torch.Stream | None = None
    index: int | None = None
    lane: torch.Stream | None = None
    parts: tuple[Part, ...] = ()

    @property
    def all(self) -> tuple[torch.Stream, ...]:
        """All streams: those that run steps first, the schedule stream last."""
        found = (self.forward, self.lane, *(part.stream for part in self.parts), self.schedule)
        return tuple(stream for stream in found if stream is not None)

    @property
    def is_host(self) -> bool:
        """True if there is no stream and no device index: a step needs no context."""
        return self.forward is None and self.index is None

    def running(self) -> AbstractContextManager[object]:
        """Return a context that makes the forward stream and its device current.

        Another engine of this thread may have left another device current.
        """
        if self.forward is not None:
            return self.forward
        return nullcontext() if self.index is None else torch.accelerator.device_index(self.index)

    def close(self) -> None:
        """Give all streams but `schedule` to the next engine of this process.

        The caller makes sure that the work queued on them is done.
        """
        if self.forward is not None:
            _spare(self.forward.device, 0 if self.lane is None else FIRST).append(self.forward)
        if self.lane is not None:
            _spare(self.lane.device, 0).append(self.lane)
        for part in self.parts:
            _spare(part.stream.device, 0, part.units).append(part.stream)


def entered(stream: torch.Stream) -> AbstractContextManager[object]:
    """Return a context that makes `stream` current; a no-op if it is current already.

    torch before 2.12 refuses to enter a stream twice.
    """
    is_current = torch.accelerator.current_stream(stream.device) == stream
    return nullcontext() if is_current else stream


FIRST = -1
"""The priority of a high-priority stream; all others have 0."""


def make_streams(facts: Facts, *, has_lane: bool = False, parts: tuple[Part, ...] = ()) -> Streams:
    """Return the streams of the facts' device: the current one as `schedule`, and one for forwards.
    For a device without streams, return `Streams` with the device index only.

    `has_lane`: also make a stream for prefill slices; the forward stream then has priority. `parts`
    are the partitioned streams of that lane.
    """
    device = torch.device(facts.tensor_device)
    if not facts.has_streams:
        return Streams(index=device.index)
    current = torch.accelerator.current_stream(device)
    if not has_lane:
        return Streams(current, _stream(device))
    return Streams(current, _stream(device, FIRST), lane=_stream(device), parts=parts)


def take_part(device: torch.device, units: int, make: Callable[[int], torch.Stream]) -> Part:
    """Return a stream limited to `units` compute units: a spare one, or the new one of
    `make(units)`.
    """
    spare = _spare(device, 0, units)
    return Part(units, spare.pop() if spare else make(units))


def _stream(device: torch.device, priority: int = 0) -> torch.Stream:
    spare = _spare(device, priority)
    if spare:
        return spare.pop()
    return torch.Stream(device, priority=priority) if priority else torch.Stream(device)


@cache
def _spare(device: torch.device, priority: int, units: int | None = None) -> list[torch.Stream]:
    """Return the list of streams that no engine of this process uses, on all compute units or on
    `units` of them.

    Libraries keep a workspace of up to 32 MiB for every stream that they were ever called on, until
    the process ends. Reusing streams keeps a restarted engine from adding more.
    """
    return []
