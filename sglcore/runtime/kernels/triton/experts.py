"""MoE by grouped products. A choice is one of the K experts of a token: number token * K + k.

Choices are sorted by expert into tiles on the device; then two grouped products and a sum. No shape
and no launch depends on the routing, so all of it can be captured; programs of unused tiles end at
once.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.reference_kernels import clamped_moe as reference_clamped_moe
from sglcore.runtime.kernels.reference_kernels import limited_moe as reference_limited_moe
from sglcore.runtime.kernels.reference_kernels import mxfp4_moe as reference_mxfp4_moe
from sglcore.runtime.kernels.triton.activation import silu_times
from sglcore.runtime.kernels.triton.products import NARROWEST_DOT, wide_dot
from sglcore.runtime.kernels.triton.rounding import narrow, rounded
from sglcore.runtime.kernels.triton.tuning import MoeTile, Tuning, power_of_two, read_launches, tiles

SCANNED = 1024
"""Choices per iteration of the sort."""


@triton.jit
def sort_kernel(
    ids,
    order,
    owners,
    choices,
    most_tiles,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sort the choices by expert into tiles of ROWS choices with one expert each.

    `ids` int [choices] are read. `order` int32 [most_tiles * ROWS] gets the numbers of the choices,
    each expert's padded to whole tiles with the value `choices`; `owners` int32 [most_tiles] gets
    the expert of each tile, -1 after the last. Choices with the id -1 are left out. One program per
    expert. Reads at least 8 * choices bytes per expert, from the cache after the first.
    """
    expert = tl.program_id(0)
    every = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for at in range(0, choices, BLOCK):
        choice = at + tl.arange(0, BLOCK)
        chosen = tl.load(ids + choice, mask=choice < choices, other=-1).to(tl.int32)
        counts += tl.histogram(tl.where(chosen < 0, EXPERTS, chosen), BINS)
    room = tl.where(every < EXPERTS, (counts + ROWS - 1) // ROWS, 0)
    first = tl.sum(tl.where(every < expert, room, 0), axis=0)
    after = first + tl.sum(tl.where(every == expert, room, 0), axis=0)
    for tile in range(first, after):
        tl.store(owners + tile, expert)
    if expert == EXPERTS - 1:
        for tile in range(after, most_tiles):
            tl.store(owners + tile, -1)
    place = first * ROWS
    for at in range(0, choices, BLOCK):
        choice = at + tl.arange(0, BLOCK)
        chosen = tl.load(ids + choice, mask=choice < choices, other=-1).to(tl.int32)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, axis=0) - 1, choice, mask=chosen == expert)
        place += tl.sum(mine, axis=0)
    rest = place + tl.arange(0, ROWS)
    tl.store(order + rest, choices + tl.zeros([ROWS], tl.int32), mask=rest < after * ROWS)


