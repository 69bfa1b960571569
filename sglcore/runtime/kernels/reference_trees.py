"""The reference of the entries for draft trees."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_expand(
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor | None,
    chances: Tensor | None,
    first: int,
    records: Tensor,
    sums: Tensor,
    beams: Tensor,
    reached: Tensor,
) -> None:
    """Reference of `KernelTable.tree_expand`: write the candidates of one depth, `tokens` and their
    scores plus the beams' `chances`, to `records` int32 [2, B, M] (token, parent record in
    `parents`; -1: the root) and `sums` from number `first` on, and the w with the largest sums to
    `beams` int32 [3, B, w] (token, beam it grew from, record) and their sums to `reached`.
    """
    count, width = reached.shape
    if not count:
        return
    place = slice(first, first + tokens.numel() // count)
    found, made = records[:, :, place], sums[:, place]
    found[0] = tokens.reshape(count, -1)
    made.copy_(scores.reshape(count, -1))
    if parents is None or chances is None:
        found[1] = -1
    else:
        found[1] = parents.repeat_interleave(width, 1)
        made += chances.repeat_interleave(width, 1)
    best, chosen = (part[:, :width] for part in made.sort(dim=1, descending=True, stable=True))
    beams[0] = found[0].gather(1, chosen)
    beams[1] = chosen // width
    beams[2] = chosen + first
    reached.copy_(best)


def tree_build(records: Tensor, sums: Tensor, depths: Tensor, tree: Tensor) -> None:
    """Reference of `KernelTable.tree_build`: write the N - 1 records (those of `tree_expand`, with
    `depths` int32 [M]) with the largest sums, in record order, as nodes 1 and on to `tree` int32
    [3, B, N - 1]: token (-1: its sum is -inf), parent node (0: the root), depth.
    """
    count, nodes = tree.shape[1:]
    best = sums.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    chosen = best.sort(1).values
    tree[0] = records[0].gather(1, chosen).masked_fill_(sums.gather(1, chosen) == -torch.inf, -1)
    places = torch.zeros(count, sums.shape[1] + 1, dtype=torch.int32, device=sums.device)
    numbers = torch.arange(1, nodes + 1, dtype=torch.int32, device=sums.device).expand_as(chosen)
    places.scatter_(1, chosen + 1, numbers)
    tree[1] = places.gather(1, records[1].gather(1, chosen).long() + 1)
    tree[2] = depths[chosen]


def tree_place(
    tokens: Tensor, parents: Tensor, depths: Tensor, slots: Tensor, trees: Tensor, proposals: Tensor
) -> None:
    """Reference of `KernelTable.tree_place`: store trees (int32 [B, N - 1] each) at their request
    slots: tokens in `proposals`, and in `trees` int32 [4, S, N] each node's parent, depth minus
    number, ancestors' bits, and visibility word.
    """
    nodes = trees.shape[2]
    before, behind = (torch.nn.functional.pad(each, (1, 0)) for each in (parents, depths))
    places = torch.arange(nodes, dtype=torch.int64, device=slots.device)
    upwards, ancestors = before.long(), (1 << places).expand_as(before)
    for _ in range((nodes - 1).bit_length()):
        ancestors = ancestors | ancestors.gather(1, upwards)
        upwards = upwards.gather(1, upwards)
    # The cast to int32 drops the upper half.
    above = 31 - places
    words = ancestors << above | (1 << above) - 1
    made = before, behind - places, ancestors, words
    trees[:, slots] = torch.stack([each.to(torch.int32) for each in made])
    proposals[slots] = tokens
