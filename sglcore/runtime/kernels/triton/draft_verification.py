"""Kernels that verify draft tokens: they place the tokens of each request, count the accepted ones,
and find the accepted path of a draft tree.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two


@triton.jit
def place_proposals_kernel(
    last,
    lengths,
    proposals,
    slots,
    limits,
    nodes,
    ids,
    positions,
    seq_lens,
    owners,
    width,
    proposals_stride,
    NODES: tl.constexpr,
):
    """Implements `KernelTable.place_proposals`; ids, positions, seq_lens and owners are written.
    `width` = N tokens per request.

    One program per request. Reads at least one int32 and writes four for each token.
    """
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    inside = node < width
    slot = tl.load(slots + row)
    place = tl.load(lengths + slot) + node
    usable = place < tl.load(limits + row)
    if nodes is not None:
        usable = usable & (node < tl.load(nodes + row))
    position = tl.where(usable, place, 0)
    proposed = tl.load(proposals + slot * proposals_stride + node - 1, mask=inside & (node > 0), other=0)
    token = row * width + node
    tl.store(ids + token, tl.where(node > 0, tl.maximum(proposed, 0), tl.load(last + slot)), mask=inside)
    tl.store(positions + token, position, mask=inside)
    tl.store(seq_lens + token, position + 1, mask=inside)
    tl.store(owners + token, tl.where(usable, slot, 0), mask=inside)


@triton.jit
def accept_proposals_kernel(
    drawn,
    owners,
    slots,
    limits,
    last,
    lengths,
    proposals,
    runs,
    requests,
    width,
    proposals_stride,
    NODES: tl.constexpr,
):
    """Implements `KernelTable.accept_proposals`; last, lengths and runs are written. `requests` =
    B, `width` = N tokens per request.

    One program per request. Reads at least three int32 for each token.
    """
    row = tl.program_id(0)
    place = tl.arange(0, NODES)
    inside = place < width - 1
    slot, first = tl.load(slots + row), row * width
    before = tl.load(lengths + slot)
    usable = tl.load(owners + first + 1 + place, mask=inside, other=0) != 0
    proposed = tl.load(proposals + slot * proposals_stride + place, mask=inside, other=-1)
    is_right = usable & (tl.load(drawn + first + place, mask=inside, other=0) == proposed)
    accepted = tl.min(tl.where(is_right, NODES, place), axis=0)
    length = tl.minimum(before + accepted + 1, tl.maximum(tl.load(limits + row), before))
    tl.store(runs + row, accepted)
    tl.store(runs + requests + row, tl.sum((usable & (proposed >= 0)).to(tl.int32), axis=0))
    tl.store(runs + 2 * requests + row, first + accepted)
    tl.store(runs + 3 * requests + row, length)
    tl.store(last + slot, tl.load(drawn + first + accepted))
    # Every warp reads the length before one of them replaces it.
    tl.debug_barrier()
    tl.store(lengths + slot, length)


@triton.jit
def tree_walk_kernel(
    drawn,
    owners,
    slots,
    limits,
    trees,
    last,
    lengths,
    proposals,
    path,
    runs,
    requests,
    width,
    steps,
    table,
    most,
    proposals_stride,
    NODES: tl.constexpr,
):
    """Implements `KernelTable.tree_walk`; last, lengths, path and runs are written. `requests` = B,
    `width` = N, `most` = M, and `table` is the stride of the first axis of `trees`.

    One program per request. Reads at least six int32 for each node.
    """
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    inside, is_node = node < width, (node > 0) & (node < width)
    slot, first = tl.load(slots + row), row * width
    before = tl.load(lengths + slot)
    held = trees + slot * most + node
    parent = tl.load(held, mask=inside, other=0)
    depth = tl.load(held + table, mask=inside, other=0) + node
    ancestors = tl.load(held + 2 * table, mask=inside, other=0)
    usable = tl.load(owners + first + node, mask=inside, other=0) != 0
    proposed = tl.load(proposals + slot * proposals_stride + node - 1, mask=is_node, other=-1)
    is_right = usable & (tl.load(drawn + first + parent, mask=inside, other=0) == proposed)
    wrong = tl.sum(tl.where(is_node & (is_right == 0), 1 << node, 0), axis=0)
    taken = inside & ((ancestors & wrong) == 0)
    accepted = tl.max(tl.where(taken, depth, 0), axis=0)
    end = tl.sum(tl.where(taken & (depth == accepted), node, 0), axis=0)
    place = tl.arange(0, NODES)
    found = taken[None, :] & (depth[None, :] == place[:, None])
    own = tl.sum(tl.where(found, node[None, :], 0), axis=1)
    kept = tl.where(place <= accepted, own, place)
    tl.store(path + row * steps + place, kept, mask=place < steps)
    length = tl.minimum(before + accepted + 1, tl.maximum(tl.load(limits + row), before))
    tl.store(runs + row, accepted)
    tl.store(runs + requests + row, tl.sum((is_node & usable & (proposed >= 0)).to(tl.int32), axis=0))
    tl.store(runs + 2 * requests + row, row * steps + accepted)
    tl.store(runs + 3 * requests + row, length)
    tl.store(last + slot, tl.load(drawn + first + end))
    # Every warp reads the length before one of them replaces it.
    tl.debug_barrier()
    tl.store(lengths + slot, length)


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
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.place_proposals`: write `ids`, `positions`, `seq_lens` and `owners`
    int32 [B * N] of the tokens to verify, from the tables by slot `last`, `lengths` and
    `proposals`. A token at or past the request's limit, or its `nodes`, gets position 0 and owner
    slot 0.

    One compiled kernel serves every number of draft tokens up to that of the table.
    """
    requests = slots.shape[0]
    if not requests:
        return
    place_proposals_kernel[(requests,)](
        last,
        lengths,
        proposals,
        slots,
        limits,
        nodes,
        ids,
        positions,
        seq_lens,
        owners,
        ids.shape[0] // requests,
        proposals.stride(0),
        NODES=power_of_two(proposals.shape[1] + 1),
        **tuning.options(tuning.place_proposals),
    )


