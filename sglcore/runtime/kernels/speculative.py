"""The entries of the kernel table for steps that verify proposals."""

from __future__ import annotations

from sglcore.runtime.kernels import reference_speculative
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
