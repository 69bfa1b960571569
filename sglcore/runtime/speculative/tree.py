"""Trees of proposals: how beams grow one, which of it is kept, and which path of it is right (EAGLE-2, arXiv 2406.16858).

A tree of N nodes has its root, the last token drawn, as node 0; parents come before their children, and children of a node are
different tokens. Node n lies in the cell n behind the root's, whatever its depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.speculative.drafter import NONE

MOST_NODES = 32
"""Of a tree, and cells that beams may use: the bits of a word."""
MOST_RECORDS = 2048
"""Tokens of which a tree is chosen: what one program of a kernel holds."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Of each request `width` beams that grow to `depth` tokens, of which `nodes` - 1 are proposed beside the root."""

    width: int
    depth: int
    nodes: int

    @property
    def steps(self) -> int:
        """Tokens that a step brings at most."""
        return self.depth + 1

    @property
    def cells(self) -> int:
        """Cells behind the known ones that beams write."""
        return self.width * (self.depth - 1)

    @property
    def records(self) -> tuple[int, ...]:
        """Tokens that may be kept, of each depth."""
        return self.width, *[self.width**2] * (self.depth - 1)

    def depths_of_records(self, device: torch.device | str) -> Tensor:
        """int32[M]: how deep each of them is."""
        depths = torch.arange(1, self.depth + 1, dtype=torch.int32)
        return depths.repeat_interleave(torch.tensor(self.records)).to(device)


class DraftTree(NamedTuple):
    """Trees of R requests, int32[R, N - 1] each: the tokens of the nodes behind the root, NONE where there is none; the number of
    each one's parent; and how deep it is, 1 or more."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor


def chained(tokens: Tensor, most: int) -> DraftTree:
    """The tree int32[R, most] whose nodes follow one another, of tokens int32[R, k]."""
    whole = torch.nn.functional.pad(tokens, (0, most - tokens.shape[1]), value=NONE)
    parents = torch.arange(most, dtype=torch.int32, device=tokens.device).repeat(len(whole), 1)
    return DraftTree(whole, parents, parents + 1)


class Beams(NamedTuple):
    """Of one depth, int32[R, w] each: tokens, the beam from which each grew, and the number of its record."""

    tokens: Tensor
    origins: Tensor
    records: Tensor


class TreeRecords:
    """What beams of R requests find, depth by depth, and the trees that are kept of it."""

    def __init__(self, requests: int, shape: TreeShape, depths: Tensor, kernels: KernelTable) -> None:
        """`depths` as of `TreeShape.depths_of_records`."""
        self._kernels, self._shape, self._depths = kernels, shape, depths
        self._sizes = requests, shape.width
        most, device = depths.shape[0], depths.device
        self.numbers = torch.empty(2, requests, most, dtype=torch.int32, device=device)
        self.sums = torch.empty(requests, most, device=device)
        self._depth, self._beams, self._reached = 0, None, None

    def expand(self, tokens: Tensor, scores: Tensor) -> Beams:
        """The beams that go on from one depth, whose leaders after each beam are tokens int32[R * b, w] with scores float32[R * b, w], the
        logarithms of how likely each is to be right after what it follows."""
        first, device = sum(self._shape.records[: self._depth]), tokens.device
        made = torch.empty(3, *self._sizes, dtype=torch.int32, device=device)
        reached, parents = torch.empty(self._sizes, device=device), None if self._beams is None else self._beams.records
        kept = first, self.numbers, self.sums, made, reached
        self._kernels.tree_expand(tokens, scores, parents, self._reached, *kept)
        self._depth, self._beams, self._reached = self._depth + 1, Beams(*made.unbind(0)), reached
        return self._beams

    def build(self) -> DraftTree:
        """The trees of what all depths found."""
        tree = self.numbers.new_empty(3, self._sizes[0], self._shape.nodes - 1)
        self._kernels.tree_build(self.numbers, self.sums, self._depths, tree)
        return DraftTree(*tree.unbind(0))


class CellBits:
    """A bit for each of so many cells behind the known ones, int32[cells], and the words of rows that have these."""

    def __init__(self, cells: int, device: torch.device) -> None:
        places = torch.arange(cells, dtype=torch.int64)
        self.places, self.own, self._before = (
            each.to(torch.int32).to(device) for each in (places, 1 << places, (1 << (31 - places)) - 1)
        )

    def words(self, seen: Tensor, cells: slice) -> Tensor:
        """As `ForwardInputs.visible` has them, for rows in these cells which see the cells of bits `seen` int32[R, n], and all known
        ones: a row's own bit becomes the highest."""
        return (seen << (31 - self.places[cells])).bitwise_or_(self._before[cells])


class TreeTables:
    """What a step knows of the nodes of each slot, `held` int32[4, slots, N]: `parents`; `shifts`, depth less number; `ancestors`, a bit
    for each node on the way from the root, itself among them; `words`, the same as `ForwardInputs.visible`."""

    def __init__(self, slots: int, nodes: int, device: torch.device, kernels: KernelTable) -> None:
        self.held = torch.zeros(4, slots, nodes, dtype=torch.int32, device=device)
        self._kernels = kernels
        nothing = torch.full((slots, nodes - 1), NONE, dtype=torch.int32, device=device)
        every = torch.arange(slots, dtype=torch.int32, device=device)
        self.put(every, chained(nothing, nodes - 1), nothing.clone())

    def put(self, slots: Tensor, tree: DraftTree, proposals: Tensor) -> None:
        """Remember the trees of slots int32[R], and their tokens as the slots' proposals int32[slots, N - 1]."""
        self._kernels.tree_place(*tree, slots, self.held, proposals)

    def of_slots(self, slots: Tensor) -> Tensor:
        """int32[4, R, N]: parents, shifts, ancestors and words."""
        return self.held.index_select(1, slots)
