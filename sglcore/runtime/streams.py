"""The two streams of a device that has them: one that runs forwards, one on which the host prepares and reads back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from sglcore.device.facts import Facts


@dataclass(frozen=True, slots=True)
class Streams:
    """`schedule` is the stream that was current when this was made; `forward` runs every step. None: no streams. `index` is
    the number of a device without streams; None: it has none."""

    schedule: torch.Stream | None = None
    forward: torch.Stream | None = None
    index: int | None = None

    @property
    def is_host(self) -> bool:
        """There is no stream and no number of a device: nothing need be current for a step."""
        return self.forward is None and self.index is None

    def running(self) -> AbstractContextManager[object]:
        """A context in which the forward stream is current, and its device, whichever another engine of this thread left so."""
        if self.forward is not None:
            return self.forward
        return nullcontext() if self.index is None else torch.accelerator.device_index(self.index)


def entered(stream: torch.Stream) -> AbstractContextManager[object]:
    """A context in which `stream` is current. One that already is stays so: torch before 2.12 refuses to enter a stream twice."""
    is_current = torch.accelerator.current_stream(stream.device) == stream
    return nullcontext() if is_current else stream


def make_streams(facts: Facts) -> Streams:
    """The streams of the facts' device, or none."""
    device = torch.device(facts.tensor_device)
    if not facts.has_streams:
        return Streams(index=device.index)
    return Streams(torch.accelerator.current_stream(device), torch.Stream(device))
