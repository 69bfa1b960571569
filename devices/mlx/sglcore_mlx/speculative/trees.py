"""Draft trees in arrays: how beams grow a tree, which nodes are kept, and which path is accepted.

EAGLE-2, arXiv 2406.16858. Node 0 is the root, the last sampled token. Parents come before their
children; the children of a node are different tokens. Node n has the KV slot n places after the
root's, whatever its depth.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from sglcore.step.tree_shapes import TreeShape
from sglcore_mlx.speculative.verify import NONE, Drafts, Placed, Runs

PARENTS, DEPTHS, ANCESTORS, WORDS = range(4)
"""The rows of a tree's table."""


class DraftTree(NamedTuple):
    """Trees of R requests without their roots, int32[R, N - 1] each: the tokens of the nodes (NONE:
    no node), the numbers of their parents, and their depths, 1 or more."""

    tokens: mx.array
    parents: mx.array
    depths: mx.array


def chained(tokens: mx.array, most: int) -> DraftTree:
    """Return the trees, int32[R, most] each, in which tokens int32[R, k] follow one another; nodes
    after the k-th have no token."""
    whole = mx.pad(tokens, [(0, 0), (0, most - tokens.shape[1])], constant_values=mx.array(NONE, tokens.dtype))
    parents = mx.broadcast_to(mx.arange(most, dtype=mx.int32)[None], whole.shape)
    return DraftTree(whole, parents, parents + 1)


class Beams(NamedTuple):
    """The beams of one depth, int32[R, w] each: their tokens, the beam each grew from, and its
    record number."""

    tokens: mx.array
    origins: mx.array
    records: mx.array


