"""A prompt whose layers run slice by slice: it holds what it was given until its last slice, whoever leaves meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.request import Request, State


@dataclass(slots=True)
class SlicedPrompt:
    """Chunks of which `done` layers are planned. `requests`, `slots` and `spans` are those of their BatchRecord. `released`:
    requests that left meanwhile, whose slots and pages the device still writes."""

    chunks: list[tuple[Request, int]]
    requests: list[Request]
    slots: NDArray[np.int32]
    spans: list[tuple[int, int]]
    is_masked: bool = False
    done: int = 0
    released: list[Request] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Of all chunks."""
        return sum(count for _, count in self.chunks)

    @property
    def is_wanted(self) -> bool:
        """Some of its requests is still there."""
        return len(self.released) < len(self.requests)

    def holds(self, request: Request) -> bool:
        """Its layers are running."""
        return request in self.requests

    def leave(self, request: Request) -> None:
        """The request has ended or gives way; its slot and pages stay its own until the device has done with them."""
        request.leaving = True
        self.released.append(request)

    @property
    def staying(self) -> list[tuple[Request, int]]:
        """The chunks of requests that are still there."""
        return [(request, count) for request, count in self.chunks if request.state is State.EXTENDING]
