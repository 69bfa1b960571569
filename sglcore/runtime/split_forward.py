"""`SplitForward`, the interface by which the runner and its graphs run a batch as two
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext

Forward = Callable[[ForwardBatch], Tensor]


class CapturedSplit(Protocol):
    """How captured decodes of one batch size run as two micro-batches, with their plans;
    `SplitForward.captured` makes it.
    """

    def refresh(self, batch: ForwardBatch) -> None:
        """Update the plans for the captured batch before a replay."""
        ...

    def forward(self, model: Forward, context: ForwardContext, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, H] of the captured batch. Runs inside the capture."""
        ...


class SplitForward(Protocol):
    """Decides which batches run as two micro-batches, and runs them. `Halves`
    (`overlap/micro_batches.py`) implements it.
    """

    def cut_of(self, batch: ForwardBatch) -> int | None:
        """Return the tokens of the first micro-batch, or None for a batch that runs whole."""
        ...

    def run(self, model: Forward, context: ForwardContext, batch: ForwardBatch, cut: int) -> Tensor:
        """Return hidden states [T, H] of a batch split after `cut` tokens.

        Plans both micro-batches. Does not wait for the device.
        """
        ...

    def captured(self, size: int) -> CapturedSplit | None:
        """Return the micro-batches of decodes with `size` rows, with plans for a capture.

        None if these run whole.
        """
        ...
