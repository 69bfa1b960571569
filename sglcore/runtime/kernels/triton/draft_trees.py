"""Kernels that make draft trees: choose the beams of each depth, choose the nodes, and write the
tables that a verification reads.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two


@triton.jit
def tree_expand_kernel(
    tokens,
    scores,
    parents,
    chances,
    records,
    sums,
    beams,
    reached,
    first,
    leaders,
    width,
    most,
    requests,
    tokens_stride,
    scores_stride,
    LEADERS: tl.constexpr,
):
    """Implements `KernelTable.tree_expand`, which defines the arrays: tokens, scores, parents and
    chances are read; records, sums, beams and reached are written.

    `leaders` = b * w candidates per request, `most` = M, `requests` = B. One program per request.
    Reads at least two and writes three 4-byte values for each candidate.
    """
    row = tl.program_id(0)
    place = tl.arange(0, LEADERS)
    inside = place < leaders
    beam = row * (leaders // width) + place // width
    token = tl.load(tokens + beam * tokens_stride + place % width, mask=inside, other=0)
    score = tl.load(scores + beam * scores_stride + place % width, mask=inside, other=float("-inf"))
    parent = tl.full([LEADERS], -1, tl.int32)
    if parents is not None:
        parent = tl.load(parents + beam, mask=inside, other=0)
        score += tl.load(chances + beam, mask=inside, other=0.0)
    record = records + row * most + first + place
    tl.store(record, token, mask=inside)
    tl.store(record + requests * most, parent, mask=inside)
    tl.store(sums + row * most + first + place, score, mask=inside)
    left = inside
    for rank in range(width):
        best = tl.max(tl.where(left, score, float("-inf")), axis=0)
        chosen = tl.min(tl.where(left & (score == best), place, LEADERS), axis=0)
        left = left & (place != chosen)
        made = beams + row * width + rank
        tl.store(made, tl.sum(tl.where(place == chosen, token, 0), axis=0))
        tl.store(made + requests * width, chosen // width)
        tl.store(made + 2 * requests * width, chosen + first)
        tl.store(reached + row * width + rank, best)


@triton.jit
def tree_build_kernel(records, sums, depths, tree, most, requests, nodes, RECORDS: tl.constexpr):
    """Implements `KernelTable.tree_build`; only `tree` is written. `most` = M, `requests` = B,
    `nodes` = N - 1.

    One program per request. Reads at least four 4-byte values for each record.
    """
    row = tl.program_id(0)
    place = tl.arange(0, RECORDS)
    inside = place < most
    held = records + row * most + place
    total = tl.load(sums + row * most + place, mask=inside, other=float("-inf"))
    token = tl.where(total == float("-inf"), -1, tl.load(held, mask=inside, other=0))
    parent = tl.load(held + requests * most, mask=inside, other=0)
    depth = tl.load(depths + place, mask=inside, other=0)
    left = inside
    for _ in range(nodes):
        best = tl.max(tl.where(left, total, float("-inf")), axis=0)
        chosen = tl.min(tl.where(left & (total == best), place, RECORDS), axis=0)
        left = left & (place != chosen)
    kept = inside & (left == 0)
    rest = kept
    for node in range(nodes):
        own = place == tl.min(tl.where(rest, place, RECORDS), axis=0)
        rest = rest & (own == 0)
        above = tl.sum(tl.where(own, parent, 0), axis=0)
        made = tree + row * nodes + node
        tl.store(made, tl.sum(tl.where(own, token, 0), axis=0))
        tl.store(made + requests * nodes, tl.sum((kept & (place <= above)).to(tl.int32), axis=0))
        tl.store(made + 2 * requests * nodes, tl.sum(tl.where(own, depth, 0), axis=0))


@triton.jit
def tree_place_kernel(
    tokens,
    parents,
    depths,
    slots,
    trees,
    proposals,
    nodes,
    table,
    tokens_stride,
    parents_stride,
    depths_stride,
    NODES: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Implements `KernelTable.tree_place`; only `trees` and `proposals` are written. `nodes` = N,
    and `table` is the stride of the first axis of `trees`.

    One program per request. Reads at least three int32 and writes five for each node.
    """
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    inside, is_node = node < nodes, (node > 0) & (node < nodes)
    slot = tl.load(slots + row)
    token = tl.load(tokens + row * tokens_stride + node - 1, mask=is_node, other=0)
    parent = tl.load(parents + row * parents_stride + node - 1, mask=is_node, other=0)
    depth = tl.load(depths + row * depths_stride + node - 1, mask=is_node, other=0)
    ancestors, upwards = 1 << node, parent
    for _ in tl.static_range(ROUNDS):
        # Each round doubles the known part of a node's path to the root.
        is_above = upwards[:, None] == node[None, :]
        ancestors = ancestors | tl.sum(tl.where(is_above, ancestors[None, :], 0), axis=1)
        upwards = tl.sum(tl.where(is_above, upwards[None, :], 0), axis=1)
    above = 31 - node
    held = trees + slot * nodes + node
    tl.store(held, parent, mask=inside)
    tl.store(held + table, depth - node, mask=inside)
    tl.store(held + 2 * table, ancestors, mask=inside)
    tl.store(held + 3 * table, (ancestors << above) | ((1 << above) - 1), mask=inside)
    tl.store(proposals + slot * (nodes - 1) + node - 1, token, mask=is_node)


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
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.tree_expand`: write the candidates of one depth to `records` int32
    [2, B, M] (token, parent record; -1: the root) and `sums` from number `first` on, and the w with
    the largest sums to `beams` int32 [3, B, w] (token, beam it grew from, record) and `reached`.
    """
    requests, width = reached.shape
    if not requests:
        return
    leaders = tokens.shape[0] // requests * width
    tree_expand_kernel[(requests,)](
        tokens,
        scores,
        parents,
        chances,
        records,
        sums,
        beams,
        reached,
        first,
        leaders,
        width,
        sums.shape[1],
        requests,
        tokens.stride(0),
        scores.stride(0),
        LEADERS=power_of_two(leaders),
        **tuning.options(tuning.tree_expand),
    )


def tree_build(records: Tensor, sums: Tensor, depths: Tensor, tree: Tensor, tuning: Tuning = Tuning()) -> None:
    """Implement `KernelTable.tree_build`: write the nodes of each request's tree, the records with
    the largest sums, to `tree` int32 [3, B, N - 1]: token (-1: its sum is -inf), parent node (0:
    the root), depth. `records` and `sums` are those of `tree_expand`, `depths` int32 [M] theirs.
    """
    requests, most = sums.shape
    if not requests:
        return
    tree_build_kernel[(requests,)](
        records,
        sums,
        depths,
        tree,
        most,
        requests,
        tree.shape[2],
        RECORDS=power_of_two(most),
        **tuning.options(tuning.tree_build),
    )


def tree_place(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    slots: Tensor,
    trees: Tensor,
    proposals: Tensor,
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.tree_place`: store the trees of B requests (int32 [B, N - 1] each) at
    their `slots`: the tokens in `proposals`, and in `trees` int32 [4, S, N] each node's parent,
    depth minus number, ancestors' bits, and visibility word.
    """
    requests, nodes = slots.shape[0], trees.shape[2]
    if not requests:
        return
    tree_place_kernel[(requests,)](
        tokens,
        parents,
        depths,
        slots,
        trees,
        proposals,
        nodes,
        trees.stride(0),
        tokens.stride(0),
        parents.stride(0),
        depths.stride(0),
        NODES=power_of_two(nodes),
        ROUNDS=(nodes - 1).bit_length(),
        **tuning.options(tuning.tree_place),
    )
