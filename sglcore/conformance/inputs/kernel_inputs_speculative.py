"""Test inputs for the entries of verification, as in `kernel_inputs.py`.

Their draft tokens are often accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sglcore.conformance.inputs.kernel_inputs import Draw, Inputs

SLOTS, MOST, LONGEST = 40, 6, 60
FEW_TOKENS = 3
RIGHT_OF_FOUR = 3
"""Draft tokens in four that equal the sampled token, so that several in a row are accepted."""


def _tables(drawn: Draw, requests: int, width: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield, once, (last, lengths, proposals, slots, limits) for `requests` requests with `width`
    tokens each; limits lie before the root (the last token), within the run and after it."""
    slots = (drawn.permutation(SLOTS - 1)[:requests] + 1).to(torch.int32)
    lengths = drawn.ints(0, LONGEST, SLOTS)
    limits = lengths[slots.long()] + drawn.ints(-1, width + 2, requests)
    yield drawn.ints(0, FEW_TOKENS, SLOTS), lengths, drawn.ints(-1, FEW_TOKENS, SLOTS, MOST), slots, limits


def place_proposals(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.place_proposals`, for `tokens` requests drawn from
    `drawn`: runs of one token, of several tokens, and of the largest number of tokens. `strided`
    has no effect."""
    for width in (1, 4, MOST + 1):
        for tables in _tables(drawn, tokens, width):
            for nodes in (None, drawn.ints(1, width + 1, tokens)):
                yield (
                    *tables,
                    nodes,
                    *(torch.full((tokens * width,), -7, dtype=torch.int32, device="cpu") for _ in range(4)),
                )


def accept_proposals(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.accept_proposals`, for `tokens` requests drawn from
    `drawn`, as `place_proposals` leaves them. `strided` has no effect."""
    for width in (1, 4, MOST + 1):
        for last, lengths, proposals, slots, limits in _tables(drawn, tokens, width):
            steps = torch.arange(width, dtype=torch.int32)
            usable = lengths[slots.long()][:, None] + steps < limits[:, None]
            owners = (slots[:, None] * usable).reshape(-1)
            found = drawn.ints(0, FEW_TOKENS, tokens, width)
            is_right = drawn.ints(0, 4, tokens, width - 1) < RIGHT_OF_FOUR
            found[:, :-1] = torch.where(is_right, proposals[slots.long()][:, : width - 1].clamp(min=0), found[:, :-1])
            runs = torch.full((4, tokens), -7, dtype=torch.int32, device="cpu")
            yield found.reshape(-1), owners, slots, limits, last, lengths, proposals, runs


def tree_walk(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.tree_walk`, for `tokens` requests drawn from
    `drawn`: random trees; siblings are different tokens; a node in four is absent or has no KV
    slot. `strided` has no effect."""
    for width in (1, 4, MOST + 1):
        for last, lengths, _, slots, limits in _tables(drawn, tokens, width):
            trees, proposals = _trees(drawn)
            steps = torch.arange(width, dtype=torch.int32)
            usable = lengths[slots.long()][:, None] + steps < limits[:, None]
            owners = (slots[:, None] * usable).reshape(-1)
            found = _drawn_of(drawn, trees[0][slots.long()], proposals[slots.long()], width)
            path = torch.full((tokens, width), -7, dtype=torch.int32, device="cpu")
            runs = torch.full((4, tokens), -7, dtype=torch.int32, device="cpu")
            yield found, owners, slots, limits, trees, last, lengths, proposals, path, runs


def _trees(drawn: Draw) -> tuple[Tensor, Tensor]:
    """Return trees int32[4, SLOTS, MOST + 1] (parents, shifts, ancestors, words) and their draft
    tokens int32[SLOTS, MOST]."""
    trees = torch.zeros(4, SLOTS, MOST + 1, dtype=torch.int32, device="cpu")
    trees[2, :, 0] = 1
    proposals = torch.zeros(SLOTS, MOST, dtype=torch.int32, device="cpu")
    slots = torch.arange(SLOTS)
    for node in range(1, MOST + 1):
        parents = drawn.ints(0, node, SLOTS).long()
        trees[0, :, node] = parents.to(torch.int32)
        depths = trees[1, slots, parents] + parents.to(torch.int32) + 1
        trees[1, :, node] = depths - node
        trees[2, :, node] = trees[2, slots, parents] | (1 << node)
        known = drawn.ints(0, 4, SLOTS) < RIGHT_OF_FOUR
        proposals[:, node - 1] = torch.where(known, node + MOST * drawn.ints(0, 2, SLOTS), -1)
    return trees, proposals


def _drawn_of(drawn: Draw, parents: Tensor, proposals: Tensor, width: int) -> Tensor:
    """Return the drawn tokens int32 [B * width] of trees with parents [B, nodes] and draft tokens
    `proposals`: after most nodes with children, the token of one child."""
    found = torch.zeros(len(parents), width, dtype=torch.int32, device="cpu")
    for node in range(1, width):
        is_drawn = (drawn.ints(0, 4, len(parents)) < RIGHT_OF_FOUR) & (proposals[:, node - 1] >= 0)
        own = parents[:, node].long()[:, None]
        found.scatter_(1, own, torch.where(is_drawn[:, None], proposals[:, node - 1 : node], found.gather(1, own)))
    return found.reshape(-1)


SHAPES = ((1, 2, 3), (3, 4, 8), (4, 3, 32))
"""(beams, depth, nodes) of trees."""


def _leaders(drawn: Draw, *sizes: int) -> tuple[Tensor, Tensor]:
    """Return random tokens int32 and scores float32 of the shape `sizes`, as columns of wider
    tensors; many scores are equal, some are -inf."""
    scores = -drawn.ints(0, 4, *sizes[:-1], sizes[-1] + 2).float()
    scores[drawn.ints(0, 6, *scores.shape) == 0] = -torch.inf
    return drawn.ints(0, LONGEST, *scores.shape)[..., : sizes[-1]], scores[..., : sizes[-1]]


def tree_expand(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.tree_expand`, for `tokens` requests drawn from
    `drawn`: the first depth after the root, and a depth after beams; a few beams have no chance
    (-inf). `strided` has no effect."""
    for width, depth, _ in SHAPES:
        records, sums, _ = _records(drawn, tokens, width, depth)
        for first, count in ((0, 1), (width, width)):
            given = _leaders(drawn, tokens * count, width)
            before = (None, None)
            if first:
                chances = -drawn.ints(0, 4, tokens, width).float()
                chances[drawn.ints(0, 6, *chances.shape) == 0] = -torch.inf
                before = drawn.ints(0, width, tokens, width), chances
            beams = torch.full((3, tokens, width), -7, dtype=torch.int32, device="cpu")
            reached = torch.full((tokens, width), -7.0, device="cpu")
            yield *given, *before, first, records.clone(), sums.clone(), beams, reached


def tree_build(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.tree_build`, for `tokens` requests drawn from
    `drawn`: records as the expansion of beams leaves them. `strided` has no effect."""
    for width, depth, nodes in SHAPES:
        records, sums, depths = _records(drawn, tokens, width, depth)
        yield records, sums, depths, torch.full((3, tokens, nodes - 1), -7, dtype=torch.int32, device="cpu")


def _records(drawn: Draw, requests: int, width: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return int32 [2, R, M] (tokens, parents), float32 [R, M] (sums of scores) and int32 [M]
    (depths) of trees of any form for R = `requests`, with `width` records of depth 1 and width^2 of
    each later depth: a record's parent is any record of the depth before."""
    numbers, sums, depths = list[Tensor](), list[Tensor](), list[int]()
    for at in range(depth):
        count = width if not at else width**2
        tokens, scores = _leaders(drawn, requests, count)
        parents = torch.full((requests, count), -1, dtype=torch.int32, device="cpu")
        if at:
            own = drawn.ints(0, sums[-1].shape[1], requests, count)
            scores = scores + sums[-1].gather(1, own.long())
            parents = own + (len(depths) - sums[-1].shape[1])
        numbers.append(torch.stack([tokens, parents]))
        sums.append(scores)
        depths += [at + 1] * count
    return torch.cat(numbers, 2), torch.cat(sums, 1).contiguous(), torch.tensor(depths, dtype=torch.int32)


def tree_place(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.tree_place`, for `tokens` requests drawn from
    `drawn`: trees of any form, and chains. `strided` has no effect."""
    slots = (drawn.permutation(SLOTS - 1)[:tokens] + 1).to(torch.int32)
    trees, proposals = _trees(drawn)
    own = trees[:, slots.long(), 1:]
    depths = own[1] + torch.arange(1, MOST + 1, dtype=torch.int32)
    chain = torch.arange(MOST + 2, dtype=torch.int32).repeat(tokens, 1)[:, :MOST]
    for parents, behind in ((own[0], depths), (chain, chain + 1)):
        held = torch.full((4, SLOTS, MOST + 1), -7, dtype=torch.int32, device="cpu")
        wide = drawn.ints(-1, FEW_TOKENS, tokens, MOST + 3)
        yield wide[:, :MOST], parents, behind, slots, held, proposals.clone()