def accept_proposals(
    drawn: Tensor,
    owners: Tensor,
    slots: Tensor,
    limits: Tensor,
    last: Tensor,
    lengths: Tensor,
    proposals: Tensor,
    runs: Tensor,
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.accept_proposals`: compare the tokens `drawn` with `proposals`, update
    the tables by slot `last` and `lengths`, and write `runs` int32 [4, B]: accepted, verified, row
    of the last accepted token (the root if none), new length.

    One compiled kernel serves every number of draft tokens up to that of the table.
    """
    requests = slots.shape[0]
    if not requests:
        return
    accept_proposals_kernel[(requests,)](
        drawn,
        owners,
        slots,
        limits,
        last,
        lengths,
        proposals,
        runs,
        requests,
        drawn.shape[0] // requests,
        proposals.stride(0),
        NODES=power_of_two(proposals.shape[1] + 1),
        **tuning.options(tuning.accept_proposals),
    )


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
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.tree_walk`: write the accepted path of each request's tree, root
    first, to `path` int32 [B, steps], update the tables by slot `last` and `lengths`, and write
    `runs` int32 [4, B]: the path's draft tokens, verified ones, index of its last node in `path`,
    new length.

    One compiled kernel serves every number of nodes up to that of `trees`.
    """
    requests = slots.shape[0]
    if not requests:
        return
    tree_walk_kernel[(requests,)](
        drawn,
        owners,
        slots,
        limits,
        trees,
        last,
        lengths,
        proposals,
        path,
        runs,
        requests,
        drawn.shape[0] // requests,
        path.shape[1],
        trees.stride(0),
        trees.stride(1),
        proposals.stride(0),
        NODES=power_of_two(trees.shape[2]),
        **tuning.options(tuning.tree_walk),
    )
