"""A prompt that runs in slices of layers. It keeps its request slots and pages until its last
slice, even if its requests leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.request import Request, State


@dataclass(slots=True)
class SlicedPrompt:
    """The prompt chunks of one step that runs in slices: each request with its number of tokens.

    `requests`: the request of each row of that step. `slots`: the request slots of the rows that
    sample a token. `spans`: the tokens start..end-1 of each chunk. `is_masked`: a row samples under
    a grammar. `done`: number of layers planned so far. `released`: requests that have left; the
    device still writes to their slots and pages.
    """

    chunks: list[tuple[Request, int]]
    requests: list[Request]
    slots: NDArray[np.int32]
    spans: list[tuple[int, int]]
    is_masked: bool = False
    done: int = 0
    released: list[Request] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(count for _, count in self.chunks)

    @property
    def is_wanted(self) -> bool:
        """Whether a request of the prompt has not left."""
        return len(self.released) < len(self.requests)

    def holds(self, request: Request) -> bool:
        """Return whether the request is part of this prompt."""
        return request in self.requests

    def leave(self, request: Request) -> None:
        """Note that the request has ended or was preempted. It keeps its slot and pages until the
        device has finished with them.
        """
        request.run.leave()
        self.released.append(request)

    @property
    def staying(self) -> list[tuple[Request, int]]:
        """The chunks of the requests that have not left."""
        return [(request, count) for request, count in self.chunks if request.state is State.EXTENDING]
