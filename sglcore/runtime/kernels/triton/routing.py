"""Expert routing: softmax or square roots of softplus, with one row in registers."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.reference_kernels import hash_routing as reference_hash_routing
from sglcore.runtime.kernels.reference_kernels import sqrtsoftplus_routing as reference_sqrtsoftplus_routing
from sglcore.runtime.kernels.reference_kernels import top_k_routing as reference_top_k_routing
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def top_k_routing_kernel(
    logits,
    weights,
    ids,
    rows,
    stride,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.top_k_routing` with E = EXPERTS and K = CHOICES; writes `weights` and
    `ids`.

    Of equal probabilities the lower id comes first; ids are below EXPERTS even for a row of NaN.
    One program per ROWS rows. Reads at least rows * EXPERTS elements.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    row = row.to(tl.int64)
    place = logits + row[:, None] * stride + expert[None, :]
    wide = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    share = tl.exp(wide - tl.max(tl.where(inside, wide, -1e30), axis=1)[:, None])
    total = tl.sum(tl.where(inside, share, 0.0), axis=1)
    share = share / total[:, None]
    share = tl.where(share >= 0, share, 0.0)
    # The bits of non-negative floats order as the floats; the ids follow in the low bits, the
    # lowest id largest.
    order = share.to(tl.int32, bitcast=True).to(tl.int64) * BLOCK + (BLOCK - 1 - expert)[None, :]
    order = tl.where((expert < EXPERTS)[None, :], order, -1)
    chosen = tl.zeros([ROWS], tl.float32)
    if NORMALIZE:
        left = order
        for _ in tl.static_range(CHOICES):
            best = tl.max(left, axis=1)
            chosen += (best // BLOCK).to(tl.int32).to(tl.float32, bitcast=True)
            left = tl.where(left == best[:, None], -1, left)
    else:
        chosen += 1.0
    for choice in tl.static_range(CHOICES):
        best = tl.max(order, axis=1)
        weight = (best // BLOCK).to(tl.int32).to(tl.float32, bitcast=True) / chosen
        tl.store(weights + row * CHOICES + choice, narrow(weight, weights.dtype.element_ty), mask=row < rows)
        tl.store(ids + row * CHOICES + choice, BLOCK - 1 - best % BLOCK, mask=row < rows)
        order = tl.where(order == best[:, None], -1, order)


@triton.jit
def sqrt_softplus(x):
    """Return the square root of log(1 + exp(x)), accurate for small exp(x)."""
    small = tl.exp(x)
    whole = 1.0 + small
    near = tl.where(whole == 1.0, small, tl.log(whole) * (small / (whole - 1.0)))
    return tl.sqrt(tl.where(x > 20.0, x, near))


@triton.jit
def sqrtsoftplus_routing_kernel(
    logits,
    bias,
    weights,
    ids,
    rows,
    stride,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.sqrtsoftplus_routing` with E = EXPERTS and K = CHOICES; writes
    `weights` and `ids`.

    Of equal sums, which may be negative, the lower id comes first. One program per ROWS rows. Reads
    at least rows * EXPERTS elements.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, choice = tl.arange(0, BLOCK), tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    row = row.to(tl.int64)
    score = sqrt_softplus(
        tl.load(logits + row[:, None] * stride + expert[None, :], mask=inside, other=0.0).to(tl.float32)
    )
    bits = (score + tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)[None, :]).to(tl.int32, bitcast=True)
    # As integers, negative floats order in reverse until all bits except the sign are inverted.
    place = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    order = tl.where((expert < EXPERTS)[None, :], place * BLOCK + (BLOCK - 1 - expert)[None, :], -1)
    chosen, share = tl.zeros([ROWS, WIDE], tl.int32), tl.zeros([ROWS, WIDE], tl.float32)
    for each in tl.static_range(CHOICES):
        best = tl.max(order, axis=1)
        order = tl.where(order == best[:, None], -1, order)
        own = (BLOCK - 1 - best % BLOCK).to(tl.int32)
        value = tl.sum(tl.where(expert[None, :] == own[:, None], score, 0.0), axis=1)
        chosen = tl.where((choice == each)[None, :], own[:, None], chosen)
        share = tl.where((choice == each)[None, :], value[:, None], share)
    store_shares(share, chosen, weights, ids, row, choice, rows, scale, CHOICES)


@triton.jit
def store_shares(share, chosen, weights, ids, row, choice, rows, scale, CHOICES: tl.constexpr):
    """Store `share` float32 [ROWS, choices], each row divided by its sum and times `scale`, in
    `weights`, and the experts `chosen`, of the same shape, in `ids`.

    `row` and `choice` are the indices of rows and choices; those from `rows` and CHOICES on are not
    stored.
    """
    inside = (row < rows)[:, None] & (choice < CHOICES)[None, :]
    share = share / (tl.sum(share, axis=1)[:, None] + 1e-20) * scale
    place = row[:, None] * CHOICES + choice[None, :]
    tl.store(weights + place, narrow(share, weights.dtype.element_ty), mask=inside)
    tl.store(ids + place, chosen, mask=inside)


@triton.jit
def hash_routing_kernel(
    logits,
    input_ids,
    table,
    weights,
    ids,
    rows,
    stride,
    scale,
    CHOICES: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.hash_routing` with K = CHOICES; writes `weights` and `ids`.

    One program per ROWS rows. Reads at least two elements and writes two for each choice.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    choice = tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (choice < CHOICES)[None, :]
    token = tl.load(input_ids + row, mask=row < rows, other=0).to(tl.int64)
    row = row.to(tl.int64)
    chosen = tl.load(table + token[:, None] * CHOICES + choice[None, :], mask=inside, other=0)
    found = tl.load(logits + row[:, None] * stride + chosen, mask=inside, other=0.0).to(tl.float32)
    store_shares(tl.where(inside, sqrt_softplus(found), 0.0), chosen, weights, ids, row, choice, rows, scale, CHOICES)


def sqrtsoftplus_routing(
    logits: Tensor, bias: Tensor, k: int, scale: float, tuning: Tuning = Tuning()
) -> tuple[Tensor, Tensor]:
    """Implement `KernelTable.sqrtsoftplus_routing`: return weights [T, k] of the logits' dtype and
    expert ids int32 [T, k] for logits [T, E] and bias float32 [E].

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference_sqrtsoftplus_routing(logits, bias, k, scale)
    rows, experts = logits.shape
    weights, ids = _choices(logits, k)
    if not rows:
        return weights, ids
    block = power_of_two(experts)
    held = tuning.rows(block, rows)
    sqrtsoftplus_routing_kernel[(tiles(rows, held),)](
        logits,
        bias,
        weights,
        ids,
        rows,
        logits.stride(0),
        scale,
        EXPERTS=experts,
        BLOCK=block,
        CHOICES=k,
        WIDE=power_of_two(k),
        ROWS=held,
        **tuning.options(tuning.top_k_routing),
    )
    return weights, ids


