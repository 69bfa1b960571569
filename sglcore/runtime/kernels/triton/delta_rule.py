"""The gated delta rule: one token per row, or the tokens of a row in chunks, which are computed by
matrix products.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.reference_recurrent import L2_EPS
from sglcore.runtime.kernels.triton.products import NARROWEST_DOT, rounded_dot
from sglcore.runtime.kernels.triton.rounding import narrow, rounded
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles

EPS = tl.constexpr(L2_EPS)


@triton.jit
def softplus(x):
    """Return log(1 + e^x); x itself where that is the same in float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def gates(a, b, a_log, dt_bias, token, a_stride, b_stride, head, mask):
    """Return g = -exp(a_log) softplus(a + dt_bias), the logarithm of the decay, and beta =
    sigmoid(b), the strength of the update, of one head at `token`, one index or several.

    Both are float32, and 0 where `mask` is false.
    """
    rate = tl.exp(tl.load(a_log + head))
    wide = tl.load(a + token * a_stride + head, mask=mask, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    strength = tl.load(b + token * b_stride + head, mask=mask, other=0.0).to(tl.float32)
    beta = rounded(1.0 / (1.0 + tl.exp(-strength)), b.dtype.element_ty)
    return tl.where(mask, -rate * softplus(wide), 0.0), tl.where(mask, beta, 0.0)


@triton.jit
def decays_between(total, i):
    """Return float32 [later, earlier]: e^(total[later] - total[earlier]), and 0 where `later` comes
    before `earlier`.

    `total` is the cumulative log decay of each token in a chunk, `i` their indices.
    """
    return tl.exp(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf")))


@triton.jit
def inverse_of(lower, i, CHUNK: tl.constexpr):
    """Return the inverse of I + lower, computed row by row.

    `lower` is float32 [CHUNK, CHUNK], zero on and above the diagonal; `i` is 0 ... CHUNK - 1.
    """
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for step in range(1, CHUNK):
        factors = tl.sum(tl.where(i[:, None] == step, lower, 0.0), axis=0)
        known = tl.sum(factors[:, None] * inverse, axis=0)
        inverse -= tl.where(i[:, None] == step, known[None, :], 0.0)
    return inverse


@triton.jit
def load_heads(rows, whose, mask, scale):
    """Load one head's queries or keys of a chunk as float32 [tokens, columns], each token's scaled
    to length `scale`.

    `rows` [tokens, 1] are the addresses of the tokens, `whose` the head's columns; masked elements
    are 0.
    """
    x = tl.load(rows + whose[None, :], mask=mask, other=0.0).to(tl.float32)
    return x * (tl.rsqrt(tl.sum(x * x, axis=1) + EPS) * scale)[:, None]


@triton.jit
def delta_step_kernel(
    qkv,
    a,
    b,
    a_log,
    dt_bias,
    states,
    slots,
    targets,
    out,
    qkv_stride,
    a_stride,
    b_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements `KernelTable.gated_delta_rule` for one token per row; updates `states`, writes
    `out`.

    K = KEY, V = SIZE, `scale` is K^-0.5, and `targets` are `slots` if the states stay in their
    slots. One program per row, head and BLOCK columns of the state. Reads and writes at least rows
    * HEADS * KEY * SIZE float32.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, column = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot, target = tl.load(slots + row).to(tl.int64), tl.load(targets + row)
    # A padding row has no keys and no values.
    keys, values = key < tl.where(slot > 0, KEY, 0), column < tl.where(slot > 0, SIZE, 0)
    g, beta = gates(a, b, a_log, dt_bias, row, a_stride, b_stride, head, slot > 0)
    whose = qkv + row * qkv_stride + (head // (HEADS // KEY_HEADS)) * KEY + key
    q = tl.load(whose, mask=keys, other=0.0).to(tl.float32)
    k = tl.load(whose + KEY_HEADS * KEY, mask=keys, other=0.0).to(tl.float32)
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
    given = qkv + row * qkv_stride + 2 * KEY_HEADS * KEY + head * SIZE + column
    v = tl.load(given, mask=values, other=0.0).to(tl.float32)
    inside = keys[:, None] & values[None, :]
    place = states + ((slot * HEADS + head) * KEY + key)[:, None] * SIZE + column[None, :]
    state = tl.load(place, mask=inside, other=0.0) * tl.exp(g)
    delta = (v - tl.sum(state * k[:, None], axis=0)) * beta
    state += k[:, None] * delta[None, :]
    changed = inside & (key < tl.where(target > 0, KEY, 0))[:, None]
    tl.store(place + (target - slot) * (HEADS * KEY * SIZE), state, mask=changed)
    result = tl.sum(state * q[:, None], axis=0)
    tl.store(out + (row * HEADS + head) * SIZE + column, narrow(result, out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def delta_chunks_kernel(
    qkv,
    a,
    b,
    a_log,
    dt_bias,
    states,
    slots,
    targets,
    starts,
    lengths,
    out,
    qkv_stride,
    a_stride,
    b_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Implements `KernelTable.gated_delta_rule` for rows with `starts` and `lengths`; updates
    `states`, writes `out`, which starts as zeros. Other arguments are those of `delta_step_kernel`.

    Yang et al. 2024, section 3. With t the cumulative log decay since the start of the chunk, the
    updates of a chunk are the solution U of (I + A) U = beta (V - e^t K S), A[i, j] = beta_i e^(t_i
    - t_j) k_i k_j for j < i. One program per row, head and BLOCK columns of the state; it computes
    the row's chunks in order. Reads at least every input and the state once.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, column = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot, target = tl.load(slots + row).to(tl.int64), tl.load(targets + row)
    start, length = tl.load(starts + row).to(tl.int64), tl.where(slot > 0, tl.load(lengths + row), 0)
    i, whose = tl.arange(0, CHUNK), (head // (HEADS // KEY_HEADS)) * KEY + key
    inside = (key < tl.where(slot > 0, KEY, 0))[:, None] & (column < SIZE)[None, :]
    place = states + ((slot * HEADS + head) * KEY + key)[:, None] * SIZE + column[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    dtype: tl.constexpr = qkv.dtype.element_ty
    for at in range(0, length, CHUNK):
        token, live = start + at + i, at + i < length
        g, beta = gates(a, b, a_log, dt_bias, token, a_stride, b_stride, head, live)
        rows = qkv + token[:, None] * qkv_stride
        keys = live[:, None] & (key < KEY)[None, :]
        q = load_heads(rows, whose, keys, scale)
        k = load_heads(rows, KEY_HEADS * KEY + whose, keys, 1.0)
        values = live[:, None] & (column < SIZE)[None, :]
        v = tl.load(rows + (2 * KEY_HEADS * KEY + head * SIZE + column)[None, :], mask=values, other=0.0).to(tl.float32)
        total, whole = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
        since = decays_between(total, i)
        lower = rounded_dot(k, tl.trans(k), dtype) * since * beta[:, None]
        inverse = inverse_of(tl.where(i[:, None] > i[None, :], lower, 0.0), i, CHUNK)
        wanted = v - rounded_dot(k * tl.exp(total)[:, None], state, dtype)
        update = rounded_dot(inverse, wanted * beta[:, None], dtype)
        seen = rounded_dot(q, tl.trans(k), dtype) * since
        result = rounded_dot(q * tl.exp(total)[:, None], state, dtype) + rounded_dot(seen, update, dtype)
        state = state * tl.exp(whole) + rounded_dot(tl.trans(k * tl.exp(whole - total)[:, None]), update, dtype)
        to = out + (token * HEADS + head)[:, None] * SIZE + column[None, :]
        tl.store(to, narrow(result, out.dtype.element_ty), mask=values)
    changed = inside & (key < tl.where(target > 0, KEY, 0))[:, None]
    tl.store(place + (target - slot) * (HEADS * KEY * SIZE), state, mask=changed)


def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    targets: Tensor | None = None,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.gated_delta_rule`: return [T, H * V]; `states` float32 [S, H, K, V]
    are read at the rows' slots and updated in place (with `targets`, at those).

    With `starts` and `lengths` a row's tokens are computed in chunks; without, row r is token r.
    """
    tokens, (_, heads, key_size, size) = qkv.shape[0], states.shape
    given = qkv, a, b, a_log, dt_bias, states, slots, slots if targets is None else targets
    strides = qkv.stride(0), a.stride(0), b.stride(0), key_size**-0.5
    key_heads = (qkv.shape[1] - heads * size) // (2 * key_size)
    shape = tokens, heads * size
    out = qkv.new_empty(shape) if starts is None else torch.zeros(shape, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return out
    block = max(min(power_of_two(size), tuning.state_columns), NARROWEST_DOT)
    keys = max(power_of_two(key_size), NARROWEST_DOT)
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "KEY": key_size, "SIZE": size, "BLOCK_K": keys}
    options = tuning.options(tuning.gated_delta_rule)
    grid = slots.shape[0], heads, tiles(size, block)
    if starts is None:
        delta_step_kernel[grid](*given, out, *strides, **sizes, BLOCK=block, **options)
    else:
        chunk = {"BLOCK": block, "CHUNK": NARROWEST_DOT}
        delta_chunks_kernel[grid](*given, starts, lengths, out, *strides, **sizes, **chunk, **options)
    return out