@triton.jit
def mxfp4_tile(codes, scales, line, part, inside, WIDTH: tl.constexpr):
    """Return float32 [parts, lines] of an MXFP4 weight [lines, WIDTH], zero where not `inside`.

    `codes` has WIDTH / 2 bytes per line and `scales` WIDTH / 32; `line` and `part` are the indices
    of rows and of columns.
    """
    place, depth = line[None, :], part[:, None]
    byte = tl.load(codes + place * (WIDTH // 2) + depth // 2, mask=inside, other=0).to(tl.int32)
    code = (byte >> (depth % 2 * 4)) & 15
    exponent = tl.load(scales + place * (WIDTH // 32) + depth // 32, mask=inside, other=0).to(tl.float32) - 127.0
    power, half = (code & 7) >> 1, (code & 1).to(tl.float32) * 0.5
    size = tl.where(power == 0, half, (1.0 + half) * tl.exp2(power.to(tl.float32) - 1.0))
    return tl.where(code >= 8, -size, size) * tl.exp2(exponent)


@triton.jit
def weight_tile(
    places, codes, scales, line, part, inside, dtype: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr
):
    """Return [parts, lines] of a weight [lines, WIDTH], zero where not `inside`.

    PACKED: dequantised by `mxfp4_tile` and rounded to dtype. Otherwise the plain values at the
    addresses `places`, in their own dtype.
    """
    if PACKED:
        tile = mxfp4_tile(codes, scales, line, part, inside, WIDTH).to(dtype)
    else:
        tile = tl.load(places, mask=inside, other=0.0)
    return tile


@triton.jit
def gate_up_kernel(
    hidden,
    w13,
    s13,
    b13,
    order,
    owners,
    out,
    choices,
    stride,
    alpha,
    limit,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CLAMPED: tl.constexpr,
    PACKED: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """Compute the first product of an MoE and its activation, for the tiles of `sort_kernel`: the
    row of each choice in `hidden` by the w13 of its expert to out [tiles * ROWS, SIZE].

    CHOICES is K, `choices` T * K, SIZE is I. CLAMPED: the activation of `clamped_moe`, for
    interleaved gate and up rows; otherwise silu(gate) * up, with the limit of `limited_moe` if
    LIMITED. PACKED: `mxfp4_moe`; otherwise `s13` is not read. One program per tile and COLUMNS
    columns. Reads at least the w13 of each chosen expert once; above some hundred rows per expert
    the limit is the matrix unit.
    """
    tile = tl.program_id(0)
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        return
    line = tile * ROWS + tl.arange(0, ROWS)
    choice = tl.load(order + line)
    live = choice < choices
    token = tl.where(live, choice // CHOICES, 0).to(tl.int64)
    column, depth = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    gate, up = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    gate_row, apart = column * 2 if CLAMPED else column, 1 if CLAMPED else SIZE
    first = expert * (2 * SIZE) + gate_row
    for at in range(0, HIDDEN, DEPTH):
        part = at + depth
        loaded = live[:, None] & (part < HIDDEN)[None, :]
        rows = tl.load(hidden + token[:, None] * stride + part[None, :], mask=loaded, other=0.0)
        inside = (part < HIDDEN)[:, None] & (column < SIZE)[None, :]
        weight = w13 + expert * (2 * SIZE * HIDDEN) + gate_row[None, :] * HIDDEN + part[:, None]
        gate += wide_dot(rows, weight_tile(weight, w13, s13, first, part, inside, rows.dtype, HIDDEN, PACKED))
        beside, next_line = weight + apart * HIDDEN, first + apart
        up += wide_dot(rows, weight_tile(beside, w13, s13, next_line, part, inside, rows.dtype, HIDDEN, PACKED))
    dtype = out.dtype.element_ty
    if CLAMPED:
        bias = b13 + expert * (2 * SIZE) + gate_row
        gate += tl.load(bias, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + 1, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        gate = tl.minimum(rounded(gate, dtype), limit)
        up = tl.minimum(tl.maximum(rounded(up, dtype), -limit), limit)
        active = rounded(gate / (1.0 + tl.exp(-alpha * gate)), dtype) * rounded(up + 1.0, dtype)
    else:
        active = silu_times(gate, up, limit, dtype, LIMITED)
    place = out + line.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(place, narrow(active, dtype), mask=live[:, None] & (column < SIZE)[None, :])


@triton.jit
def down_kernel(
    active,
    w2,
    s2,
    b2,
    weights,
    order,
    owners,
    out,
    choices,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CLAMPED: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Compute the second product of an MoE: each row of `active`, which `gate_up_kernel` wrote, by
    w2 and times the weight of its choice, to out [choices, HIDDEN].

    `weights` are the routing weights [T, K]; `order` and `owners` are those of `sort_kernel`.
    Choices without an expert are not written. One program per tile and COLUMNS columns. Reads at
    least the w2 of each chosen expert once.
    """
    tile = tl.program_id(0)
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        return
    line = tile * ROWS + tl.arange(0, ROWS)
    choice = tl.load(order + line)
    live = choice < choices
    column, depth = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, SIZE, DEPTH):
        part = at + depth
        loaded = live[:, None] & (part < SIZE)[None, :]
        rows = tl.load(active + line.to(tl.int64)[:, None] * SIZE + part[None, :], mask=loaded, other=0.0)
        inside = (part < SIZE)[:, None] & (column < HIDDEN)[None, :]
        weight = w2 + expert * (HIDDEN * SIZE) + column[None, :] * SIZE + part[:, None]
        line_of = expert * HIDDEN + column
        total += wide_dot(rows, weight_tile(weight, w2, s2, line_of, part, inside, rows.dtype, SIZE, PACKED))
    if CLAMPED:
        bias = tl.load(b2 + expert * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        total += bias.to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    share = tl.load(weights + choice, mask=live, other=0.0).to(tl.float32)
    place = out + choice.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    value = narrow(rounded(total, dtype) * share[:, None], dtype)
    tl.store(place, value, mask=live[:, None] & (column < HIDDEN)[None, :])


@triton.jit
def sum_kernel(
    parts, ids, out, tokens, CHOICES: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the CHOICES rows of each token in `parts`, which `down_kernel` wrote, in float32 to out
    [tokens, HIDDEN]. Rows of choices with the id -1 are not read.

    One program per ROWS tokens and BLOCK columns. Reads at least CHOICES rows and writes one for
    each token.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < HIDDEN)[None, :]
    token = token.to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        line = token * CHOICES + choice
        has = tl.load(ids + line, mask=token < tokens, other=-1) >= 0
        place = parts + line[:, None] * HIDDEN + column[None, :]
        total += tl.load(place, mask=inside & has[:, None], other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * HIDDEN + column[None, :], narrow(total, out.dtype.element_ty), mask=inside)


def moe(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, tuning: Tuning = Tuning()) -> Tensor:
    """Implement `KernelTable.moe`: hidden [T, H], weights and ids [T, K], w13 [E, 2 I, H] and w2
    [E, H, I] to a new tensor [T, H].

    While tracing, a compiler gets one operation, `moe_op`.
    """
    return _moe(hidden, weights, ids, w13, w2, None, tuning)


def limited_moe(
    hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, limit: float, tuning: Tuning = Tuning()
) -> Tensor:
    """Implement `KernelTable.limited_moe` with the kernels of `moe`: gate at most `limit`, up
    within +-`limit`.

    While tracing, a compiler gets the reference.
    """
    if torch.compiler.is_compiling():
        return reference_limited_moe(hidden, weights, ids, w13, w2, limit)
    return _moe(hidden, weights, ids, w13, w2, None, tuning, limit)


def clamped_moe(
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    b13: Tensor,
    w2: Tensor,
    b2: Tensor,
    alpha: float,
    limit: float,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.clamped_moe` with the kernels of `moe`: gate and up rows of w13 are
    interleaved, and experts have biases b13 [E, 2 I] and b2 [E, H].

    While tracing, a compiler gets the reference.
    """
    if torch.compiler.is_compiling():
        return reference_clamped_moe(hidden, weights, ids, w13, b13, w2, b2, alpha, limit)
    return _moe(hidden, weights, ids, w13, w2, Clamp(b13, b2, alpha, limit, w13, w2), tuning)


def mxfp4_moe(
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    s13: Tensor,
    b13: Tensor,
    w2: Tensor,
    s2: Tensor,
    b2: Tensor,
    alpha: float,
    limit: float,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.mxfp4_moe` with the kernels of `moe`: as `clamped_moe`, with w13 and
    w2 in MXFP4, codes uint8 [E, rows, columns / 32, 16] and scales s13 and s2.

    While tracing, a compiler gets the reference.
    """
    if torch.compiler.is_compiling():
        return reference_mxfp4_moe(hidden, weights, ids, w13, s13, b13, w2, s2, b2, alpha, limit)
    return _moe(hidden, weights, ids, w13, w2, Clamp(b13, b2, alpha, limit, s13, s2), tuning)


class Clamp(NamedTuple):
    """Arguments that `clamped_moe` and `mxfp4_moe` have in addition to those of `moe`.

    Only `mxfp4_moe` has scales; the others pass w13 and w2 as `s13` and `s2`, which the kernels do
    not read then.
    """

    b13: Tensor
    b2: Tensor
    alpha: float
    limit: float
    s13: Tensor
    s2: Tensor


def _moe(
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    clamp: Clamp | None,
    tuning: Tuning,
    most: float | None = None,
) -> Tensor:
    average = ids.numel() // w13.shape[0]
    tile = next(tile for tile in tuning.moe if average <= tile.most_rows)
    if torch.compiler.is_compiling():
        sizes = [tile.rows, tile.columns, tile.depth_bytes, tuning.lanes, tuning.elements]
        # On one line, because a compiler quotes it in a comment of the code that it generates.
        launches = f"[{tile.config.text}, {tuning.moe_sort.text}, {tuning.moe_sum.text}]"
        return torch.ops.sglcore.triton_moe(hidden, weights, ids, w13, w2, sizes, launches)
    return moe_in_tiles(hidden, weights, ids, w13, w2, clamp, tile, tuning, most)


@torch.library.custom_op("sglcore::triton_moe", mutates_args=())
def moe_op(
    hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, sizes: list[int], launches: str
) -> Tensor:
    """Compute `KernelTable.moe` as one torch operation, `sglcore::triton_moe`; return [T, H].

    `sizes` are rows, columns and depth_bytes of the `MoeTile`, then lanes and elements of the
    `Tuning`. `launches` is a JSON list of the launches of the products, the sort and the sum.
    """
    rows, columns, depth_bytes, lanes, elements = sizes
    products, sort, total = read_launches(launches)
    tuning = Tuning(lanes=lanes, elements=elements, moe_sort=sort, moe_sum=total)
    tile = MoeTile(0, rows, columns, depth_bytes, products)
    return moe_in_tiles(hidden, weights, ids, w13, w2, None, tile, tuning)


@moe_op.register_fake
def _(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, sizes: list[int], launches: str) -> Tensor:
    return hidden.new_empty(hidden.shape)


def _in_tiles(ids: Tensor, experts: int, rows: int, tuning: Tuning) -> tuple[Tensor, Tensor]:
    """Return the `order` int32 [tiles * rows] and the `owners` int32 [tiles] of `sort_kernel`, for
    tiles of `rows` choices.
    """
    choices = ids.numel()
    # Every tile holds a choice, and every expert's tiles but its last are full.
    most = min(choices, tiles(choices, rows) + experts)
    order = torch.empty(most * rows, dtype=torch.int32, device=ids.device)
    owners = torch.empty(most, dtype=torch.int32, device=ids.device)
    sort_kernel[(experts,)](
        ids,
        order,
        owners,
        choices,
        most,
        EXPERTS=experts,
        BINS=power_of_two(experts + 1),
        BLOCK=SCANNED,
        ROWS=rows,
        **tuning.options(tuning.moe_sort),
    )
    return order, owners


def moe_in_tiles(
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    clamp: Clamp | None,
    tile: MoeTile,
    tuning: Tuning,
    most: float | None = None,
) -> Tensor:
    """Compute an MoE entry by four kernels: sort, gate and up, down, sum. Return a new tensor [T,
    H] of hidden's dtype.

    `clamp` is None for `moe` and `limited_moe`; `most` is the limit of `limited_moe`, None for the
    others. Weights with four dimensions are in MXFP4.
    """
    tokens, width = hidden.shape
    experts, size, choices = w13.shape[0], w2.shape[2] * (1 if w2.dim() == 3 else 32), ids.numel()
    out = torch.empty(tokens, width, dtype=hidden.dtype, device=hidden.device)
    if not tokens:
        return out
    ids, weights = ids.contiguous(), weights.contiguous()
    rows, depth = tile.rows, max(NARROWEST_DOT, tile.depth_bytes // hidden.itemsize)
    order, owners = _in_tiles(ids, experts, rows, tuning)
    used = owners.numel()
    active = torch.empty(used * rows, size, dtype=hidden.dtype, device=hidden.device)
    shape = {"SIZE": size, "HIDDEN": width, "ROWS": rows, "COLUMNS": tile.columns, "DEPTH": depth}
    shape |= {"CLAMPED": clamp is not None, "PACKED": w2.dim() > 3, **tuning.options(tile.config)}
    stride, per_token = hidden.stride(0), ids.shape[1]
    b13, b2, alpha, limit, s13, s2 = Clamp(w13, w2, 0.0, most or 0.0, w13, w2) if clamp is None else clamp
    given = hidden, w13, s13, b13, order, owners, active, choices, stride, alpha, limit
    gate_up_kernel[(used, tiles(size, tile.columns))](*given, CHOICES=per_token, LIMITED=most is not None, **shape)
    parts = torch.empty(choices, width, dtype=hidden.dtype, device=hidden.device)
    down_kernel[(used, tiles(width, tile.columns))](active, w2, s2, b2, weights, order, owners, parts, choices, **shape)
    block = min(power_of_two(width), tuning.elements)
    held = tuning.rows(block, tokens)
    sum_kernel[(tiles(tokens, held), tiles(width, block))](
        parts,
        ids,
        out,
        tokens,
        CHOICES=per_token,
        HIDDEN=width,
        ROWS=held,
        BLOCK=block,
        **tuning.options(tuning.moe_sum),
    )
    return out
