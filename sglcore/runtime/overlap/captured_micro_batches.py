"""Two micro-batches of a decode in one captured graph.

The split is fixed for each bucket; the plans are refreshed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sglcore.runtime.attention.contract import AttentionPlan, Bucket
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext
from sglcore.runtime.overlap.micro_batches import Halves, Model


@dataclass(frozen=True, slots=True)
class CapturedHalves:
    """The two micro-batches of one bucket: where it is split, and the plan of each."""

    halves: Halves
    cut: int
    plans: tuple[AttentionPlan, AttentionPlan]

    @staticmethod
    def of(halves: Halves, size: int) -> CapturedHalves | None:
        """Return the micro-batches of decodes with `size` rows; None if these run whole."""
        cut = halves.terms.of_decode(size)
        if not cut:
            return None
        first, second = halves.backends
        plans = first.capture_plan(Bucket(cut, cut)), second.capture_plan(Bucket(size - cut, size - cut))
        return CapturedHalves(halves, cut, plans)

    def refresh(self, batch: ForwardBatch) -> None:
        """Update both plans for a captured batch before a replay.

        Raises TypeError for a backend with graph updates: a graph takes one.
        """
        parts = self.halves.parts(batch, self.cut)
        backend: Any
        for backend, plan, part in zip(self.halves.backends, self.plans, parts, strict=True):
            if backend.refresh(plan, part) is not None:
                raise TypeError(
                    f"{type(backend).__name__} updates captured graphs, which cannot hold two micro-batches"
                )

    def forward(self, model: Model, context: ForwardContext, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, H] of the captured batch. Runs inside the capture.

        The number of real rows of each micro-batch is computed on the device.
        """
        parts = self.halves.parts(batch, self.cut)
        for part, plan in zip(parts, self.plans, strict=True):
            part.mark_forward_metadata_ready(plan)
        return self.halves.forward(model, context, parts)
