"""The entries of the kernel table for DeepSeek's attention: latent rows, chosen or compressed, and what stands around it."""

from __future__ import annotations

from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.entry import entry


class SparseKernels:
    """H heads of D elements, the last or first R of which are rotated. A pool's rows are [N, D], of which row 0 is nobody's:
    any number of padding rows may name it. Lists of rows are int32, filled up with -1 behind the rest.

    `table` int32 [S, P] has each slot's pages; those of slot 0, whose tokens are padding, are page 0. `positions`, `token_slots`
    and `lens` are int32 [T]. `cos_sin_cache` float32 [positions, R] is that of `rotary`. `codec`: rows are uint8 in that form
    (`row_codec.py`); None: they are numbers of any type.
    """

    rope_tail = entry(reference_sparse.rope_tail)
    """`rope_tail(x [T, H, D], positions, cos_sin_cache, norm_eps float | None, is_inverse: bool) -> [T, H, D]`.

    Each head is brought to root mean square 1 first, where there is an eps. The last R elements are rotated in pairs
    (2i, 2i + 1), backwards if `is_inverse`; all in float32.
    """
    norm_rope_store = entry(reference_sparse.norm_rope_store, writes=("rows",))
    """`norm_rope_store(x [T, D], weight float32 [S], eps, positions, cos_sin_cache, rows, out_rows int [T], codec)`.

    The first S elements of a row are divided by their root mean square and multiplied with the weight, in float32; the last R
    are rotated as by `rope_tail`. Then row t, in x's dtype, goes to rows[out_rows[t]].
    """
    index_key_store = entry(reference_sparse.index_key_store, writes=("rows",))
    """`index_key_store(x [T, D], weight, bias float32 [D], eps, positions, cos_sin_cache, rows, out_rows int [T], codec)`.

    Layer norm; the first R elements are rotated in pairs (i, i + R / 2); row t goes to rows[out_rows[t]].
    """
    window_rows = entry(reference_sparse.window_rows, writes=("out",))
    """`window_rows(table, token_slots, positions, W, page_size, out int32 [T, W])`: the rows of the last W tokens up to each
    token, the oldest first, in a pool with a row for each. `positions` count from the first page of the table."""
    block_rows = entry(reference_sparse.block_rows, writes=("out",))
    """`block_rows(table, token_slots, positions, ratio, page_size, out int32 [T, W])`: the rows of the blocks of `ratio` tokens
    that are complete with each token, in a pool with page_size / ratio rows a page. W of the table's width suffices for all."""
    compress_plan = entry(reference_sparse.compress_plan, writes=("reads", "block_positions", "out_rows", "writes"))
    """`compress_plan(slots, seq_lens int32 [B], lengths, starts int32 [B] | None, token_slots, positions, table, state_table
    int32 [S, Q] | None, state_offsets int32 [B] | None, page_size, ratio, ring, reads int32 [N, W], block_positions int32 [N],
    out_rows int [N], writes int [T])`.

    Row b has the tokens [starts[b], starts[b] + lengths[b]), the last of its seq_lens[b]; where both are None, token b. An
    event is a block of `ratio` tokens that the last of them completes; events come row by row, in order, and N is not below
    their number. `reads` are the W tokens up to there: that of this step, or -2 - its row in the state, or -1 before the
    first. `block_positions` is the block's first token, `out_rows` its row in a pool with page_size / ratio rows a page; 0
    behind the events.

    A state keeps `ring` tokens: of each page, page * ring + position % ring, by `state_table`, whose first page begins at
    `state_offsets`; or of each slot, where there is no table. `writes` are the rows of the tokens that no later one of this
    step takes, 0 for the others. Rows of slot 0 complete and keep nothing.
    """
    compress = entry(reference_sparse.compress, writes=("state",))
    """`compress(kv_gate [T, 2 * C], state float32 [S, 2 * C], ape float32 [ratio, C], reads int32 [N, W], writes int [T]) ->
    [N, C * ratio / W]`, by `compress_plan`: values and gates side by side. What is read was there before this call.

    Gates plus `ape` weigh values by a softmax over the W tokens, each channel by itself, in float32. With W = 2 ratio the first
    half of the channels counts of the older tokens, the second of the newer. Zeros where nothing is read. Then row t goes to
    state[writes[t]].
    """
    index_logits = entry(reference_sparse.index_logits)
    """`index_logits(q [T, H, D], weights [T, H], keys, table, token_slots, lens, rows_per_page, scale, W, codec) ->
    float32 [T, W]`: scale * sum over h of weights[t, h] * max(q[t, h] . key, 0), for the first lens[t] rows of its request;
    -inf behind them."""
    index_top_k = entry(reference_sparse.index_top_k)
    """`index_top_k(logits float32 [T, W], lens, table, token_slots, rows_per_page, K) -> int32 [T, K]`: the rows of the K
    largest of the first lens[t], in the order of the text; of equals the first."""
    sparse_mqa = entry(reference_sparse.sparse_mqa)
    """`sparse_mqa(q [T, H, D], rows, chosen int32 [T, W], more_rows | None, more_chosen int32 [T, X] | None, sinks float32 [H]
    | None, scale, V, codec) -> [T, H, V]`: attention over the chosen rows of both pools, each of which is a key, and a value by its
    first V elements. A sink is the score of one more key, which has no value. Zeros where nothing is chosen.
    """
    paged_mqa = entry(reference_sparse.paged_mqa)
    """`paged_mqa(q [T, H, D], rows, table, token_slots, lens, page_size, scale, V, codec) -> [T, H, V]`: the same over the first
    lens[t] rows of a token's request."""
    grouped_linear = entry(reference_sparse.grouped_linear)
    """`grouped_linear(x [T, G, K], weight [G, R, K]) -> [T, G, R]`: a product for each group. The
    weight may have any strides."""
    hc_pre = entry(reference_sparse.hc_pre)
    """`hc_pre(h [T, n, d], fn float32 [(2 + n) n, n d], base float32 [(2 + n) n], scale float32 [3], norm_eps, hc_eps, iters) ->
    (x [T, d], post float32 [T, n], comb float32 [T, n, n])`: manifold-constrained hyper-connections, in float32.

    f = fn (h / rms(h)), its parts of n, n and n n scaled and shifted. x = sum of (sigmoid(f1) + hc_eps) h; post = 2 sigmoid(f2);
    comb = softmax(f3) + hc_eps, whose columns, then rows and columns iters - 1 times, are divided by their sums + hc_eps.
    """
    hc_post = entry(reference_sparse.hc_post)
    """`hc_post(x [T, d], h [T, n, d], post, comb) -> [T, n, d]`: new[k] = post[k] x + sum over j of comb[j, k] h[j]."""
    hc_head = entry(reference_sparse.hc_head)
    """`hc_head(h [T, n, d], fn float32 [n, n d], base float32 [n], scale float32 [1], norm_eps, hc_eps) -> [T, d]`: x of `hc_pre`."""