class TreeRecords:
    """The candidates that beams of R requests find, by depth, and the trees made from them. Queues
    only."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        self._tokens, self._parents, self._sums = list[mx.array](), list[mx.array](), list[mx.array]()
        self._beams: Beams | None = None
        self._reached: mx.array | None = None

    def expand(self, tokens: mx.array, scores: mx.array) -> Beams:
        """Record the candidates of one depth and return the beams that continue.

        `tokens` int32[R * b, w] are the leading candidates after each of b beams; `scores` float32
        [R * b, w] the logarithms of their estimated acceptance probabilities, given that the beam
        is accepted."""
        width, first = self._shape.width, sum(each.shape[1] for each in self._tokens)
        count = tokens.shape[0] if self._beams is None else self._beams.tokens.shape[0]
        found, sums = tokens.reshape(count, -1), scores.reshape(count, -1)
        if self._beams is None or self._reached is None:
            parents = mx.full(found.shape, NONE, mx.int32)
        else:
            parents = mx.repeat(self._beams.records, width, axis=1)
            sums = sums + mx.repeat(self._reached, width, axis=1)
        self._tokens.append(found)
        self._parents.append(parents)
        self._sums.append(sums)
        chosen = mx.argsort(-sums, axis=1)[:, :width].astype(mx.int32)
        self._reached = mx.take_along_axis(sums, chosen, axis=1)
        self._beams = Beams(mx.take_along_axis(found, chosen, axis=1), chosen // width, chosen + first)
        return self._beams

    def build(self) -> DraftTree:
        """Return the trees made from the candidates of all depths: for each request the `nodes` - 1
        that are likeliest to be accepted, in the order of their records."""
        nodes, depths = self._shape.nodes - 1, mx.array(self._shape.depths_of_records())
        tokens, parents, sums = (mx.concatenate(each, axis=1) for each in (self._tokens, self._parents, self._sums))
        chosen = mx.sort(mx.argsort(-sums, axis=1)[:, :nodes].astype(mx.int32), axis=1)
        kept = mx.take_along_axis(sums, chosen, axis=1)
        numbers = mx.broadcast_to(mx.arange(1, nodes + 1, dtype=mx.int32)[None], chosen.shape)
        places = mx.zeros((chosen.shape[0], sums.shape[1] + 1), mx.int32)
        places = mx.put_along_axis(places, chosen + 1, numbers, axis=1)
        above = mx.take_along_axis(parents, chosen, axis=1) + 1
        return DraftTree(
            mx.where(kept == -mx.inf, NONE, mx.take_along_axis(tokens, chosen, axis=1)),
            mx.take_along_axis(places, above, axis=1),
            depths[chosen],
        )


def words_of(seen: mx.array, first: int) -> mx.array:
    """Return `ForwardInputs.visible` int32[R, w] for rows in the KV slots first <= i < first + w
    after those of the text. Bit i of `seen` uint32[R, w] says that a row sees slot i; all see the
    text."""
    above = mx.array(31, mx.uint32) - mx.arange(first, first + seen.shape[1], dtype=mx.uint32)
    one = mx.array(1, mx.uint32)
    return ((seen << above) | ((one << above) - one)).view(mx.int32)


def parents_of(hidden: mx.array, beams: Beams, depth: int) -> mx.array:
    """Return the rows of `hidden` from which beams [R, w] of candidates of `depth` grew: [R * w,
    H]. `hidden` is the output of the forward before: [R, H] for depth 2, [R * w, H] after that."""
    count, width = beams.tokens.shape
    if depth == 2:
        return mx.repeat(hidden, width, axis=0)
    return hidden[(beams.origins + mx.arange(0, count * width, width, dtype=mx.int32)[:, None]).reshape(-1)]


def tables_of(tree: DraftTree) -> mx.array:
    """Return int32[R, 4, N], which a verification reads: by node, root included, its parent, depth,
    ancestors (a bit for each node on the path from the root, itself included) and
    `ForwardInputs.visible`."""
    parents, depths = (mx.pad(each, [(0, 0), (1, 0)]) for each in (tree.parents, tree.depths))
    nodes, one = parents.shape[1], mx.array(1, mx.uint32)
    ancestors = mx.broadcast_to((one << mx.arange(nodes, dtype=mx.uint32))[None], parents.shape)
    upwards = parents
    for _ in range((nodes - 1).bit_length()):
        ancestors = ancestors | mx.take_along_axis(ancestors, upwards, axis=1)
        upwards = mx.take_along_axis(upwards, upwards, axis=1)
    return mx.stack([parents, depths, ancestors.view(mx.int32), words_of(ancestors, 0)], axis=1)


def walk(
    drawn: mx.array, placed: Placed, tables: mx.array, drafts: Drafts, slots: mx.array, limits: mx.array, steps: int
) -> tuple[Runs, mx.array]:
    """Find the accepted path of each request's tree: nodes equal to the tokens drawn int32[B, N]
    after their parents. `tables` int32[B, 4, N] as `tables_of`; `slots` and `limits` as in
    `accept`. Writes no table. Return what was accepted, and the path's nodes int32[B, steps], root
    first; later entries: their own index. Lazy."""
    width, before = drawn.shape[1], drafts.lengths[slots]
    parents, depths, ancestors = (tables[:, row] for row in (PARENTS, DEPTHS, ANCESTORS))
    usable, proposed = placed.is_usable[:, 1:], drafts.proposals[slots][:, : width - 1]
    nodes = mx.arange(width, dtype=mx.int32)
    is_right = usable & (proposed == mx.take_along_axis(drawn, parents[:, 1:], axis=1))
    bits = (mx.array(1, mx.uint32) << nodes.astype(mx.uint32))[None, 1:]
    # A node is accepted if no node on the path to it is rejected.
    wrong = mx.where(is_right, mx.array(0, mx.uint32), bits).sum(axis=1, keepdims=True)
    taken = (ancestors.view(mx.uint32) & wrong.astype(mx.uint32)) == 0
    accepted = mx.max(mx.where(taken, depths, 0), axis=1)
    whole = mx.broadcast_to(mx.arange(steps + 1, dtype=mx.int32)[None], (drawn.shape[0], steps + 1))
    places = mx.where(taken, depths, steps)
    path = mx.put_along_axis(whole, places, mx.broadcast_to(nodes[None], places.shape), axis=1)[:, :steps]
    last = mx.take_along_axis(path, accepted[:, None], axis=1)
    lengths = mx.minimum(before + accepted + 1, mx.maximum(limits, before))
    counted = ((proposed >= 0) & usable).astype(mx.int32).sum(axis=1)
    roots = mx.take_along_axis(drawn, last, axis=1)[:, 0]
    return Runs(accepted, counted.astype(mx.int32), roots, lengths), path
