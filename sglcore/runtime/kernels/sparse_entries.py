"""Kernel table entries for DeepSeek's attention.

Latent rows, chosen or compressed, and related operations.
"""

from __future__ import annotations

from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.entry import entry


class SparseKernels:
    """The part of `KernelTable` for sparse attention: H heads of D elements, with the last or first
    R elements rotated.

    A pool has rows [N, D]; row 0 is reserved. Any number of padding rows may name row 0. Lists of
    rows are int32, padded with -1 at the end.

    `table` int32 [S, P] has each slot's pages; slot 0, which padding tokens have, has page 0.
    `positions`, `token_slots` and `lens` are int32 [T]. `cos_sin_cache` float32 [positions, R] is
    that of `rotary`. `codec`: rows are uint8 in that format (`row_codec.py`); None: they are
    numbers of any dtype.
    """

    rope_tail = entry(reference_sparse.rope_tail)
    """`rope_tail(x [T, H, D], positions, cos_sin_cache, norm_eps float | None, is_inverse: bool) ->
    [T, H, D]`.

    With an eps, each head is first scaled to root mean square 1. The last R elements are rotated in
    pairs (2i, 2i + 1), backwards if `is_inverse`; all in float32.
    """
    norm_rope_store = entry(reference_sparse.norm_rope_store, writes=("rows",))
    """`norm_rope_store(x [T, D], weight float32 [S], eps, positions, cos_sin_cache, rows, out_rows
    int [T], codec)`.

    The first S elements of a row are divided by their root mean square and multiplied by the
    weight, in float32; the last R are rotated as by `rope_tail`. Row t is stored, in x's dtype, at
    rows[out_rows[t]].
    """
    index_key_store = entry(reference_sparse.index_key_store, writes=("rows",))
    """`index_key_store(x [T, D], weight, bias float32 [D], eps, positions, cos_sin_cache, rows,
    out_rows int [T], codec)`.

    Layer norm; the first R elements are rotated in pairs (i, i + R / 2). Row t is stored at
    rows[out_rows[t]].
    """
    window_rows = entry(reference_sparse.window_rows, writes=("out",))
    """`window_rows(table, token_slots, positions, W, page_size, out int32 [T, W])`.

    The rows of the last W tokens up to each token, the oldest first, in a pool with one row per
    token. `positions` count from the first page of the table.
    """
    block_rows = entry(reference_sparse.block_rows, writes=("out",))
    """`block_rows(table, token_slots, positions, ratio, page_size, out int32 [T, W])`.

    The rows of the blocks of `ratio` tokens that are complete with each token, in a pool with
    page_size / ratio rows per page. A W that covers the width of the table holds all blocks.
    """
    compress_plan = entry(reference_sparse.compress_plan, writes=("reads", "block_positions", "out_rows", "writes"))
    """`compress_plan(slots, seq_lens int32 [B], lengths, starts int32 [B] | None, token_slots,
    positions, table, state_table int32 [S, Q] | None, state_offsets int32 [B] | None, page_size,
    ratio, ring, reads int32 [N, W], block_positions int32 [N], out_rows int [N], writes int [T])`.

    Request b has the tokens [starts[b], starts[b] + lengths[b]), the last of its seq_lens[b]; if
    both are None, token b. An event is a block of `ratio` tokens that these tokens complete. Events
    are ordered by request, then by position; there are at most N. `reads` are the W tokens up to
    the block's end: the index of a token of this step; -2 - r for row r of the state; or -1 before
    the first token. `block_positions` is the block's first token, `out_rows` its row in a pool with
    page_size / ratio rows per page; 0 after the last event.

    A state keeps `ring` tokens of each page, at page * ring + position % ring, by `state_table`;
    the first page of a request begins at `state_offsets`. Without a table it keeps them of each
    slot. `writes` are the rows of tokens that no later token of this step overwrites, 0 for others.
    Requests of slot 0 complete and keep nothing.
    """
    compress = entry(reference_sparse.compress, writes=("state",))
    """`compress(kv_gate [T, 2 * C], state float32 [S, 2 * C], ape float32 [ratio, C], reads int32
    [N, W], writes int [T]) -> [N, C * ratio / W]`, by `compress_plan`.

    Values and gates are side by side. The state is read before it is written.

    Gates plus `ape` weight the values by a softmax over the W tokens, per channel, in float32. With
    W = 2 ratio the first half of the channels is taken from the older tokens, the second half from
    the newer. Zeros if nothing is read. Then row t is stored at state[writes[t]].
    """
    index_logits = entry(reference_sparse.index_logits)
    """`index_logits(q [T, H, D], weights [T, H], keys, table, token_slots, lens, rows_per_page,
    scale, W, codec) -> float32 [T, W]`.

    scale * sum over h of weights[t, h] * max(q[t, h] . key, 0), for the first lens[t] rows of the
    token's request; -inf after them.
    """
    index_top_k = entry(reference_sparse.index_top_k)
    """`index_top_k(logits float32 [T, W], lens, table, token_slots, rows_per_page, K) -> int32 [T,
    K]`.

    The rows of the K largest of the first lens[t] logits, in text order; of equal ones the first.
    """
    sparse_mqa = entry(reference_sparse.sparse_mqa)
    """`sparse_mqa(q [T, H, D], rows, chosen int32 [T, W], more_rows | None, more_chosen int32 [T,
    X] | None, sinks float32 [H] | None, scale, V, codec) -> [T, H, V]`.

    Attention over the chosen rows of both pools. A row is a key; its first V elements are the
    value. A sink is the score of one more key without a value. Zeros if nothing is chosen.
    """
    paged_mqa = entry(reference_sparse.paged_mqa)
    """`paged_mqa(q [T, H, D], rows, table, token_slots, lens, page_size, scale, V, codec) -> [T, H,
    V]`.

    The same attention over the first lens[t] rows of a token's request.
    """
    grouped_linear = entry(reference_sparse.grouped_linear)
    """`grouped_linear(x [T, G, K], weight [G, R, K]) -> [T, G, R]`: one product per group.

    The weight may have any strides.
    """
    hc_pre = entry(reference_sparse.hc_pre)
    """`hc_pre(h [T, n, d], fn float32 [(2 + n) n, n d], base float32 [(2 + n) n], scale float32
    [3], norm_eps, hc_eps, iters) -> (x [T, d], post float32 [T, n], comb float32 [T, n, n])`.

    Manifold-constrained hyper-connections, in float32. f = fn (h / rms(h)); its parts of n, n and n
    n elements are scaled and shifted. x = sum of (sigmoid(f1) + hc_eps) h; post = 2 sigmoid(f2);
    comb = softmax(f3) + hc_eps, with columns, then rows and columns iters - 1 times, divided by
    their sums + hc_eps.
    """
    hc_post = entry(reference_sparse.hc_post)
    """`hc_post(x [T, d], h [T, n, d], post, comb) -> [T, n, d]`.

    new[k] = post[k] x + sum over j of comb[j, k] h[j].
    """
    hc_head = entry(reference_sparse.hc_head)
    """`hc_head(h [T, n, d], fn float32 [n, n d], base float32 [n], scale float32 [1], norm_eps,
    hc_eps) -> [T, d]`.

    The x of `hc_pre`.
    """
