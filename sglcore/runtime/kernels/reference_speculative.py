"""The reference of the entries for steps that verify draft tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def place_proposals(
    last: Tensor,
    lengths: Tensor,
    proposals: Tensor,
    slots: Tensor,
    limits: Tensor,
    nodes: Tensor | None,
    ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    owners: Tensor,
) -> None:
    """Reference of `KernelTable.place_proposals`: write `ids`, `positions`, `seq_lens` and `owners`
    int32 [B * N] of B requests' roots and N - 1 draft tokens, from the tables by slot `last`,
    `lengths` and `proposals`.

    Token n of a request has position `lengths` + n. At or past the request's limit, or its `nodes`,
    it gets position 0 and owner slot 0. An absent draft token (-1) gets id 0.
    """
    if not slots.numel():
        return
    shape = slots.numel(), ids.numel() // slots.numel()
    steps = torch.arange(shape[1], dtype=torch.int32, device=slots.device)
    places = lengths.index_select(0, slots)[:, None] + steps
    usable = places < limits[:, None]
    if nodes is not None:
        usable &= steps < nodes[:, None]
    positions.view(shape).copy_(places.mul_(usable))
    seq_lens.view(shape).copy_(places + 1)
    owners.view(shape).copy_(slots[:, None] * usable)
    ids.view(shape)[:, 0] = last.index_select(0, slots)
    ids.view(shape)[:, 1:] = proposals.index_select(0, slots)[:, : shape[1] - 1].clamp(min=0)


def accept_proposals(
    drawn: Tensor,
    owners: Tensor,
    slots: Tensor,
    limits: Tensor,
    last: Tensor,
    lengths: Tensor,
    proposals: Tensor,
    runs: Tensor,
) -> None:
    """Reference of `KernelTable.accept_proposals`: count the accepted draft tokens of each request,
    those equal to the tokens `drawn` int32 [B * N] in their places, up to the first difference or
    token that is not verified (its slot in `owners` is 0); update the tables by slot `last` and
    `lengths` for the next step.

    Writes `runs` int32 [4, B]: accepted, verified, row of the last accepted token (the root if
    none), new length (accepted + 1 more, at most the limit).
    """
    if not slots.numel():
        return
    shape = slots.numel(), drawn.numel() // slots.numel()
    usable = owners.view(shape)[:, 1:] != 0
    proposed, before = proposals.index_select(0, slots)[:, : shape[1] - 1], lengths.index_select(0, slots)
    is_right = (drawn.view(shape)[:, :-1] == proposed) & usable
    accepted = is_right.to(torch.int32).cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
    rows = torch.arange(0, drawn.numel(), shape[1], dtype=torch.int32, device=slots.device)
    runs[0] = accepted
    runs[1] = ((proposed >= 0) & usable).sum(1, dtype=torch.int32)
    runs[2] = rows + accepted
    runs[3] = torch.minimum(before + accepted + 1, torch.maximum(limits, before))
    lengths[slots] = runs[3]
    last[slots] = drawn.index_select(0, runs[2])


def tree_walk(
    drawn: Tensor,
    owners: Tensor,
    slots: Tensor,
    limits: Tensor,
    trees: Tensor,
    last: Tensor,
    lengths: Tensor,
    proposals: Tensor,
    path: Tensor,
    runs: Tensor,
) -> None:
    """Reference of `KernelTable.tree_walk`: find the accepted path of each request's tree, of nodes
    equal to the tokens `drawn` after their parents; update the tables by slot `last` and `lengths`.

    `trees` are as `tree_place` stores them. Writes the path's nodes, root first, to `path` int32
    [B, steps] (later entries: their own index), and to `runs` int32 [4, B]: the number of the
    path's draft tokens, of verified ones, the index of the last node among the B * steps entries of
    `path`, and the new length.
    """
    if not slots.numel():
        return
    shape, steps = (slots.numel(), drawn.numel() // slots.numel()), path.shape[1]
    parents, shifts, ancestors = trees.index_select(1, slots)[:3, :, : shape[1]].unbind(0)
    proposed, before = proposals.index_select(0, slots)[:, : shape[1] - 1], lengths.index_select(0, slots)
    found, usable = drawn.view(shape), owners.view(shape) != 0
    nodes = torch.arange(shape[1], dtype=torch.int32, device=slots.device)
    is_right = usable[:, 1:] & (proposed == found.gather(1, parents[:, 1:].long()))
    # A node is accepted if no node on the path to it is rejected.
    wrong = torch.where(is_right, 0, (1 << nodes)[1:]).sum(1, dtype=torch.int32)
    taken = (ancestors & wrong[:, None]) == 0
    depths = torch.where(taken, shifts + nodes, steps)
    accepted = torch.where(taken, depths, 0).amax(1)
    whole = torch.arange(steps + 1, dtype=torch.int32, device=slots.device).repeat(shape[0], 1)
    path.copy_(whole.scatter_(1, depths.long(), nodes.expand_as(depths))[:, :steps])
    runs[0] = accepted
    runs[1] = ((proposed >= 0) & usable[:, 1:]).sum(1, dtype=torch.int32)
    runs[2] = torch.arange(0, shape[0] * steps, steps, dtype=torch.int32, device=slots.device) + accepted
    runs[3] = torch.minimum(before + accepted + 1, torch.maximum(limits, before))
    lengths[slots] = runs[3]
    last[slots] = found.gather(1, path.gather(1, accepted[:, None].long()).long())[:, 0]
