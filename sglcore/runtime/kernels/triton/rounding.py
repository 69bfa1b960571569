"""Rounding to a narrower float, the same in compiled and in interpreted kernels."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True if kernels run in Triton's interpreter; decided when they are decorated."""


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Return float32 x cast to dtype, rounded to the nearest value, ties to even.

    Triton's interpreter truncates to bfloat16, so there the bits are rounded before the cast. NaN
    does not change, because adding to its bits could make it a number.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x != x, x, near.to(tl.float32, bitcast=True))
    return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Return float32 x rounded to a value of dtype, as float32.

    As if a chain of operations in dtype had stored it.
    """
    return narrow(x, dtype).to(tl.float32)