def hash_routing(
    logits: Tensor, input_ids: Tensor, table: Tensor, scale: float, tuning: Tuning = Tuning()
) -> tuple[Tensor, Tensor]:
    """Implement `KernelTable.hash_routing`: return weights [T, K] of the logits' dtype and expert
    ids int32 [T, K], which are table[input_ids] of `table` int32 [vocab, K].

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference_hash_routing(logits, input_ids, table, scale)
    rows, k = logits.shape[0], table.shape[1]
    weights, ids = _choices(logits, k)
    if not rows:
        return weights, ids
    held = tuning.rows(power_of_two(k), rows)
    hash_routing_kernel[(tiles(rows, held),)](
        logits,
        input_ids,
        table,
        weights,
        ids,
        rows,
        logits.stride(0),
        scale,
        CHOICES=k,
        WIDE=power_of_two(k),
        ROWS=held,
        **tuning.options(tuning.top_k_routing),
    )
    return weights, ids


def _choices(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, device = logits.shape[0], logits.device
    return torch.empty(rows, k, dtype=logits.dtype, device=device), torch.empty(
        rows, k, dtype=torch.int32, device=device
    )


def top_k_routing(logits: Tensor, k: int, normalize: bool, tuning: Tuning = Tuning()) -> tuple[Tensor, Tensor]:
    """Implement `KernelTable.top_k_routing`: return weights [T, k] of the logits' dtype and expert
    ids int32 [T, k], the largest of softmax(logits [T, E]) first.

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference_top_k_routing(logits, k, normalize)
    rows, experts = logits.shape
    weights, ids = _choices(logits, k)
    if not rows:
        return weights, ids
    block = power_of_two(experts)
    held = tuning.rows(block, rows)
    top_k_routing_kernel[(tiles(rows, held),)](
        logits,
        weights,
        ids,
        rows,
        logits.stride(0),
        EXPERTS=experts,
        BLOCK=block,
        CHOICES=k,
        NORMALIZE=normalize,
        ROWS=held,
        **tuning.options(tuning.top_k_routing),
    )
    return weights, ids
