"""The entries of the kernel table for steps that verify proposals."""

from __future__ import annotations

from sglcore.runtime.kernels import reference_speculative, reference_trees
from sglcore.runtime.kernels.entry import entry


class SpeculativeKernels:
    """B requests with N tokens each: the root, which is the last token drawn, and N - 1 proposals after it. Tables by slot, all int32:
    `last` [S] has the root, `lengths` [S] the cells before it, `proposals` [S, K] what is proposed, N - 1 <= K, -1 where nothing is.

    `slots` and `limits` are int32 [B], each slot once; a token at or past the limit of its row has no cell. `owners` int32 [B * N] has the slot
    of each token, 0 for one that is not verified.
    """

    place_proposals = entry(reference_speculative.place_proposals, writes=("ids", "positions", "seq_lens", "owners"))
    """`place_proposals(last, lengths, proposals, slots, limits, nodes int32 [B] | None, ids, positions, seq_lens, owners)`, the last
    four int32 [B * N].

    Token n of a row is at lengths + n. It is verified if that is below the limit and n below the row's `nodes`, where there
    are some; else its position is 0 and its owner slot 0. `seq_lens` are positions + 1; `ids` are 0 for an absent proposal.
    """
    accept_proposals = entry(reference_speculative.accept_proposals, writes=("last", "lengths", "runs"))
    """`accept_proposals(drawn int32 [B * N], owners, slots, limits, last, lengths, proposals, runs int32 [4, B])`.

    Proposal n of a row is right if it is verified and is what was drawn for the token before it. `runs` are: how many are
    right up to the first that is not, a; how many there were; which of the B * N tokens is the last right one; and the new
    `lengths`, a + 1 more, up to the limit. `last` becomes what was drawn for that token.
    """
    tree_walk = entry(reference_speculative.tree_walk, writes=("last", "lengths", "path", "runs"))
    """`tree_walk(drawn int32 [B * N], owners, slots, limits, trees int32 [4, S, M], last, lengths, proposals, path int32 [B, steps],
    runs int32 [4, B])`, N <= M <= 32.

    As `accept_proposals`, of proposals that are the nodes 1 and on of a tree; the root is node 0. `trees` has of each slot's nodes
    the parent, a lower number; the depth less the number; a bit for each node on the way from the root, itself among them; and
    a word that is not read. Children of a node are different tokens, and no node is `steps` deep. A node is right if it is
    verified and is what was drawn for its parent, and so are all on the way to it. `path` has the right nodes by their depth, the
    root first; behind the last, each place has its own number. `runs` are: how deep the last right one is, a; how many proposals
    there were; which of the B * steps places of `path` that one has; and the new `lengths`, a + 1 more, up to the limit.
    """
    tree_expand = entry(reference_trees.tree_expand, writes=("records", "sums", "beams", "reached"))
    """`tree_expand(tokens int32 [B * b, w], scores float32 [B * b, w], parents int32 [B, b] | None, chances float32 [B, b] | None, first,
    records int32 [2, B, M], sums float32 [B, M], beams int32 [3, B, w], reached float32 [B, w])`, w <= 16.

    What one depth of a tree found: w tokens after each of b beams, with scores, whose sums with the beam's `chances` count;
    without `parents` and `chances` all follow the root. They become the records from number `first` on: token and parent, which is
    the record in `parents`, -1 for the root. The w with the largest sums, of equal ones the first, are the `beams` of the
    next depth: token, the beam it grew from, and its record; `reached` are their sums. A score may be -inf, and none is NaN.
    """
    tree_build = entry(reference_trees.tree_build, writes=("tree",))
    """`tree_build(records int32 [2, B, M], sums float32 [B, M], depths int32 [M], tree int32 [3, B, N - 1])`, N - 1 <= M and N <= 32.

    Of the records of all depths the N - 1 with the largest sums, of equal ones the first, in their order, as the nodes 1 and on:
    token, -1 where the sum is -inf; the number of the parent's node, 0 for the root; and the record's depth. No record has a
    larger sum than its parent, or a lower number, so that no node is without its own.
    """
    tree_place = entry(reference_trees.tree_place, writes=("trees", "proposals"))
    """`tree_place(tokens int32 [B, N - 1], parents, depths, slots, trees int32 [4, S, N], proposals int32 [S, N - 1])`, N <= 32.

    Trees as `tree_build` gives them become those of their slots, in the form that `tree_walk` reads. The word of a node is that of
    `ForwardInputs.visible`: it shows all cells before the root and those of the node's ancestors.
    """
