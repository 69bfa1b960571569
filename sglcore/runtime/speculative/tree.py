"""Trees of proposals: how beams grow one, which of it is kept, and which path of it is right (EAGLE-2, arXiv 2406.16858).

A tree of N nodes has its root, the last token drawn, as node 0; parents come before their children, and children of a node are
different tokens. Node n lies in the cell n behind the root's, whatever its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sglcore.runtime.speculative.drafter import NONE

MOST_NODES = 32
"""Of a tree, and cells that beams may use: the bits of a word."""


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


class Beams(NamedTuple):
    """Of one depth, [R, w] each: tokens int32, the logarithm float32 of how likely each is to be reached and right, the beam int64
    from which each grew, and the number of its record."""

    tokens: Tensor
    scores: Tensor
    origins: Tensor
    records: Tensor


class Records(NamedTuple):
    """Tokens of one depth that may be kept, [R, M] each: int32; float32 as in `Beams`; and the record of each one's parent, int32, -1 for
    the root."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor


class CellBits:
    """A bit for each of so many cells behind the known ones, int32[cells], and the words of rows that have these."""

    def __init__(self, cells: int, device: torch.device) -> None:
        places = torch.arange(cells, dtype=torch.int64)
        self.places, self.own, self._before = (
            each.to(torch.int32).to(device) for each in (places, 1 << places, (1 << (31 - places)) - 1)
        )

    def words(self, seen: Tensor, cells: slice = slice(None)) -> Tensor:
        """As `ForwardInputs.visible` has them, for rows in these cells which see the cells of bits `seen` int32[R, n], and all known
        ones: a row's own bit becomes the highest."""
        return (seen << (31 - self.places[cells])).bitwise_or_(self._before[cells])


class TreeTables:
    """What a step knows of the nodes of each slot, `held` int32[4, slots, N]: `parents`; `shifts`, depth less number; `ancestors`, a bit
    for each node on the way from the root, itself among them; `words`, the same as `ForwardInputs.visible`."""

    def __init__(self, slots: int, nodes: int, device: torch.device) -> None:
        self.held = torch.zeros(4, slots, nodes, dtype=torch.int32, device=device)
        self._bits = CellBits(nodes, device)
        chain = self.of_trees(torch.arange(nodes - 1, dtype=torch.int32, device=device)[None], None, nodes - 1)
        self.held.copy_(chain.expand(4, slots, nodes))

    def of_trees(self, parents: Tensor, depths: Tensor | None, deepest: int) -> Tensor:
        """int32[4, R, N] for trees of these parents and depths int32[R, N - 1] (None: chains)."""
        before = torch.nn.functional.pad(parents, (1, 0))
        bits = self._bits
        behind = bits.places if depths is None else torch.nn.functional.pad(depths, (1, 0))
        upwards, ancestors = before.long(), bits.own.expand_as(before)
        for _ in range(deepest):
            ancestors = ancestors.gather(1, upwards).bitwise_or_(bits.own)
        return torch.stack([before, (behind - bits.places).expand_as(before), ancestors, bits.words(ancestors)])

    def put(self, slots: Tensor, tree: DraftTree, deepest: int) -> None:
        """Remember the trees of slots int32[R]."""
        self.held[:, slots] = self.of_trees(tree.parents, tree.depths, deepest)

    def of_slots(self, slots: Tensor) -> Tensor:
        """int32[4, R, N]: parents, shifts, ancestors and words."""
        return self.held.index_select(1, slots)


def recorded(tokens: Tensor, scores: Tensor, before: Beams | None) -> Records:
    """What comes of one depth: tokens int32[R, b, w] and scores float32[R, b, w] are each beam's leaders; of the first depth b = 1
    and `before` is None."""
    found = tokens.flatten(1)
    if before is None:
        return Records(found, scores.flatten(1), torch.full_like(found, -1))
    parents = before.records.repeat_interleave(tokens.shape[2], 1)
    return Records(found, (before.scores[:, :, None] + scores).flatten(1), parents)


def tree_expand(records: Records, width: int, first: int) -> Beams:
    """The `width` likeliest of a depth, whose records have numbers from `first` on; equal scores go by their order."""
    scores, chosen = (part[:, :width] for part in records.scores.sort(dim=1, descending=True, stable=True))
    return Beams(records.tokens.gather(1, chosen), scores, chosen // width, (chosen + first).to(torch.int32))


def tree_build(records: Sequence[Records], depths: Tensor, nodes: int) -> DraftTree:
    """The N - 1 likeliest of the records of all depths, `depths` int32[M] of those of a request: those with the highest score, equal ones by their order, so that no
    node is without its parent: no child scores more, and every one comes later. What has no score at all is no token."""
    tokens, scores, parents = (torch.cat(parts, 1) for parts in zip(*records, strict=True))
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1]
    chosen = best.sort(1).values
    kept = tokens.gather(1, chosen).masked_fill_(scores.gather(1, chosen) == -torch.inf, NONE)
    places = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.int32, device=tokens.device)
    numbers = torch.arange(1, nodes, dtype=torch.int32, device=tokens.device).expand_as(chosen)
    places.scatter_(1, chosen + 1, numbers)
    own = parents.gather(1, chosen).long()
    return DraftTree(kept, places.gather(1, own + 1), depths[chosen])
