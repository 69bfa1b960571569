"""Breakable graphs: prompts as captured segments with attention run eagerly between them; decode as full graphs."""

from __future__ import annotations

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.graphs.backend import Forward
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.pieces import Pieces, record_pieces


class BreakableGraphs(FullGraphs):
    """Full decode graphs, and prompts in segments, over one pool. `prompt_kind` is how paths name those."""

    prompt_kind: str = "breakable"

    def capture_prompt(self, forward: Forward, batch: ForwardBatch) -> Pieces:
        """Capture the forward as it is."""
        return record_pieces(self.recorder, lambda: forward(batch))
