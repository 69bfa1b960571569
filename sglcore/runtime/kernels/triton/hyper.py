"""Hyper-connections: mixing weights of a token's streams in two launches, their update in one."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels import reference_sparse as reference
from sglcore.runtime.kernels.triton.products import NARROWEST_DOT, wide_dot
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def hc_mix_kernel(
    h,
    fn,
    mixes,
    tokens,
    stride,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute the products fn h and the sum of squares of h that `hc_pre_kernel` needs, in splits
    of SPLIT elements of a token's streams.

    h is [tokens, SIZE] and fn [OUTPUTS, SIZE] with SIZE = n * d; mixes is float32 [splits, tokens,
    OUTPUTS + 1], the squares last. One program per ROWS tokens and split. Reads at least h once,
    and fn once for each tile of tokens, from the cache.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output, depth = tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    live, first = token < tokens, tl.program_id(1) * SPLIT
    row = token.to(tl.int64)
    total, square = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS], tl.float32)
    for at in range(0, SPLIT, DEPTH):
        part = first + at + depth
        inside = (part < SIZE) & (at + depth < SPLIT)
        place = h + row[:, None] * stride + part[None, :]
        values = tl.load(place, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        weights = fn + output[None, :] * SIZE + part[:, None]
        loaded = inside[:, None] & (output < OUTPUTS)[None, :]
        total += wide_dot(values, tl.load(weights, mask=loaded, other=0.0))
        square += tl.sum(values * values, axis=1)
    line = mixes + (tl.program_id(1) * tokens + row) * (OUTPUTS + 1)
    tl.store(line[:, None] + output[None, :], total, mask=live[:, None] & (output < OUTPUTS)[None, :])
    tl.store(line + OUTPUTS, square, mask=live)


@triton.jit
def summed(mixes, places, inside, splits, apart):
    """Return the sum of mixes[places] over the splits, which are `apart` elements from each other;
    0 where not inside.
    """
    total = tl.load(mixes + places, mask=inside, other=0.0)
    for split in range(1, splits):
        total += tl.load(mixes + split * apart + places, mask=inside, other=0.0)
    return total


@triton.jit
def sums_to_one(matrix, inside, eps, AXIS: tl.constexpr):
    """Return `matrix` divided by its sums over AXIS plus eps; 0 where not inside."""
    return tl.where(inside, matrix / (tl.expand_dims(tl.sum(matrix, axis=AXIS), AXIS) + eps), 0.0)


@triton.jit
def store_ways_back(
    mixes,
    base,
    scale,
    post,
    comb,
    token,
    near,
    splits,
    apart,
    eps,
    iters,
    STREAMS: tl.constexpr,
    LINES: tl.constexpr,
):
    """Store the `post` and `comb` of a token that `KernelTable.hc_pre` defines; only the token's
    first program does so.

    `mixes` is the token's row of what `hc_mix_kernel` wrote, `near` 1 / rms of its streams. The
    rows and columns of `comb` are normalised in turn (Sinkhorn and Knopp 1967).
    """
    if tl.program_id(1) == 0:
        stream, other = tl.arange(0, LINES), tl.arange(0, LINES)
        is_stream = stream < STREAMS
        is_pair = is_stream[:, None] & (other < STREAMS)[None, :]
        back = STREAMS + stream
        again = summed(mixes, back, is_stream, splits, apart) * near * tl.load(scale + 1)
        again = 2.0 * tl.sigmoid(again + tl.load(base + back, mask=is_stream, other=0.0))
        tl.store(post + token * STREAMS + stream, again, mask=is_stream)
        place = stream[:, None] * STREAMS + other[None, :]
        pairs = summed(mixes, 2 * STREAMS + place, is_pair, splits, apart) * near * tl.load(scale + 2)
        pairs += tl.load(base + 2 * STREAMS + place, mask=is_pair, other=0.0)
        pairs = tl.where(is_pair, pairs, -1e30)
        shares = tl.exp(pairs - tl.max(pairs, axis=1)[:, None])
        shares = tl.where(is_pair, shares / tl.sum(shares, axis=1)[:, None] + eps, 0.0)
        shares = sums_to_one(shares, is_pair, eps, 0)
        for _ in range(1, iters):
            shares = sums_to_one(sums_to_one(shares, is_pair, eps, 1), is_pair, eps, 0)
        tl.store(comb + token * (STREAMS * STREAMS) + place, shares, mask=is_pair)


@triton.jit
def hc_pre_kernel(
    h,
    mixes,
    base,
    scale,
    out,
    post,
    comb,
    splits,
    apart,
    stride,
    norm_eps,
    eps,
    iters,
    STREAMS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_MATRIX: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements `KernelTable.hc_pre` (HAS_MATRIX) and `hc_head`, from the `mixes` of
    `hc_mix_kernel`: `out` [T, SIZE] is the weighted sum of the streams h [T, STREAMS, SIZE].

    `post` and `comb` are written by the first program of a token; None for `hc_head`. One program
    per token and BLOCK columns. Reads at least h once and writes one stream.
    """
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, LINES)
    OUTPUTS: tl.constexpr = (2 + STREAMS) * STREAMS if HAS_MATRIX else STREAMS
    mixes += token * (OUTPUTS + 1)
    is_stream = stream < STREAMS
    square = summed(mixes, OUTPUTS, True, splits, apart)
    near = tl.rsqrt(square / (STREAMS * SIZE) + norm_eps)
    pre = summed(mixes, stream, is_stream, splits, apart) * near * tl.load(scale)
    pre = tl.sigmoid(pre + tl.load(base + stream, mask=is_stream, other=0.0)) + eps
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = is_stream[:, None] & (column < SIZE)[None, :]
    streams = tl.load(h + token * stride + stream[:, None] * SIZE + column[None, :], mask=inside, other=0.0)
    total = narrow(tl.sum(streams.to(tl.float32) * pre[:, None], axis=0), out.dtype.element_ty)
    tl.store(out + token * SIZE + column, total, mask=column < SIZE)
    if HAS_MATRIX:
        store_ways_back(mixes, base, scale, post, comb, token, near, splits, apart, eps, iters, STREAMS, LINES)


