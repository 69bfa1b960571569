"""The reference kernels of DeepSeek-V3.2's and V4's sparse attention.

Plain torch; they define correct results. A request's tokens are in pages; a pool has a fixed number
of rows per page, and lists name rows. Lists are padded with -1 at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sglcore.runtime.kernels.row_codec import RowCodec

AT_ONCE = 1 << 24
"""Maximum elements of gathered rows at a time."""


def rope_tail(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, norm_eps: float | None, is_inverse: bool) -> Tensor:
    """Reference of `KernelTable.rope_tail`: rotate the last R elements of each head of x [T, H, D]
    in pairs of neighbours (Su et al. 2021), backwards if `is_inverse`, in float32.

    `cos_sin_cache` float32 [positions, R] has R / 2 cosines, then R / 2 sines. With `norm_eps` each
    head is scaled to root mean square 1 before. Return a new tensor of x's shape and dtype.
    """
    values = x.float()
    if norm_eps is not None:
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norm_eps)
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _turned(values, cos, -sin if is_inverse else sin).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return float32 [..., D] with its last R elements rotated in pairs (2 i, 2 i + 1); cos and sin
    [..., R / 2] have one column per pair.
    """
    rest, last = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    even, odd = last[..., ::2], last[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((rest, pairs.flatten(-2)), dim=-1)


def norm_rope_store(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    rows: Tensor,
    out_rows: Tensor,
    codec: RowCodec | None,
) -> None:
    """Reference of `KernelTable.norm_rope_store`: scale the first S elements of each row of x [T,
    D] to root mean square 1, times weight [S]; rotate the last R as `rope_tail` does; store row t
    at rows[out_rows[t]], encoded by `codec`, or without one cast to the dtype of `rows`.
    """
    size, values = weight.shape[0], x.float()
    first = values[:, :size]
    first = first * torch.rsqrt(first.square().mean(-1, keepdim=True) + eps) * weight.float()
    cos, sin = cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
    _store(_turned(torch.cat((first, values[:, size:]), dim=-1), cos, sin).to(x.dtype), rows, out_rows, codec)


def index_key_store(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    rows: Tensor,
    out_rows: Tensor,
    codec: RowCodec | None,
) -> None:
    """Reference of `KernelTable.index_key_store`: layer norm of x [T, D], rotate the first R
    elements in pairs (i, i + R / 2), and store row t at rows[out_rows[t]], encoded by `codec`, or
    without one cast to the dtype of `rows`.
    """
    values = F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps)
    cos, sin = cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
    half = cos.shape[-1]
    low, high, rest = values.split((half, half, values.shape[1] - 2 * half), dim=-1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
    _store(turned.to(x.dtype), rows, out_rows, codec)


def _store(values: Tensor, rows: Tensor, out_rows: Tensor, codec: RowCodec | None) -> None:
    rows[out_rows] = values.to(rows.dtype) if codec is None else codec.encode(values)


def _read(rows: Tensor, chosen: Tensor, codec: RowCodec | None) -> Tensor:
    """Return the elements of the rows `chosen` (any shape, int) as float32 [*chosen.shape, D],
    decoded if there is a codec; entries of -1 read as zeros.
    """
    found = rows.index_select(0, chosen.clamp(min=0).flatten())
    values = found.float() if codec is None else codec.decode(found)
    return values.view(*chosen.shape, values.shape[1]).masked_fill((chosen < 0).unsqueeze(-1), 0)


def window_rows(
    table: Tensor, token_slots: Tensor, positions: Tensor, window: int, page_size: int, out: Tensor
) -> None:
    """Reference of `KernelTable.window_rows`: write to `out` int32 [T, window] the rows of the last
    `window` tokens up to each token, the oldest first, then -1.

    Row p of a slot is in page table[slot, p // page_size]; `token_slots` and `positions` are [T].
    """
    places = torch.arange(window, device=out.device) + (positions.unsqueeze(1) - window + 1).clamp(min=0)
    found = _rows_at(table, token_slots, places, page_size)
    out.copy_(found.masked_fill(places > positions.unsqueeze(1), -1))


def block_rows(table: Tensor, token_slots: Tensor, positions: Tensor, ratio: int, page_size: int, out: Tensor) -> None:
    """Reference of `KernelTable.block_rows`: write to `out` int32 [T, W] the rows of all blocks of
    `ratio` tokens that are complete with each token, in order, then -1.

    A page has page_size / ratio rows. `token_slots` and `positions` are [T].
    """
    out.copy_(_seen_rows(table, token_slots, (positions + 1) // ratio, page_size // ratio, out.shape[1]))


def _rows_at(table: Tensor, slots: Tensor, places: Tensor, rows_per_page: int) -> Tensor:
    """Return rows int64 at `places` [N, W], counted from the first page of slots [N].

    Undefined beyond the pages.
    """
    pages = (places // rows_per_page).clamp(0, table.shape[1] - 1)
    return table[slots.unsqueeze(1).long(), pages].long() * rows_per_page + places % rows_per_page


def _seen_rows(table: Tensor, slots: Tensor, lens: Tensor, rows_per_page: int, width: int) -> Tensor:
    """Return the pool rows of the first `lens` entries of slots [N], int64 [N, width], then -1."""
    places = torch.arange(width, device=table.device).expand(slots.shape[0], width)
    return _rows_at(table, slots, places, rows_per_page).masked_fill(places >= lens.unsqueeze(1), -1)


def compress_plan(
    slots: Tensor,
    seq_lens: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    token_slots: Tensor,
    positions: Tensor,
    table: Tensor,
    state_table: Tensor | None,
    state_offsets: Tensor | None,
    page_size: int,
    ratio: int,
    ring: int,
    reads: Tensor,
    block_positions: Tensor,
    out_rows: Tensor,
    writes: Tensor,
) -> None:
    """Reference of `KernelTable.compress_plan`: count the blocks of `ratio` tokens that each
    request completes in this step, number them as events, and write what `compress` needs.

    For each event, `reads` int32 [N, W] are the sources of its W tokens (the index of a token of
    this step; -2 - r for row r of the state; -1 for none), `block_positions` [N] its first
    position, `out_rows` [N] its row in the pool; after the last event -1, 0 and 0. `writes` [T] are
    the rows of the state that receive each token (0: none).
    """
    ends = seq_lens.long()
    begins = ends - (1 if lengths is None else lengths)
    count = torch.where(slots > 0, ends // ratio - begins // ratio, 0)
    after = count.cumsum(0)
    events = torch.arange(reads.shape[0], device=slots.device)
    row = torch.searchsorted(after, events, right=True).clamp(max=slots.shape[0] - 1)
    is_event = events < after[-1:]
    block = begins[row] // ratio + events - (after - count)[row]
    offsets = torch.zeros_like(ends) if state_offsets is None else state_offsets.long()

    def state_rows(slot: Tensor, offset: Tensor, position: Tensor) -> Tensor:
        place = slot.expand_as(position)
        if state_table is not None:
            page = ((position - offset) // page_size).clamp(0, state_table.shape[1] - 1)
            place = state_table[place, page].long()
        return place * ring + position % ring

    source = (block.unsqueeze(1) + 1) * ratio + torch.arange(-reads.shape[1], 0, device=slots.device)
    begin, slot = begins[row].unsqueeze(1), slots.long()[row].unsqueeze(1)
    first = (torch.arange(slots.shape[0], device=slots.device) if starts is None else starts.long())[row].unsqueeze(1)
    held = -2 - state_rows(slot, offsets[row].unsqueeze(1), source)
    found = torch.where(source >= begin, first + source - begin, held)
    reads.copy_(found.masked_fill((source < 0) | ~is_event.unsqueeze(1), -1))
    block_positions.copy_((block * ratio).masked_fill(~is_event, 0))
    out_rows.copy_(_rows_at(table, slot[:, 0], block.unsqueeze(1), page_size // ratio)[:, 0].masked_fill(~is_event, 0))

    by_slot = torch.zeros(2, table.shape[0], dtype=torch.int64, device=slots.device)
    by_slot[:, slots.long()] = torch.stack((ends, offsets))
    own, place = token_slots.long(), positions.long()
    end, offset = by_slot[:, own].unbind(0)
    if state_table is not None:
        end = torch.minimum(end, (place // page_size + 1) * page_size)
    is_kept = (own > 0) & (place + ring >= end)
    writes.copy_(state_rows(own, offset, place).masked_fill(~is_kept, 0))


def compress(kv_gate: Tensor, state: Tensor, ape: Tensor, reads: Tensor, writes: Tensor) -> Tensor:
    """Reference of `KernelTable.compress`: sum the values of each block's W tokens, weighted by a
    softmax of their gates plus `ape` per channel; return the N blocks [N, C * ratio / W].

    kv_gate [T, 2 C] has values, then gates; `reads` int32 [N, W] and `writes` [T] are those of
    `compress_plan`. Afterwards row t is stored at state[writes[t]].
    """
    ratio, width = ape.shape
    events, span = reads.shape
    size = width * ratio // span
    held = state.index_select(0, (-2 - reads).clamp(min=0).flatten()).float()
    new = kv_gate.float().index_select(0, reads.clamp(min=0).flatten())
    kv, gate = torch.where((reads >= 0).view(events * span, 1), new, held).view(events, span, 2, width).unbind(2)
    gate = gate + ape.float().repeat(span // ratio, 1)
    if span > ratio:
        # The first half of the channels comes from the older block, the second half from the newer
        # one.
        kv, gate = (torch.cat((each[:, :ratio, :size], each[:, ratio:, size:]), dim=1) for each in (kv, gate))
    absent = (reads == -1).unsqueeze(-1)
    weights = torch.softmax(gate.masked_fill(absent, -torch.inf), dim=1)
    # Absent entries may hold anything; if all are absent, the softmax is NaN.
    entries = torch.where(absent, 0, weights * kv).sum(1)
    state[writes] = kv_gate.to(state.dtype)
    return entries.to(kv_gate.dtype)


def index_logits(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    token_slots: Tensor,
    lens: Tensor,
    rows_per_page: int,
    scale: float,
    width: int,
    codec: RowCodec | None,
) -> Tensor:
    """Reference of `KernelTable.index_logits`: return float32 [T, width], the scores of the first
    lens[t] rows of each token's request, -inf after them.

    A score is `scale` times the sum over heads of weights [T, H] times max(q [T, H, D] . key, 0)
    (DeepSeek-V3.2, section 2.1). `keys` are found by the pages in `table` and decoded by `codec`.
    """
    logits = torch.empty(q.shape[0], width, dtype=torch.float32, device=q.device)
    for part in _parts(q.shape[0], width * q.shape[2]):
        chosen = _seen_rows(table, token_slots[part], lens[part], rows_per_page, width)
        heads = torch.relu(torch.einsum("thd,twd->thw", q[part].float(), _read(keys, chosen, codec)))
        sums = torch.einsum("th,thw->tw", weights[part].float() * scale, heads)
        logits[part] = sums.masked_fill(chosen < 0, -torch.inf)
    return logits


def _parts(tokens: int, each: int) -> Iterator[slice]:
    """Yield slices that cover `tokens` tokens in order, so that a slice gathers at most AT_ONCE
    elements if a token gathers `each`; at least one token per slice.
    """
    step = max(1, AT_ONCE // max(1, each))
    for first in range(0, tokens, step):
        yield slice(first, first + step)


def index_top_k(logits: Tensor, lens: Tensor, table: Tensor, token_slots: Tensor, rows_per_page: int, k: int) -> Tensor:
    """Reference of `KernelTable.index_top_k`: choose the `k` largest of the first lens[t] logits of
    [T, W], of equal ones the first, and return their rows by `table`, int32 [T, k], in text order,
    then -1.
    """
    width = logits.shape[1]
    places = torch.sort(logits, dim=1, descending=True, stable=True)[1][:, :k]
    places = torch.sort(places.masked_fill(places >= lens.unsqueeze(1), width), dim=1)[0]
    found = _rows_at(table, token_slots, places, rows_per_page).masked_fill(places == width, -1)
    return F.pad(found, (0, k - found.shape[1]), value=-1).to(torch.int32)


def sparse_mqa(
    q: Tensor,
    rows: Tensor,
    chosen: Tensor,
    more_rows: Tensor | None,
    more_chosen: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    value_size: int,
    codec: RowCodec | None,
) -> Tensor:
    """Reference of `KernelTable.sparse_mqa`: softmax attention of q [T, H, D] over the chosen rows
    of both pools, int32 [T, W] each (-1: none); all heads share them. Return [T, H, value_size].

    A row is a key, its first `value_size` elements the value. `sinks` [H] are scores of a further
    key without a value. Zeros where nothing is chosen.
    """
    out = torch.empty(*q.shape[:2], value_size, dtype=q.dtype, device=q.device)
    width = chosen.shape[1] + (0 if more_chosen is None else more_chosen.shape[1])
    for part in _parts(q.shape[0], width * q.shape[2]):
        keys, lists = _read(rows, chosen[part], codec), chosen[part]
        if more_rows is not None and more_chosen is not None:
            keys = torch.cat((keys, _read(more_rows, more_chosen[part], codec)), dim=1)
            lists = torch.cat((lists, more_chosen[part]), dim=1)
        out[part] = _attend(q[part].float(), keys, lists >= 0, sinks, scale, value_size).to(q.dtype)
    return out


def _attend(q: Tensor, keys: Tensor, is_seen: Tensor, sinks: Tensor | None, scale: float, value_size: int) -> Tensor:
    """Return the attention of q float32 [T, H, D] to keys float32 [T, W, D], as [T, H, value_size].

    is_seen is bool [T, W], sinks float [H] or None. Zeros where nothing is seen.
    """
    scores = (torch.einsum("thd,twd->thw", q, keys) * scale).masked_fill(~is_seen.unsqueeze(1), -torch.inf)
    if sinks is not None:
        last = sinks.float().view(1, sinks.shape[0], 1).expand(*scores.shape[:2], 1)
        weights = torch.softmax(torch.cat((scores, last), dim=2), dim=2)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=2).masked_fill(~is_seen.any(1).view(-1, 1, 1), 0)
    return weights @ keys[..., :value_size]


def paged_mqa(
    q: Tensor,
    rows: Tensor,
    table: Tensor,
    token_slots: Tensor,
    lens: Tensor,
    page_size: int,
    scale: float,
    value_size: int,
    codec: RowCodec | None,
) -> Tensor:
    """Reference of `KernelTable.paged_mqa`: as `sparse_mqa` without sinks, over the first lens[t]
    rows of each token's request, found by the pages in `table`. Return [T, H, value_size].
    """
    out, width = torch.empty(*q.shape[:2], value_size, dtype=q.dtype, device=q.device), table.shape[1] * page_size
    for part in _parts(q.shape[0], width * q.shape[2]):
        chosen = _seen_rows(table, token_slots[part], lens[part], page_size, width)
        keys = _read(rows, chosen, codec)
        out[part] = _attend(q[part].float(), keys, chosen >= 0, None, scale, value_size).to(q.dtype)
    return out


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Reference of `KernelTable.grouped_linear`: one product per group, of x [T, G, K] and weight
    [G, R, K]; return [T, G, R].
    """
    return torch.einsum("tgk,grk->tgr", x, weight)


def hc_pre(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of `KernelTable.hc_pre`: compute mixing weights from the n residual streams h [T,
    n, d] (manifold-constrained hyper-connections, Xie et al. 2025).

    Return the layer's input [T, d], a weighted sum of the streams; and for `hc_post` the weights of
    the layer's result float32 [T, n], and those of the streams float32 [T, n, n] after `iters`
    normalisations of their rows and columns.
    """
    tokens, n, _ = h.shape
    pre, post, comb = _mixes(h, fn, norm_eps).split((n, n, n * n), dim=-1)
    pre = torch.sigmoid(pre * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
    comb = torch.softmax((comb * scale[2] + base[2 * n :]).view(tokens, n, n), dim=-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return (pre.unsqueeze(-1) * h.float()).sum(1).to(h.dtype), post, comb


def hc_post(x: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Reference of `KernelTable.hc_post`: return the new streams [T, n, d]. Stream k is post[k]
    times the layer's result x [T, d], plus the sum over j of comb[j, k] times stream j of h.
    """
    mixed = torch.einsum("tjk,tjd->tkd", comb, h.float())
    return (post.unsqueeze(-1) * x.float().unsqueeze(1) + mixed).to(h.dtype)


def hc_head(h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float) -> Tensor:
    """Reference of `KernelTable.hc_head`: return the weighted sum [T, d] of the streams h [T, n,
    d], with the weights by which `hc_pre` makes a layer's input.
    """
    pre = torch.sigmoid(_mixes(h, fn, norm_eps) * scale + base) + hc_eps
    return (pre.unsqueeze(-1) * h.float()).sum(1).to(h.dtype)


def _mixes(h: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Return float32 [T, outputs]: the products of `fn` [outputs, n d] with all n streams of each
    token of h [T, n, d], together scaled to root mean square 1.
    """
    flat = h.float().flatten(1)
    return F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps), fn.float())
