"""Planted defects in the dispatch of rows to experts, which tests must catch. Every rank imports
this module, so it imports little."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.layers.parallel.dispatched_experts import DispatchedMoe
from sglcore.runtime.parallel.expert_dispatch import FixedDispatcher, RaggedDispatcher
from sglcore.runtime.parallel.expert_placement import Placement
from sglcore.runtime.parallel.row_distribution import RowMoves


def pads_reach_the_router() -> None:
    """Padding rows are routed."""
    changed, own = RowMoves, RowMoves.own_part

    def own_part(self: RowMoves, x: Tensor) -> Tensor:
        part = own(self, x)
        return torch.cat([part, x.new_zeros(self._part_size() - len(part), *x.shape[1:])])

    changed.own_part = own_part


def shifted_places() -> None:
    """A row goes to the expert after the chosen one."""
    own = Placement.places_for
    changed: Any = Placement
    changed.places_for = lambda self, rank: np.roll(own(self, rank), 1)


def another_order() -> None:
    """Returned rows are placed as if all had been sent in the chosen order."""
    own = RaggedDispatcher.launch_combine

    def combine(self: Any, made: Tensor, sent: Any) -> Any:
        sent.order = sent.order.sort().values
        return own(self, made, sent)

    changed: Any = RaggedDispatcher
    changed.launch_combine = combine


def twice_weighed() -> None:
    """Halves the experts' outputs, as if router weights were also applied on the expert's side."""
    own = DispatchedMoe._run
    changed: Any = DispatchedMoe
    changed._run = lambda self, rows, experts: own(self, rows, experts) * 0.5


def drops_silently() -> None:
    """Rows beyond `max_rows` are dropped."""
    own = FixedDispatcher.launch_dispatch

    def dispatch(self: Any, rows: Tensor, places: Tensor) -> Any:
        places = places.clone()
        places[self.max_rows :] = -1
        kept, self.max_rows = self.max_rows, max(len(rows), self.max_rows)
        return own(self, rows, places) if kept else None

    changed: Any = FixedDispatcher
    changed.launch_dispatch = dispatch