@triton.jit
def hc_post_kernel(
    x,
    h,
    post,
    comb,
    out,
    x_stride,
    h_stride,
    STREAMS: tl.constexpr,
    SIZE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements `KernelTable.hc_post`; `out` [T, STREAMS, SIZE] is its result.

    One program per token and BLOCK columns. Reads at least x and h once, and writes STREAMS * SIZE
    elements for each token.
    """
    token = tl.program_id(0).to(tl.int64)
    stream, column = tl.arange(0, LINES), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_stream = stream < STREAMS
    inside = is_stream[:, None] & (column < SIZE)[None, :]
    place = stream[:, None] * SIZE + column[None, :]
    result = tl.load(x + token * x_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    share = tl.load(post + token * STREAMS + stream, mask=is_stream, other=0.0)
    total = share[:, None] * result[None, :]
    for each in tl.static_range(STREAMS):
        source = tl.load(h + token * h_stride + each * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
        line = comb + (token * STREAMS + each) * STREAMS + stream
        total += tl.load(line, mask=is_stream, other=0.0)[:, None] * source[None, :]
    tl.store(out + token * (STREAMS * SIZE) + place, narrow(total, out.dtype.element_ty), mask=inside)


def hc_pre(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    tuning: Tuning = Tuning(),
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `KernelTable.hc_pre`: return the layer's input [T, d] and the float32 weights [T,
    n] and [T, n, n] for `hc_post`, from the streams h [T, n, d]; a token's streams are contiguous.

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference.hc_pre(h, fn, base, scale, norm_eps, hc_eps, iters)
    tokens, streams, _ = h.shape
    post = torch.empty(tokens, streams, dtype=torch.float32, device=h.device)
    comb = torch.empty(tokens, streams, streams, dtype=torch.float32, device=h.device)
    return _collapsed(h, fn, base, scale, post, comb, norm_eps, hc_eps, iters, tuning), post, comb


def hc_head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, tuning: Tuning = Tuning()
) -> Tensor:
    """Implement `KernelTable.hc_head`: return the weighted sum [T, d] of the streams h [T, n, d]; a
    token's streams are contiguous.

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference.hc_head(h, fn, base, scale, norm_eps, hc_eps)
    return _collapsed(h, fn, base, scale, None, None, norm_eps, hc_eps, 0, tuning)


def _collapsed(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    norm_eps: float,
    eps: float,
    iters: int,
    tuning: Tuning,
) -> Tensor:
    tokens, streams, size = h.shape
    out = torch.empty(tokens, size, dtype=h.dtype, device=h.device)
    if not tokens:
        return out
    outputs = fn.shape[0]
    held = min(64, max(NARROWEST_DOT, power_of_two(tiles(tokens, tuning.programs))))
    splits = max(1, min(tiles(streams * size, tuning.hc_split), tuning.programs // tiles(tokens, held)))
    mixes = torch.empty(splits, tokens, outputs + 1, dtype=torch.float32, device=h.device)
    hc_mix_kernel[(tiles(tokens, held), splits)](
        h,
        fn,
        mixes,
        tokens,
        h.stride(0),
        OUTPUTS=outputs,
        SIZE=streams * size,
        SPLIT=tiles(streams * size, splits),
        ROWS=held,
        COLUMNS=max(NARROWEST_DOT, power_of_two(outputs)),
        DEPTH=tuning.hc_depth,
        **tuning.options(tuning.hc_pre),
    )
    lines = power_of_two(streams)
    block = min(power_of_two(size), max(1, tuning.elements // lines))
    hc_pre_kernel[(tokens, tiles(size, block))](
        h,
        mixes,
        base,
        scale,
        out,
        post,
        comb,
        splits,
        mixes.stride(0),
        h.stride(0),
        norm_eps,
        eps,
        iters,
        STREAMS=streams,
        SIZE=size,
        HAS_MATRIX=comb is not None,
        LINES=lines,
        BLOCK=block,
        **tuning.options(tuning.hc_pre),
    )
    return out


def hc_post(x: Tensor, h: Tensor, post: Tensor, comb: Tensor, tuning: Tuning = Tuning()) -> Tensor:
    """Implement `KernelTable.hc_post`: return the new streams [T, n, d], from the layer's result x
    [T, d] and the streams h by the weights of `hc_pre`; a token's streams are contiguous.

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference.hc_post(x, h, post, comb)
    tokens, streams, size = h.shape
    out = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    if not tokens:
        return out
    lines = power_of_two(streams)
    block = min(power_of_two(size), max(1, tuning.elements // lines))
    hc_post_kernel[(tokens, tiles(size, block))](
        x,
        h,
        post,
        comb,
        out,
        x.stride(0),
        h.stride(0),
        STREAMS=streams,
        SIZE=size,
        LINES=lines,
        BLOCK=block,
        **tuning.options(tuning.hc_post),
    )
    return out
