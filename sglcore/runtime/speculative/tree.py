"""Draft trees: how beams grow a tree, which nodes are kept, and which path is accepted.

EAGLE-2, arXiv 2406.16858. A tree of N nodes has the root, the last sampled token, as node 0.
Parents come before their children; the children of a node are different tokens. Node n has the KV
slot n places after the root's, whatever its depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.speculative.drafter import NONE
from sglcore.step.tree_shapes import TreeShape


def depths_of_records(shape: TreeShape, device: torch.device | str) -> Tensor:
    """Return `TreeShape.depths_of_records`, int32[M], on a device."""
    return torch.from_numpy(shape.depths_of_records()).to(device)


class DraftTree(NamedTuple):
    """Trees of R requests, int32[R, N - 1] each, without their roots.

    The tokens of the nodes (NONE: no node), the numbers of their parents, and their depths, 1 or
    more.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor


def chained(tokens: Tensor, most: int) -> DraftTree:
    """Return the trees, int32[R, most] each, in which tokens int32[R, k] follow one another; nodes
    after the k-th have no token (NONE).
    """
    whole = torch.nn.functional.pad(tokens, (0, most - tokens.shape[1]), value=NONE)
    parents = torch.arange(most, dtype=torch.int32, device=tokens.device).repeat(len(whole), 1)
    return DraftTree(whole, parents, parents + 1)


class Beams(NamedTuple):
    """The beams of one depth: tokens, the beam each grew from, and its record number.

    int32[R, w] each.
    """

    tokens: Tensor
    origins: Tensor
    records: Tensor


class TreeRecords:
    """The candidates that beams of R requests find, by depth, and the trees made from them."""

    def __init__(self, requests: int, shape: TreeShape, depths: Tensor, kernels: KernelTable) -> None:
        """`depths` is the result of `depths_of_records`."""
        self._kernels, self._shape, self._depths = kernels, shape, depths
        self._sizes = requests, shape.width
        most, device = depths.shape[0], depths.device
        self.numbers = torch.empty(2, requests, most, dtype=torch.int32, device=device)
        self.sums = torch.empty(requests, most, device=device)
        self._depth, self._beams, self._reached = 0, None, None

    def expand(self, tokens: Tensor, scores: Tensor) -> Beams:
        """Record the candidates of one depth and return the beams that continue.

        `tokens` int32[R * b, w] are the leading candidates after each beam; `scores` float32[R * b,
        w] are the logarithms of their estimated acceptance probabilities, given that the beam is
        accepted.
        """
        first, device = sum(self._shape.records[: self._depth]), tokens.device
        made = torch.empty(3, *self._sizes, dtype=torch.int32, device=device)
        reached, parents = torch.empty(self._sizes, device=device), None if self._beams is None else self._beams.records
        kept = first, self.numbers, self.sums, made, reached
        self._kernels.tree_expand(tokens, scores, parents, self._reached, *kept)
        self._depth, self._beams, self._reached = self._depth + 1, Beams(*made.unbind(0)), reached
        return self._beams

    def build(self) -> DraftTree:
        """Return the trees made from the candidates of all depths: for each request the `nodes` - 1
        that are likeliest to be accepted, in the order of their records. Call after the last
        `expand`.
        """
        tree = self.numbers.new_empty(3, self._sizes[0], self._shape.nodes - 1)
        self._kernels.tree_build(self.numbers, self.sums, self._depths, tree)
        return DraftTree(*tree.unbind(0))


class CellBits:
    """One bit for each of at most 32 KV slots after those of the text, and visibility words made
    from such bits.

    `own` int32[cells] has bit i set for slot i, and `places` int32[cells] is i. `words` moves a set
    of such bits to the form of `ForwardInputs.visible`, in which the row's own bit is the highest.
    """

    def __init__(self, cells: int, device: torch.device) -> None:
        places = torch.arange(cells, dtype=torch.int64)
        self.places, self.own, self._before = (
            each.to(torch.int32).to(device) for each in (places, 1 << places, (1 << (31 - places)) - 1)
        )

    def words(self, seen: Tensor, cells: slice) -> Tensor:
        """Return `ForwardInputs.visible` for rows in `cells`, a slice of the KV slots after those
        of the text.

        The rows see the KV slots of bits `seen` int32[R, n] and all KV slots of the text. The row's
        own bit becomes the highest bit of its word. The bits below that of slot 0 stand for the
        last KV slots of the text and are all set.
        """
        return (seen << (31 - self.places[cells])).bitwise_or_(self._before[cells])


class TreeTables:
    """Tables with the draft tree of every slot, `held` int32[4, slots, N], that a verification
    reads.

    `parents`; `shifts`, depth minus node number; `ancestors`, a bit for each node on the path from
    the root, the node included; `words`, the same as `ForwardInputs.visible`.
    """

    def __init__(self, slots: int, nodes: int, device: torch.device, kernels: KernelTable) -> None:
        self.held = torch.zeros(4, slots, nodes, dtype=torch.int32, device=device)
        self._kernels = kernels
        nothing = torch.full((slots, nodes - 1), NONE, dtype=torch.int32, device=device)
        every = torch.arange(slots, dtype=torch.int32, device=device)
        self.put(every, chained(nothing, nodes - 1), nothing.clone())

    def put(self, slots: Tensor, tree: DraftTree, proposals: Tensor) -> None:
        """Store the trees of slots int32[R], and their tokens in `proposals`.

        `proposals` is int32[slots, N - 1].
        """
        self._kernels.tree_place(*tree, slots, self.held, proposals)

    def of_slots(self, slots: Tensor) -> Tensor:
        """Return int32[4, R, N]: parents, shifts, ancestors and words."""
        return self.held.index_select(1, slots)
