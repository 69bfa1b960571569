"""Breakable graphs: prefill as captured segments with eager attention in between.

The same backend captures decode steps, as full graphs.
"""

from __future__ import annotations

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.graph_backend import Forward
from sglcore.runtime.graphs.graph_segments import Pieces, record_pieces


class BreakableGraphs(FullGraphs):
    """A `PromptBackend`: full decode graphs and segmented prefill graphs in one pool.

    `prompt_kind` is the name of the latter in `StepOutput.path`.
    """

    prompt_kind: str = "breakable"

    def capture_prompt(self, forward: Forward, batch: ForwardBatch) -> Pieces:
        """Implements `PromptBackend.capture_prompt`, without compiling the forward."""
        return record_pieces(self.recorder, lambda: forward(batch))
