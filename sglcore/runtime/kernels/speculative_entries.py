"""Kernel table entries for steps that verify draft tokens."""

from __future__ import annotations

from sglcore.runtime.kernels import reference_speculative, reference_trees
from sglcore.runtime.kernels.entry import entry


class SpeculativeKernels:
    """The part of `KernelTable` for B requests with N tokens each: a root and N - 1 draft tokens.

    The root is the last sampled token. Tables by slot, all int32: `last` [S] has the root,
    `lengths` [S] the number of KV slots before it, `proposals` [S, K] the draft tokens, N - 1 <= K,
    -1 for none. `slots` and `limits` are int32 [B], each slot once; a token at or past its
    request's limit has no KV slot. `owners` int32 [B * N] is the slot of each token, 0 for a token
    that is not verified.
    """

    place_proposals = entry(reference_speculative.place_proposals, writes=("ids", "positions", "seq_lens", "owners"))
    """`place_proposals(last, lengths, proposals, slots, limits, nodes int32 [B] | None, ids,
    positions, seq_lens, owners)`, the last four int32 [B * N].

    Token n of a request is at lengths + n. It is verified if that is below the limit and, with
    `nodes`, if n is below the request's `nodes`. Otherwise its position is 0 and its owner slot 0.
    `seq_lens` are positions + 1; `ids` are 0 for an absent draft token.
    """
    accept_proposals = entry(reference_speculative.accept_proposals, writes=("last", "lengths", "runs"))
    """`accept_proposals(drawn int32 [B * N], owners, slots, limits, last, lengths, proposals, runs
    int32 [4, B])`.

    Draft token n of a request is accepted if it is verified, equals the token drawn after the token
    before it, and all draft tokens before it are accepted. `runs` are: the number of accepted draft
    tokens, a; the number of verified ones; the index of the last accepted token (the root if none)
    among the B * N; and the new `lengths`, a + 1 more, at most the limit. `last` becomes the token
    drawn after the last accepted one.
    """
    tree_walk = entry(reference_speculative.tree_walk, writes=("last", "lengths", "path", "runs"))
    """`tree_walk(drawn int32 [B * N], owners, slots, limits, trees int32 [4, S, M], last, lengths,
    proposals, path int32 [B, steps], runs int32 [4, B])`, N <= M <= 32.

    As `accept_proposals`, for draft tokens that are nodes 1 and on of a tree; the root is node 0.
    `trees` has for each node of a slot: its parent, a lower number; its depth minus its number; a
    bit for each node on the path from the root, itself included; and a word that is not read.
    Children of a node are different tokens, and no node has depth `steps` or more. A node is
    accepted if it is verified and equals the token drawn after its parent, and all nodes on the
    path to it are accepted. `path` has the accepted nodes by depth, the root first; later entries
    are their own index. `runs` are: the depth of the last accepted node, a; the number of verified
    draft tokens; the index of the last accepted node among the B * steps entries of `path`; and the
    new `lengths`, a + 1 more, at most the limit.
    """
    tree_expand = entry(reference_trees.tree_expand, writes=("records", "sums", "beams", "reached"))
    """`tree_expand(tokens int32 [B * b, w], scores float32 [B * b, w], parents int32 [B, b] | None,
    chances float32 [B, b] | None, first, records int32 [2, B, M], sums float32 [B, M], beams int32
    [3, B, w], reached float32 [B, w])`, w <= 16.

    Records the candidates of one depth: w tokens after each of b beams, ranked by the sum of their
    score and the beam's `chances`. Without `parents` and `chances` all follow the root. They become
    records from number `first` on: token, and parent, which is the record in `parents`, or -1 for
    the root. The w candidates with the largest sums, the first of equal ones, are the `beams` of
    the next depth: token, the beam it grew from, and its record; `reached` are their sums. A score
    may be -inf, never NaN.
    """
    tree_build = entry(reference_trees.tree_build, writes=("tree",))
    """`tree_build(records int32 [2, B, M], sums float32 [B, M], depths int32 [M], tree int32 [3, B,
    N - 1])`, N - 1 <= M and N <= 32.

    The N - 1 records with the largest sums, the first of equal ones, in record order, become nodes
    1 and on: token, -1 if the sum is -inf; the number of the parent's node, 0 for the root; and the
    record's depth. No record has a larger sum or a lower number than its parent, so every node's
    parent is in the tree.
    """
    tree_place = entry(reference_trees.tree_place, writes=("trees", "proposals"))
    """`tree_place(tokens int32 [B, N - 1], parents, depths, slots, trees int32 [4, S, N], proposals
    int32 [S, N - 1])`, N <= 32.

    Stores the trees that `tree_build` returns for their slots, in the form that `tree_walk` reads.
    The word of a node is that of `ForwardInputs.visible`: all KV slots before the root, and those
    of its ancestors.
    """
