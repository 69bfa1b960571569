"""The selective scan of Mamba 2.

One token per row, or a row's tokens in chunks computed by matrix products.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.delta_rule import decays_between, softplus
from sglcore.runtime.kernels.triton.products import NARROWEST_DOT, rounded_dot
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def time_step(dt, dt_bias, place, head, mask, dt_min, dt_max):
    """Return softplus(dt[place] + dt_bias[head]) within [dt_min, dt_max], float32; 0 where `mask`
    is false.
    """
    wide = softplus(tl.load(dt + place, mask=mask, other=0.0).to(tl.float32) + tl.load(dt_bias + head))
    return tl.where(mask, tl.minimum(tl.maximum(wide, dt_min), dt_max), 0.0)


@triton.jit
def scan_step_kernel(
    xbc,
    dt,
    a_log,
    d,
    dt_bias,
    states,
    slots,
    targets,
    out,
    xbc_stride,
    dt_stride,
    dt_min,
    dt_max,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Implements `KernelTable.selective_scan` for one token per row; updates `states`, writes
    `out`.

    P = SIZE, N = WIDTH, G = GROUPS, and `targets` are `slots` if the states stay in their slots.
    One program per row, head and BLOCK rows of the state. Reads and writes at least rows * HEADS *
    SIZE * WIDTH float32.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element, column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    slot, target = tl.load(slots + row).to(tl.int64), tl.load(targets + row)
    # A padding row has no values and no state.
    elements, columns = element < tl.where(slot > 0, SIZE, 0), column < tl.where(slot > 0, WIDTH, 0)
    step = time_step(dt, dt_bias, row * dt_stride + head, head, slot > 0, dt_min, dt_max)
    given = xbc + row * xbc_stride
    x = tl.load(given + head * SIZE + element, mask=elements, other=0.0).to(tl.float32)
    shared = given + HEADS * SIZE + (head // (HEADS // GROUPS)) * WIDTH + column
    before = tl.load(shared, mask=columns, other=0.0).to(tl.float32)
    after = tl.load(shared + GROUPS * WIDTH, mask=columns, other=0.0).to(tl.float32)
    inside = elements[:, None] & columns[None, :]
    place = states + ((slot * HEADS + head) * SIZE + element)[:, None] * WIDTH + column[None, :]
    state = tl.load(place, mask=inside, other=0.0) * tl.exp(-tl.exp(tl.load(a_log + head)) * step)
    state += (step * x)[:, None] * before[None, :]
    changed = inside & (element < tl.where(target > 0, SIZE, 0))[:, None]
    tl.store(place + (target - slot) * (HEADS * SIZE * WIDTH), state, mask=changed)
    result = tl.sum(state * after[None, :], axis=1) + tl.load(d + head) * x
    tl.store(out + (row * HEADS + head) * SIZE + element, narrow(result, out.dtype.element_ty), mask=element < SIZE)


@triton.jit
def scan_chunks_kernel(
    xbc,
    dt,
    a_log,
    d,
    dt_bias,
    states,
    slots,
    targets,
    starts,
    lengths,
    out,
    xbc_stride,
    dt_stride,
    dt_min,
    dt_max,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Implements `KernelTable.selective_scan` for rows with `starts` and `lengths`; updates
    `states`, writes `out`, which starts as zeros. Other arguments are those of `scan_step_kernel`.

    Dao and Gu 2024, section 6. One program per row, head and BLOCK rows of the state; it computes
    the row's chunks in order. Reads at least every input and the state once.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element, column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    slot, target = tl.load(slots + row).to(tl.int64), tl.load(targets + row)
    start, length = tl.load(starts + row).to(tl.int64), tl.where(slot > 0, tl.load(lengths + row), 0)
    rate, skip = -tl.exp(tl.load(a_log + head)), tl.load(d + head)
    shared = HEADS * SIZE + (head // (HEADS // GROUPS)) * WIDTH + column
    inside = (element < tl.where(slot > 0, SIZE, 0))[:, None] & (column < WIDTH)[None, :]
    place = states + ((slot * HEADS + head) * SIZE + element)[:, None] * WIDTH + column[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    i = tl.arange(0, CHUNK)
    dtype: tl.constexpr = xbc.dtype.element_ty
    for at in range(0, length, CHUNK):
        token, live = start + at + i, at + i < length
        step = time_step(dt, dt_bias, token * dt_stride + head, head, live, dt_min, dt_max)
        rows = xbc + token[:, None] * xbc_stride
        mine, states_of = live[:, None] & (element < SIZE)[None, :], live[:, None] & (column < WIDTH)[None, :]
        x = tl.load(rows + (head * SIZE + element)[None, :], mask=mine, other=0.0).to(tl.float32)
        before = tl.load(rows + shared[None, :], mask=states_of, other=0.0).to(tl.float32)
        after = tl.load(rows + (GROUPS * WIDTH + shared)[None, :], mask=states_of, other=0.0).to(tl.float32)
        total, whole = tl.cumsum(rate * step, axis=0), tl.sum(rate * step, axis=0)
        seen = rounded_dot(after, tl.trans(before), dtype) * decays_between(total, i)
        taken = x * step[:, None]
        result = (
            rounded_dot(seen, taken, dtype)
            + rounded_dot(after * tl.exp(total)[:, None], tl.trans(state), dtype)
            + skip * x
        )
        state = state * tl.exp(whole) + rounded_dot(tl.trans(taken * tl.exp(whole - total)[:, None]), before, dtype)
        to = out + (token * HEADS + head)[:, None] * SIZE + element[None, :]
        tl.store(to, narrow(result, out.dtype.element_ty), mask=mine)
    changed = inside & (element < tl.where(target > 0, SIZE, 0))[:, None]
    tl.store(place + (target - slot) * (HEADS * SIZE * WIDTH), state, mask=changed)


def selective_scan(
    xbc: Tensor,
    dt: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    states: Tensor,
    slots: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    targets: Tensor | None = None,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.selective_scan`: return [T, H * P]; `states` float32 [S, H, P, N] are
    read at the rows' slots and updated in place (with `targets`, at those).

    With `starts` and `lengths` a row's tokens are computed in chunks; without, row r is token r.
    """
    tokens, (_, heads, size, width) = xbc.shape[0], states.shape
    given, last = (
        (xbc, dt, a_log, d, dt_bias, states, slots, slots if targets is None else targets),
        (xbc.stride(0), dt.stride(0), dt_min, dt_max),
    )
    shape = tokens, heads * size
    out = xbc.new_empty(shape) if starts is None else torch.zeros(shape, dtype=xbc.dtype, device=xbc.device)
    if not tokens:
        return out
    sizes = {"GROUPS": (xbc.shape[1] - heads * size) // (2 * width), "HEADS": heads, "SIZE": size, "WIDTH": width}
    sizes["BLOCK_W"] = max(power_of_two(width), NARROWEST_DOT)
    block = max(min(power_of_two(size), tuning.state_columns), NARROWEST_DOT)
    grid, options = (slots.shape[0], heads, tiles(size, block)), tuning.options(tuning.selective_scan)
    if starts is None:
        scan_step_kernel[grid](*given, out, *last, **sizes, BLOCK=block, **options)
    else:
        chunk = {"BLOCK": block, "CHUNK": tuning.scan_tokens}
        scan_chunks_kernel[grid](*given, starts, lengths, out, *last, **sizes, **chunk, **options)
    return out
